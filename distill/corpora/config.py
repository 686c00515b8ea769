"""What a user sets about the texts that everything is made of; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decode.common.typed_config import require, require_at_least
from decode.config import ChatConfig

CorpusName = Literal["python_stdlib", "everyday", "text", "jsonl", "parquet", "dataset", "hub", "tasks", "own"]
TEXT_ALONE = ("python_stdlib", "text", "tasks")  # corpora without chats


@dataclass
class DataConfig(ChatConfig):
    """Where documents come from, how they are split, and how chats among them are written (group `data`)."""

    name: CorpusName = "python_stdlib"
    """Kind of corpus; python_stdlib and everyday take no `path`, tasks may (without one they are made from that
    library), all others need it; own, of eval alone, is the draft's."""
    path: str | None = None
    """File or folder (text, jsonl, parquet, dataset, tasks), or hub id (hub)."""
    subset: str | None = None
    """Configuration of a hub or builder dataset; None is its default."""
    hub_split: str | None = None
    """Split of a dataset to read; None is `train`, else the first one whose name starts with it."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) of the dataset; None is the default branch."""
    streaming: bool = False
    """Read a dataset row by row without downloading it whole."""
    text_field: str = "text"
    """Row field that holds plain text."""
    messages_field: str = "messages"
    """Row field that holds chat messages; a row that has it is read as chat, even where it has text too. Unless set,
    `conversations`, `conversation`, `dialogue` and `dialog` are read as well."""
    id_field: str | None = None
    """Row field that names the document; None is file and row number."""
    validation_share: float = 0.03
    """Share of documents that choose the checkpoint."""
    heldout_share: float = 0.05
    """Share of documents kept for evaluation; training and records never see them."""
    max_documents: int | None = None
    """Documents read at most, before they are split; None reads all."""
    bad_rows: float = 0.05
    """Share of the rows that may be left out because they cannot be used; with more, nothing is done. 0 refuses any."""
    learn_prompt: bool = True
    """Learn the prompt's tokens of plain text too: they cost nothing more to record. Chat prompts are never learned."""
    system: Literal["drop", "merge"] | None = None
    """For a chat template that refuses the system's messages: drop leaves them out, merge puts their text before the
    user's first message; None hands them over as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.name != "own" or self.path is None,
            f"data.path={self.path} does not say what lies there; name it, as data=jsonl or data=text",
        )
        needs_path = self.name not in ("python_stdlib", "everyday", "tasks", "own")
        require(
            not needs_path or bool(self.path), f"data={self.name} needs data.path, the file, folder or hub id to read"
        )
        require(
            self.name not in ("python_stdlib", "everyday") or self.path is None,
            f"data={self.name} reads what comes with the interpreter or with draftsmith, not {self.path!r}. Name what "
            "lies there, as data=jsonl or data=text",
        )
        for name in ("validation_share", "heldout_share"):
            share = getattr(self, name)
            require(0 <= share < 1, f"data.{name}={share} is not a share in [0, 1)")
        require(0 <= self.bad_rows <= 1, f"data.bad_rows={self.bad_rows} is not a share in [0, 1]")
        rest = 1 - self.validation_share - self.heldout_share
        require(rest > 0, f"data.validation_share + data.heldout_share leave {rest:.3f} of the documents to train on")
        require_at_least(1, self, "data.", "max_documents")

    @property
    def has_chats(self) -> bool:
        """Whether documents may be chats."""
        return self.name not in TEXT_ALONE


def check_corpus(data: DataConfig | None) -> None:
    """Raise ConfigError where a stage that makes records or drafts is told to read their own corpus, and for settings
    of chats where the corpus has none."""
    require(
        data is None or data.name != "own",
        "data=own is the corpus that a draft was trained on, for `python -m eval`; name one, as data=jsonl "
        "data.path=FILE (with records=FOLDER none is needed)",
    )
    require(
        data is None or data.has_chats or not (data.template or data.date or data.system),
        f"data.template, data.date and data.system say how chats are written, and data={data and data.name} holds "
        "plain text alone; leave them out, or name a corpus of chats, as data=jsonl",
    )
