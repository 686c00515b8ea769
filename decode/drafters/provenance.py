"""draftsmith.json: the family a draft was saved as, the target and texts that it was trained on, sums of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from decode.common.checked_json import Content, JsonFile, PlainPath, Sha256, Share, Size, Text
from decode.common.errors import InputError
from decode.common.run_folder import sha256_file

FILE = "draftsmith.json"
SCHEMA = 1
CHECKED = ("config.json", "generation_config.json")
"""Small files whose sums are compared at once: no size or shape shows an edited rotary base or end of text."""


class TextOrigin(Content):
    """The corpus that something was made of, and its shares, as the group `data` names them; the rest is kept."""

    model_config = ConfigDict(extra="allow")

    name: Text
    path: Text | None
    subset: Text | None
    validation_share: Share
    heldout_share: Share

    @model_validator(mode="after")
    def _is_whole(self) -> TextOrigin:
        if self.name != "tasks" and (self.path is None) != (self.name in ("python_stdlib", "everyday")):
            raise ValueError(
                f"path={self.path!r} does not go with name={self.name!r}: python_stdlib and everyday have none"
            )
        if self.validation_share + self.heldout_share >= 1:
            raise ValueError("validation_share and heldout_share leave nothing to train on")
        return self


class TrainedTarget(Content):
    """The target that a draft was trained for."""

    path: Text
    fingerprint: Text
    vocab_size: Size | None = None
    token_map_hash: Sha256 | None = None
    chat_template_hash: Sha256 | None = None
    weights: Text | None = None
    """Fingerprint of the weights in memory (`decode.models.fingerprint`); older drafts have none."""
    quantization: Text | None = None
    """The scheme that quantised it as it was loaded. A head also serves the target as it was before, and others."""


class Provenance(Content):
    """What is read back of draftsmith.json."""

    version: int = Field(SCHEMA, alias="schema", ge=SCHEMA, le=SCHEMA)
    family: Text
    target: TrainedTarget | None = None
    data: TextOrigin | None = None
    config: dict[str, Any] | None = None
    sha256: dict[PlainPath, Sha256] = {}

    @model_validator(mode="after")
    def _names_its_target(self) -> Provenance:
        if self.target is None and self.family != "lm":
            raise ValueError(
                f"target is null or missing, and a {self.family} draft reads hidden states of the target that it was "
                "trained on"
            )
        return self

    @model_validator(mode="after")
    def _names_its_texts(self) -> Provenance:
        """The texts are those of config.data, or those of the records, which have their own corpus."""
        config, here = self.config or {}, None if self.data is None else self.data.model_dump()
        if config.get("records") and here is None:
            raise ValueError(f"data is null or missing, and config.records is {config['records']!r:.80}")
        if self.config is not None and not config.get("records") and here != config.get("data"):
            raise ValueError(f"data is {here!r:.80}, and config.data is {config.get('data')!r:.80}")
        return self


PROVENANCE = JsonFile(
    Provenance,
    "a draft of another kind, for another target or trained on the texts of a report could be taken for a good one",
    "Copy the draft's folder again, or train it anew.",
)


def read_provenance(folder: str | Path) -> Provenance | None:
    """draftsmith.json of a draft's folder, None where there is none; InputError where it is damaged, and where one of
    the CHECKED files is not the one that was written with it."""
    if not (Path(folder) / FILE).is_file():
        return None
    found = PROVENANCE.read(Path(folder) / FILE)
    for name in CHECKED:
        check_sum(Path(folder) / name, found)
    return found


def check_sum(file: Path, provenance: Provenance) -> None:
    """Raise InputError where `file` is not the one that was written with its draftsmith.json."""
    told = provenance.sha256.get(file.name)
    if told is not None and file.is_file() and sha256_file(file) != told:
        raise InputError(
            f"{file} has SHA-256 {sha256_file(file)}, and {FILE} says {told}: it was edited or damaged after the "
            f"training. {PROVENANCE.remedy} Where the edit is meant, take {file.name} out of sha256 in {FILE}"
        )
