"""Record folders: shards, and a manifest written last; unfinished, damaged or foreign ones are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from decode.common.checked_json import shown, write_atomically
from decode.common.errors import InputError
from decode.common.progress import get_logger
from decode.common.run_folder import RUN, RunFolder
from decode.models.describe import ModelDescription
from decode.models.fingerprint import comparable
from distill.records.distribution_stores import Layout
from distill.records.feature_codes import FeatureCode
from distill.records.feature_fitting import CODE_FILE, load_code
from distill.records.file_checks import check_size, check_sum, described
from distill.records.record_manifest import (
    COUNTS,
    MANIFEST,
    RECORDS_VERSION,
    REMEDY,
    SHARD,
    Manifest,
    RecordedTarget,
    ShardSummary,
)
from distill.records.record_shards import SPLITS, Record, Shard, drafting_of, shard_bytes, summary
from distill.records.recorded_drafts import RecordedDraft, pooled
from distill.records.safetensors_file import array_sums

IDENTITIES = {
    "fingerprint": "the records hold the distributions of other weights",
    "quantization": "the records hold the distributions of weights that are rounded otherwise",
    "vocab_size": "the same row would mean other tokens",
    "token_map_hash": "the same id would mean other text",
    "chat_template_hash": "the sequences were laid out by another chat template",
}

log = get_logger("records")


def identity_of(target: ModelDescription, weights: str | None = None) -> dict[str, Any]:
    """What of a target its records are bound to, and the fingerprint of its weights in memory, where it is known."""
    return {"path": target.path, **{name: getattr(target, name) for name in IDENTITIES}, "weights": weights}


class RecordWriter:
    """Writes shards, each a pure function of its number, so that a killed and resumed run ends with the same files."""

    def __init__(self, run: RunFolder, layout: Layout, draft: RecordedDraft | None = None) -> None:
        """The code of hidden states, where it is fitted, lies in the folder already; `draft` is what responses are
        written with."""
        self.run, self.layout, self.draft = run, layout, draft
        self.code_file = None
        if layout.features is not None and layout.features.is_fitted:
            self.code_file = described(run.file(CODE_FILE))

    def existing(self, index: int) -> ShardSummary | None:
        """The summary of a complete shard of an earlier, killed run; None where it is missing or damaged."""
        shard, note = self._files(index)
        if not (shard.is_file() and note.is_file()):
            return None
        try:
            known = SHARD.read(note)
            if known.file != f"shards/{shard.name}":
                raise InputError(f"{note} is the summary of {known.file}")
            check_size(self.run.path, known)
            Shard(shard, self.layout, known).check_content()
        except InputError as error:
            log.warning("%s is written again: %s", shard, error)
            return None
        if known.code_file != self.code_file:
            log.warning("%s was coded by another %s; it is written again", shard, CODE_FILE)
            return None
        return known

    def write(self, index: int, records: Sequence[Record]) -> ShardSummary:
        """Write shard `index`, then its summary."""
        shard, note = self._files(index)
        content = shard_bytes(records, self.layout)
        told = {"code_file": self.code_file, "drafting": drafting_of(records, self.draft)}
        sums = array_sums(BytesIO(content))
        known = ShardSummary(file=f"shards/{shard.name}", **summary(content, records), **told, arrays=sums)
        write_atomically(shard, content)
        SHARD.write(note, known.model_dump())
        return known

    def finish(
        self, num_shards: int, target: ModelDescription, weights: str | None, provenance: dict[str, Any]
    ) -> dict[str, Any]:
        """Merge the shards of all ranks into the manifest; rank 0 only, once all shards are there. `weights` is the
        fingerprint of those that made them (`decode.models.fingerprint`)."""
        shards = [SHARD.read(self._files(index)[1]) for index in range(num_shards)]
        manifest = {
            "records_version": RECORDS_VERSION,
            "target": identity_of(target, weights),
            "layout": asdict(self.layout),
            **provenance,
            "counts": {name: sum(getattr(shard, name) for shard in shards) for name in COUNTS},
            "finish_reasons": dict(sum((Counter(shard.finish_reasons) for shard in shards), Counter())),
            "bytes_per_learned_token": self.layout.bytes_per_token,
            "code_file": None if self.code_file is None else self.code_file.model_dump(),
            "feature_errors": self._feature_errors(shards),
            "drafting": [one.model_dump() for one in pooled(shard.drafting for shard in shards)],
            "shards": [shard.model_dump() for shard in shards],
        }
        for leftover in [*self.run.path.glob(".*.tmp"), *self.run.path.glob("shards/.*.tmp")]:
            leftover.unlink()
        self.run.finish(manifest, MANIFEST)
        return manifest

    def _feature_errors(self, shards: Sequence[ShardSummary]) -> dict[str, float]:
        """Layer -> root mean square, over all tokens, of a token's relative error."""
        if self.layout.features is None:
            return {}
        tokens = sum(shard.tokens for shard in shards)
        totals = np.sum([shard.feature_errors for shard in shards if shard.tokens], axis=0)
        return {
            str(n): float(np.sqrt(total / tokens)) for n, total in zip(self.layout.features.layers, totals, strict=True)
        }

    def _files(self, index: int) -> tuple[Path, Path]:
        return self.run.file(f"shards/shard-{index:05d}.safetensors"), self.run.file(f"shards/shard-{index:05d}.json")


