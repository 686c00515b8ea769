"""Whether a server that runs already serves what is to be measured."""

from __future__ import annotations

from pathlib import Path

from decode.common.errors import ConfigError, InputError
from eval.config import EvalConfig
from eval.modes.served.engine.client import complete
from eval.modes.served.engine.server import Server, found, models


def check_server(cfg: EvalConfig) -> None:
    """InputError unless the server at served.url serves target.path, drafts, and drafts decode.num_draft_tokens."""
    url, own = cfg.served.url, cfg.target.path
    assert url is not None
    assert own is not None
    server = found(url)
    listed = models(server)
    names = {str(one.get(key)) for one in listed for key in ("id", "root")}
    expected = cfg.served.model or own
    if expected not in names and not any(_same_folder(expected, name) for name in names):
        raise InputError(
            f"served.url={url} serves {', '.join(sorted(names))}, and the target is {expected}: counters of another "
            f"model say nothing of this draft. Start it with {own}; or, where that is the same model by another name, "
            f"give served.model={listed[0]['id']}"
        )
    _check_length(cfg, server)


def _same_folder(one: str, other: str) -> bool:
    return Path(one).is_dir() and Path(other).is_dir() and Path(one).resolve() == Path(other).resolve()


def _check_length(cfg: EvalConfig, server: Server) -> None:
    """The engine counts by position, as many as it drafts."""
    complete(server, [[1, 2, 3]], 2, 0.0, None, 1)
    k, asked = len(server.counters().accepted), cfg.decode.num_draft_tokens
    if k == 0:
        raise InputError(
            f"served.url={server.url} drafts nothing: its /metrics has no vllm:spec_decode counters. Start it with "
            "--speculative-config, as python -m train.export prints it, and without --disable-log-stats"
        )
    if k != asked:
        raise ConfigError(
            f"served.url={server.url} drafts {k} tokens a round, and decode.num_draft_tokens={asked}; give "
            f"decode.num_draft_tokens={k}, so that both draft alike"
        )
