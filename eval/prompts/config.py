"""What a user sets about the prompts that are continued; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.common.typed_config import require
from eval.comparison_config import OWN


@dataclass
class PromptsConfig:
    """Which prompts are continued: windows of held-out documents, or the questions of a file."""

    file: str | None = None
    """JSONL in the layout of Spec-Bench, SPEED-Bench or MT-Bench; None takes windows of the data's held-out split."""
    tokens: int = 128
    """Length of a held-out window in tokens; a file's prompts keep their own lengths."""
    limit: int | None = None
    """Questions read from the file, spread evenly over it; None reads all."""
    max_turns: int = 1
    """Turns of a conversation that become prompts; the answers in between are written by the target beforehand."""
    label: str = "text"
    """What the reader is told the text is, in the column `text` of the rows (code, chat ...)."""
    kinds: dict[str, list[str]] = field(default_factory=dict)
    """Kind of question -> categories of the file that are of this kind; {} takes its categories as they are.
    prompts=spec_bench has those of Spec-Bench. mode=drafters and mode=decoders time each kind apart."""

    def __post_init__(self) -> None:
        require(
            not self.kinds or self.file is not None,
            f"prompts.kinds sorts the questions of a file into {', '.join(self.kinds)}, and prompts.file is not set; "
            "give prompts.file=FILE.jsonl (Spec-Bench's is data/spec_bench/question.jsonl of its repository)",
        )
        categories = [one for of_kind in self.kinds.values() for one in of_kind]
        require(
            all(self.kinds.values()) and len(set(categories)) == len(categories) and OWN not in self.kinds,
            f"prompts.kinds={self.kinds}: a kind without categories has no questions, a category in two would count in "
            f"one of them alone, and {OWN} is what all questions of a file are called. Name each category once",
        )
        require(self.tokens >= 1, f"prompts.tokens={self.tokens}; a prompt holds at least 1 token")
        require(self.limit is None or self.limit >= 2, f"prompts.limit={self.limit}; read at least 2 questions")
        require(self.max_turns >= 1, f"prompts.max_turns={self.max_turns}; use at least the first turn")

    @property
    def file_kinds(self) -> list[str]:
        """The kinds of text that `file` holds; none without one."""
        return [] if self.file is None else list(self.kinds) or [OWN]
