"""Record folders: shards, and a manifest written last; unfinished, damaged or foreign ones are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from decode.house.errors import InputError
from decode.house.progress import get_logger
from decode.house.run_folder import RunFolder, read_json, sha256_file, write_atomically, write_json
from decode.models import ModelDescription
from distill.calibration import CODE_FILE, load_code
from distill.features import FeatureCode
from distill.shards import SPLITS, Record, Shard, shard_bytes, summary
from distill.stores import Layout

RECORDS_VERSION = 2
READABLE_VERSIONS = (1, 2)  # 1 knew no hidden states: its layout names none, and is read as a layout that keeps none
COUNTS = ("bytes", "records", "tokens", "learned_tokens")
IDENTITIES = {
    "fingerprint": "the records hold the laws of other weights",
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

    def __init__(self, run: RunFolder, layout: Layout) -> None:
        """The code of hidden states, where it is fitted, lies in the folder already."""
        self.run, self.layout = run, layout
        self.code_file = None
        if layout.features is not None and layout.features.is_fitted:
            self.code_file = _described(run.file(CODE_FILE))

    def existing(self, index: int) -> dict[str, Any] | None:
        """The summary of a complete shard of an earlier, killed run; None where it is missing or damaged."""
        shard, note = self._files(index)
        if not (shard.is_file() and note.is_file()):
            return None
        known = read_json(note)
        if shard.stat().st_size != known["bytes"] or sha256_file(shard) != known["sha256"]:
            log.warning("%s does not match its checksum; it is written again", shard)
            return None
        if known.get("code_file") != self.code_file:
            log.warning("%s was coded by another %s; it is written again", shard, CODE_FILE)
            return None
        return known

    def write(self, index: int, records: Sequence[Record]) -> dict[str, Any]:
        """Write shard `index`, then its summary."""
        shard, note = self._files(index)
        content = shard_bytes(records, self.layout)
        known = {"file": f"shards/{shard.name}", **summary(content, records), "code_file": self.code_file}
        write_atomically(shard, content)
        write_json(note, known)
        return known

    def finish(
        self, num_shards: int, target: ModelDescription, weights: str | None, provenance: dict[str, Any]
    ) -> dict[str, Any]:
        """Merge the shards of all ranks into the manifest; rank 0 only, once all shards are there. `weights` is the
        fingerprint of those that made them (`decode.fingerprint`)."""
        shards = [read_json(self._files(index)[1]) for index in range(num_shards)]
        manifest = {
            "records_version": RECORDS_VERSION,
            "target": identity_of(target, weights),
            "layout": asdict(self.layout),
            **provenance,
            "counts": {name: sum(shard[name] for shard in shards) for name in COUNTS},
            "finish_reasons": dict(sum((Counter(shard["finish_reasons"]) for shard in shards), Counter())),
            "bytes_per_learned_token": self.layout.bytes_per_token,
            "code_file": self.code_file,
            "feature_errors": self._feature_errors(shards),
            "shards": shards,
        }
        for leftover in [*self.run.path.glob(".*.tmp"), *self.run.path.glob("shards/.*.tmp")]:
            leftover.unlink()
        self.run.finish(manifest)
        return manifest

    def _feature_errors(self, shards: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Layer -> root mean square, over all tokens, of a token's relative error."""
        if self.layout.features is None:
            return {}
        tokens = sum(shard["tokens"] for shard in shards)
        totals = np.sum([shard["feature_errors"] for shard in shards if shard["tokens"]], axis=0)
        return {
            str(n): float(np.sqrt(total / tokens)) for n, total in zip(self.layout.features.layers, totals, strict=True)
        }

    def _files(self, index: int) -> tuple[Path, Path]:
        return self.run.file(f"shards/shard-{index:05d}.safetensors"), self.run.file(f"shards/shard-{index:05d}.json")


class RecordFolder:
    """Records opened for reading, by number across all shards."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.layout = Layout.from_manifest(manifest["layout"])
        self.shards = [Shard(path / shard["file"], self.layout) for shard in manifest["shards"]]
        self._starts = np.cumsum([0, *(len(shard.split) for shard in self.shards)])
        self.lengths = np.concatenate([shard.lengths for shard in self.shards])
        """(records,) tokens of each record."""
        self.prompts = np.concatenate([shard.prompts for shard in self.shards])
        """(records,) number of the prompt of each record, rising."""
        self._splits = np.concatenate([shard.split for shard in self.shards])

    @classmethod
    def open(cls, path: Path | str, target: ModelDescription | None = None, checksums: bool = True) -> RecordFolder:
        """Validate, then open. Nothing but the records themselves and the target's description is read.

        Raises InputError for an unfinished folder, another target, token map or chat template (with `target`), and a
        missing, truncated or altered file; `checksums=False` skips the last of these, for ranks whose rank 0 has
        looked.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        if target is not None:
            _check_target(path, manifest["target"], target)
        code_file = manifest.get("code_file")
        for known in [*manifest["shards"], *([code_file] if code_file else [])]:
            _check_file(path / known["file"], known, checksums)
        return cls(path, manifest)

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

    def read(self, index: int, stores: Sequence[str] | None = None, layers: Sequence[int] | None = None) -> Record:
        """One record, with these of its stores and layers; None is all that it was written with."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        record = self.shards[shard].read(index - int(self._starts[shard]), stores, layers)
        record.meta["seed"] = self.manifest["seed"]
        return record


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise InputError(f"{path}: no such record folder; write one with `python -m distill output_dir={path}`")
    if not (path / "manifest.json").is_file():
        raise InputError(
            f"{path} holds no manifest.json, so it is no finished record folder; if its run was killed, finish it by "
            "the same `python -m distill` command with resume=auto"
        )
    manifest = read_json(path / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("stage") != "distill":
        stage = manifest.get("stage") if isinstance(manifest, dict) else None
        raise InputError(f"{path} was written by the stage {stage!r}, not by `distill`; give a folder of records")
    version = manifest.get("records_version")
    if version not in READABLE_VERSIONS:
        readable = " and ".join(map(str, READABLE_VERSIONS))
        raise InputError(
            f"{path} holds records of version {version}, and this program reads version {readable}; write them again"
        )
    missing = [name for name in ("target", "layout", "shards", "seed") if name not in manifest]
    if missing:
        raise InputError(f"{path / 'manifest.json'} lacks {', '.join(missing)}; it was edited. Write the records again")
    return manifest


def _check_target(path: Path, recorded: dict[str, Any], target: ModelDescription) -> None:
    for name, meaning in IDENTITIES.items():
        there, here = recorded.get(name), getattr(target, name)
        if there != here:
            raise InputError(
                f"{path} was recorded from {recorded.get('path')} with {name} {there}, and target.path={target.path} "
                f"has {here}: {meaning}. Give the target that was recorded, or record this one with `python -m "
                "distill`"
            )


def _described(file: Path) -> dict[str, Any]:
    return {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256_file(file)}


def _check_file(file: Path, known: dict[str, Any], checksums: bool) -> None:
    remedy = "Copy the folder again from where it was written, or write the records again into another output_dir"
    if not file.is_file():
        raise InputError(f"{file} is missing, and its folder's manifest names it. {remedy}")
    size = file.stat().st_size
    if size != known["bytes"]:
        raise InputError(f"{file} has {size} bytes, and the manifest says {known['bytes']}: it was cut short. {remedy}")
    found = sha256_file(file) if checksums else known["sha256"]
    if found != known["sha256"]:
        raise InputError(
            f"{file} has SHA-256 {found}, and the manifest says {known['sha256']}: its bytes changed. {remedy}"
        )
