"""The folder of a report of any mode, bound to the files that decide its figures."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder, open_run, sha256_file
from decode.config import model_folder
from decode.models.compatibility import load_tokenizer
from decode.models.fingerprint import files_fingerprint
from distill.prompts.run_chats import bound_to
from eval.config import EvalConfig

log = get_logger("eval")


def open_report(cfg: EvalConfig) -> AbstractContextManager[RunFolder]:
    """The folder of a run whose prompts are tokens of the target, bound to the files that decide its figures; raises as
    `open_run`."""
    bound = {} if cfg.target.path is None else bound_to(load_tokenizer(cfg.target))
    models = {f"weights of drafts.{name}": path for name, path in cfg.drafts.items()}
    models |= {} if cfg.target.path is None else {"target_weights": cfg.target.path}
    folders = {what: Path(model_folder(path)) for what, path in models.items()}
    known = {what: path for what, path in folders.items() if path.is_file() or (path / "config.json").is_file()}
    bound |= {what: files_fingerprint(path) for what, path in known.items()}
    if cfg.prompts.file is not None:
        bound |= {"prompts_hash": sha256_file(cfg.prompts.file)}
    return open_run(cfg.output_dir, "eval", cfg, cfg.resume, bound_to=bound)


@contextmanager
def planned_report(cfg: EvalConfig, plan: Sequence[str]) -> Iterator[RunFolder | None]:
    """The same once the lines of its plan are told; None where nothing is to be done: the plan alone is asked for, or
    the run is finished."""
    if cfg.plan:
        sys.stdout.write("\n".join(plan) + "\n")
        yield None
        return
    with open_report(cfg) as folder:
        if not folder.is_finished:
            for line in plan:
                log.info(line)
        yield None if folder.is_finished else folder