class RecordFolder:
    """Records opened for reading, by number across all shards."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.layout = manifest.layout
        self.target_path: str | None = None
        """Where the target lies, if it is not where it was recorded."""
        self.shards = [Shard(path / shard.file, self.layout, shard) for shard in manifest.shards]
        self._starts = np.cumsum([0, *(len(shard.split) for shard in self.shards)])
        self.lengths = np.concatenate([shard.lengths for shard in self.shards])
        """(records,) tokens of each record."""
        self.prompts = np.concatenate([shard.prompts for shard in self.shards])
        """(records,) number of the prompt of each record, rising."""
        self._splits = np.concatenate([shard.split for shard in self.shards])

    @classmethod
    def open(cls, path: Path | str, target: ModelDescription | None = None) -> RecordFolder:
        """Validate, then open. Of a shard nothing is read but its header and a few numbers a record: the bytes of an
        array are held against their checksum when some of it is read first, once in a process.

        Raises InputError for an unfinished folder, another target, token map or chat template (with `target`), and a
        missing or truncated file, or a damaged header.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        if target is not None:
            _check_target(path, manifest.target, target)
        for known in manifest.shards:
            check_size(path, known)
        if manifest.code_file is not None:  # a few numbers, which all states are read by
            check_sum(check_size(path, manifest.code_file), manifest.code_file)
        folder = cls(path, manifest)
        folder.target_path = None if target is None else target.path
        if (np.diff(folder.prompts) < 0).any():
            raise InputError(f"{path}: the prompts of its records do not rise from shard to shard. {REMEDY}")
        if folder.layout.features is not None:
            assert folder.feature_code is not None
        return folder

    def __len__(self) -> int:
        return len(self.lengths)

    def split_of(self, index: int) -> str:
        """`train` or `validation`."""
        return SPLITS[self._splits[index]]

    def indices(self, split: str) -> np.ndarray:
        """(n,) numbers of the records of `split`."""
        return np.flatnonzero(self._splits == SPLITS.index(split))

    @cached_property
    def feature_code(self) -> FeatureCode:
        """What turns the coded hidden states of this folder back."""
        assert self.layout.features is not None, "a folder without hidden states was asked for some"
        return load_code(self.layout.features, self.path)

    def learned_ids(self, indices: np.ndarray, most: int) -> Iterator[np.ndarray]:
        """Shard by shard, the learned tokens among the first `most` of each of these records; nothing else is read."""
        for shard, first, end in zip(self.shards, self._starts, self._starts[1:], strict=False):
            yield shard.learned_ids(indices[(indices >= first) & (indices < end)] - first, most)

    def read(self, index: int, stores: Sequence[str] | None = None, layers: Sequence[int] | None = None) -> Record:
        """One record, with these of its stores and layers; None is all that it was written with. Raises InputError
        where its shard is not what was written."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        record = self.shards[shard].read(index - int(self._starts[shard]), stores, layers)
        record.meta["seed"] = self.manifest.seed
        return record


def _read_manifest(path: Path) -> Manifest:
    if not path.is_dir():
        close = get_close_matches(path.name, [one.parent.name for one in path.parent.glob("*/manifest.json")], n=1)
        remedy = f"did you mean {path.with_name(close[0])}?" if close else "write one with `python -m distill`"
        raise InputError(f"{path}: no such record folder; {remedy}")
    if not (path / "manifest.json").is_file():
        raise InputError(
            f"{path} holds no manifest.json, so it is not a finished record folder; if its run was killed, finish it "
            "by the same `python -m distill` command with resume=auto"
        )
    manifest = MANIFEST.read(path / "manifest.json")
    if (path / "run.json").is_file():
        _check_run(path, manifest)
    return manifest


def _check_run(path: Path, manifest: Manifest) -> None:
    """The manifest says of its texts and settings what the run was started with, so that neither file was edited."""
    started, ended = RUN.read(path / "run.json").config, manifest.config.model_dump()
    # texts of other records have the corpus of those
    names = ["records", "batch_size", "seed", *(["data"] if started.get("responses") != "records" else [])]
    for name in names:
        if started.get(name) != ended[name]:
            raise InputError(
                f"{path / 'manifest.json'} says config.{name}={shown(ended[name])}, and run.json "
                f"{shown(started.get(name))}: {MANIFEST.why}. {REMEDY}"
            )


def _check_target(path: Path, recorded: RecordedTarget, target: ModelDescription) -> None:
    """By its weights too, where the files tell them: their fingerprint reads their edges, and layers in between may
    have been trained further."""
    found = {name: (getattr(recorded, name), getattr(target, name)) for name in IDENTITIES}
    stored = target.stored_fingerprint
    if comparable(recorded.weights, stored):
        found["weights"] = (recorded.weights, stored)
    for name, (there, here) in found.items():
        if there != here:
            meaning = IDENTITIES.get(name, "the records hold the distributions of other weights")
            raise InputError(
                f"{path} was recorded from {recorded.path} with {name} {there}, and target.path={target.path} "
                f"has {here}: {meaning}. Give the target that was recorded, or record this one with `python -m "
                "distill`"
            )
