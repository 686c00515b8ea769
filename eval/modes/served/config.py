"""What a user sets about `mode=served`; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from decode.common.typed_config import require, require_at_least


@dataclass
class ServedConfig:
    """`mode=served`: drafts in an engine of the user's, measured beside ours on the same prompts. Draft length, new
    tokens and temperatures of the comparison are `decode.num_draft_tokens`, `decode.max_new_tokens`, `temperatures`."""

    engine: Literal["vllm"] = "vllm"
    """The engine that serves."""
    url: str | None = None
    """A server that runs already, e.g. http://localhost:8000, which drafts with the one draft that `drafts` names; None
    starts servers here, one after another."""
    model: str | None = None
    """What the server at `url` calls the target; None expects target.path."""
    python: str = ".venv-vllm/bin/python"
    """Interpreter of an environment with vLLM, which starts the servers."""
    options: list[str] = field(default_factory=list)
    """Options for every server that is started, as its command line has them, e.g. [--enforce-eager]."""
    start_minutes: float = 30.0
    """Minutes that a server may take until it answers."""
    rounds: int = 3
    """Times that each server is started and timed: what one process says of speed is not what the next one says. A
    schedule takes two at least, for its error bar."""
    prompts: int = 16
    """Prompts on which accepted tokens are compared; batches that are timed are filled from them."""
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 8, 16])
    """Requests asked at once where speed is measured; [] measures none."""
    draft_lengths: list[int] = field(default_factory=lambda: [1, 2, 4])
    """Draft tokens of a round whose speed is measured, each by a server of its own, besides none at all."""
    timed_tokens: int = 64
    """New tokens of a request where speed is measured."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "served.", "rounds", "timed_tokens")
        require(self.prompts >= 2, f"served.prompts={self.prompts}; intervals are over prompts, so use at least 2")
        require(self.start_minutes > 0, f"served.start_minutes={self.start_minutes}; a server needs some time to start")
        for name in ("batch_sizes", "draft_lengths"):
            values = getattr(self, name)
            require(all(one >= 1 for one in values), f"served.{name}={values}; use at least 1")
            require(len(set(values)) == len(values), f"served.{name}={values} repeats one; name each once")
        require(
            self.url is None or self.url.startswith(("http://", "https://")),
            f"served.url={self.url} is no address of a server; give one like http://localhost:8000",
        )
        require(
            self.url is None or not self.options,
            f"served.options={self.options} are for servers that are started here, and served.url={self.url} runs "
            "already; give it those options where it is started",
        )
        require(
            self.model is None or self.url is not None,
            f"served.model={self.model} is what a server that runs already calls the target; give served.url, or leave "
            "it out",
        )
