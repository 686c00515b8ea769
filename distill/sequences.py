"""What training reads: sequences of records or of text, by number, and p of a batch of them."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decode.common.errors import ConfigError, InputError
from decode.common.progress import get_logger
from decode.common.run_folder import sha256_file
from distill.corpora.corpus import Corpus, Document, Split, in_groups
from distill.objectives.target_distribution import TargetDistribution
from distill.prompts.chat import check_words, encode_chat
from distill.prompts.cut_answers import CutAnswers, cut_at
from distill.prompts.tokenizer import encode_texts, start_ids
from distill.records.config import RecordsConfig
from distill.records.distribution_stores import Head

if TYPE_CHECKING:
    from distill.records.record_folder import RecordFolder

DOCUMENTS_AT_ONCE = 64

log = get_logger("distill")


@dataclass(frozen=True)
class TrainSequence:
    """One sequence to learn from."""

    ids: np.ndarray
    """(L,) int64 token ids."""
    loss_mask: np.ndarray
    """(L,) bool: the token is to be learned; never the first one."""
    payload: dict[str, np.ndarray] | None = None
    """Rows of p, one per learned token; None for text."""
    features: dict[str, np.ndarray] = field(default_factory=dict)
    """Coded hidden states, a row per token; empty where none were asked for."""
    document: str = ""
    """Id of the document it was cut from, for messages."""
    cut: tuple[int, int] = (0, 0)
    """Of a chat: answers that reach beyond it, and their tokens that it lacks."""


Placed = tuple[TrainSequence, int, int]
"""A sequence, its row b in the batch, and the column where it starts."""


class RecordSequences:
    """The records of one split, cut to `max_length` tokens, with p of one of their stores and some layers; without p
    where they keep none."""

    def __init__(
        self, folder: RecordFolder, indices: np.ndarray, max_length: int, store: str | None, layers: Sequence[int] = ()
    ) -> None:
        self.folder, self.indices, self.max_length, self.layers = folder, indices, max_length, tuple(layers)
        self.store = None if store is None else folder.layout.store_named(store)
        self.lengths = np.minimum(folder.lengths[indices], max_length)

    @property
    def sha256(self) -> str:
        """Of the folder's manifest, which names the bytes of every shard."""
        return sha256_file(self.folder.path / "manifest.json")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> TrainSequence:
        stores = [] if self.store is None else [self.store.name]
        record = self.folder.read(int(self.indices[index]), stores, self.layers)
        mask = record.loss_mask[: self.max_length]
        payload = {name: rows[: mask.sum()] for name, rows in record.payload.items()} if stores else None
        features = {name: rows[: self.max_length] for name, rows in record.features.items()}
        return TrainSequence(record.ids[: self.max_length], mask, payload, features, record.meta["document"])

    def collate(
        self, items: Sequence[Placed], shape: tuple[int, int], device: torch.device | str, head: Head | None = None
    ) -> TargetDistribution | None:
        """p of a batch of `shape` (B, T) holding `items`: row b*T + t of the token after column t, stored wherever that
        token is to be learned."""
        if self.store is None:
            return None
        row_index = torch.full((shape[0] * shape[1],), -1, dtype=torch.int64)
        stored = 0
        for sequence, row, start in items:
            learned = torch.from_numpy(np.flatnonzero(sequence.loss_mask))
            row_index[row * shape[1] + start + learned - 1] = torch.arange(stored, stored + len(learned))
            stored += len(learned)
        payloads = [sequence.payload for sequence, _, _ in items if sequence.payload is not None]
        arrays = {}
        for name, (row_shape, dtype) in self.store.shapes.items():
            none = np.empty((0, *row_shape), dtype)  # serves a batch of nothing but padding
            arrays[name] = np.concatenate([none, *(payload[name] for payload in payloads)]).astype(dtype, copy=False)
        return self.store.distribution(arrays, row_index.to(device), head)

    def features(self, items: Sequence[Placed], shape: tuple[int, int], layers: Sequence[int]) -> Tensor | None:
        """(B, T, len(layers), d) bfloat16 hidden states of the target on the CPU, row t after reading token t, 0 where
        no token stands; None for no layers. All of them must be among those asked for."""
        if not layers:
            return None
        assert set(layers) <= set(self.layers), (layers, self.layers)
        states = torch.zeros(*shape, len(layers), self.folder.layout.hidden_size, dtype=torch.bfloat16)
        for sequence, row, start in items:
            arrays = {name: torch.from_numpy(rows) for name, rows in sequence.features.items()}
            states[row, start : start + len(sequence.ids)] = self.folder.feature_code.decode(arrays, layers)
        return states


class TextSequences:
    """Token ids of a whole corpus in memory, cut into sequences."""

    def __init__(self, sequences: list[TrainSequence]) -> None:
        self._documents = [sequence.document for sequence in sequences]
        self._starts = np.cumsum([0, *(len(sequence.ids) for sequence in sequences)])
        self._ids = np.concatenate([sequence.ids for sequence in sequences]).astype(np.int32)
        self._masks = np.concatenate([sequence.loss_mask for sequence in sequences])
        self.lengths = np.diff(self._starts)

    @property
    def sha256(self) -> str:
        """Of all tokens, with what is learned of them and where sequences begin."""
        found = hashlib.sha256()
        for part in (self._ids, self._masks, self._starts):
            found.update(part.tobytes())
        return found.hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TrainSequence:
        part = slice(int(self._starts[index]), int(self._starts[index + 1]))
        return TrainSequence(self._ids[part].astype(np.int64), self._masks[part], document=self._documents[index])

    def collate(
        self, items: Sequence[Placed], shape: tuple[int, int], device: torch.device | str, head: Head | None = None
    ) -> None:
        """Text knows no distributions."""

    def features(self, items: Sequence[Placed], shape: tuple[int, int], layers: Sequence[int]) -> None:
        """Nor hidden states."""


class SequenceSource(Protocol):
    """Sequences by number, with p and hidden states of a batch of them where they are known."""

    lengths: np.ndarray
    """(n,) tokens of each."""

    @property
    def sha256(self) -> str:
        """Of what is learned from."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TrainSequence: ...

    def collate(
        self, items: Sequence[Placed], shape: tuple[int, int], device: torch.device | str, head: Head | None = None
    ) -> TargetDistribution | None:
        """p of a batch of `shape` (B, T) holding `items`; None where it is not known."""
        ...

    def features(self, items: Sequence[Placed], shape: tuple[int, int], layers: Sequence[int]) -> Tensor | None:
        """(B, T, len(layers), d) hidden states of the target; None where there are none."""
        ...


def record_sequences(
    folder: RecordFolder, split: str, max_length: int, store: str | None = None, layers: Sequence[int] = ()
) -> RecordSequences:
    """The sequences of `split`. `store` picks one of several; None is the first that the records were written with, if
    there is any.

    `layers` are those whose hidden states `features` can give. Raises ConfigError where there is no such store,
    InputError where there are no such layers and where the split is empty.
    """
    _check_layers(folder, layers)
    names = folder.layout.store
    if store is not None and store not in names:
        raise ConfigError(
            f"{folder.path} holds the stores {', '.join(names) or 'none'}, not {store!r}; ask for one of them"
        )
    indices = folder.indices(split)
    if not len(indices):
        raise InputError(
            f"{folder.path} holds no record of the {split} split; write some with `python -m distill` "
            f"prompts.{'validation_count' if split == 'validation' else 'count'}=..."
        )
    cut = int((folder.lengths[indices] > max_length).sum())
    if cut:
        log.info(
            "%d of %d %s records of %s have more than %d tokens; what lies behind those is not learned, so use a "
            "longer sequence_length",
            *(cut, len(indices), split, folder.path, max_length),
        )
    return RecordSequences(folder, indices, max_length, store or next(iter(names), None), layers)


def _check_layers(folder: RecordFolder, layers: Sequence[int]) -> None:
    kept = folder.layout.features
    there = [] if kept is None else kept.layers
    if not set(layers) <= set(there):
        again = f"{folder.path}_features"
        command = _scored_again(folder, [*dict.fromkeys([*there, *layers])], again)
        raise InputError(
            f"{folder.path} holds the hidden states {there or 'of no layer'}, and the draft reads {list(layers)}. "
            f"Score the texts again with `{command}` and train with records={again}, or have them made in training "
            "(target_source=live)"
        )


def _scored_again(folder: RecordFolder, layers: list[int], output_dir: str) -> str:
    """The command that writes the same texts with the hidden states of `layers`, and p as it was kept."""
    kept, usual = folder.manifest.config.records, RecordsConfig()
    same = {name: getattr(kept, name) for name in ("store", "head", "tail", "topk", "shard_size")}
    if folder.layout.features is not None:
        same["features.code"] = folder.layout.features.code
    changed = {name: value for name, value in same.items() if value != attrgetter(name)(usual)}
    given = {f"records.{name}": value for name, value in (changed | {"features.layers": layers}).items()}
    first = {
        "target.path": folder.target_path or folder.manifest.target.path,
        "responses": "records",
        "from_records": folder.path,
    }
    arguments = [f"{key}={_plain(value)}" for key, value in (first | given | {"output_dir": output_dir}).items()]
    return shlex.join(["python", "-m", "distill", *arguments])


def _plain(value: object) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def text_sequences(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, split: Split, length: int, eos: int | None = None
) -> TextSequences:
    """Every document of `split`, tokenised, ended by `eos` (None: the tokenizer's own), cut into windows of `length`.
    Conversations that the chat template cannot take are left out; InputError where there are too many, or no others.

    Plain text is learned whole but for a window's first token, chat only where the assistant speaks.
    """
    eos = tokenizer.eos_token_id if eos is None else eos  # type: ignore[assignment]
    found: list[TrainSequence] = []
    for documents in in_groups(corpus.documents(split), DOCUMENTS_AT_ONCE):
        found += _text_windows([one for one in documents if one.text is not None], tokenizer, length, eos)
        chats = [one for one in documents if one.messages is not None]
        windows = [corpus.bad.attempt(_chat_window, chat, tokenizer, length) for chat in chats]
        found += [window for window in windows if window is not None]
    corpus.bad.check()
    if not found:
        raise InputError(f"{corpus.where}: no document of the {split} split gives a sequence to learn from")
    answers, tokens = (sum(one.cut[part] for one in found) for part in (0, 1))
    if answers:
        told = CutAnswers(answers=answers, tokens=tokens, limit=length).line()
        log.info("%s split: %s, so use a longer sequence_length", split, told)
    return TextSequences(found)


def _text_windows(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, length: int, eos: int | None
) -> list[TrainSequence]:
    start, end = start_ids(tokenizer), [] if eos is None else [eos]
    found = []
    encoded = encode_texts(tokenizer, [document.text or "" for document in documents])
    for document, ids in zip(documents, encoded, strict=True):
        for window in in_groups(ids + end, length - len(start)):
            whole = np.array([*start, *window], dtype=np.int64)
            learned = np.arange(len(whole)) > 0
            found += [TrainSequence(whole, learned, document=document.id)] if len(whole) > 1 else []
    return found


def _chat_window(document: Document, tokenizer: PreTrainedTokenizerBase, length: int) -> TrainSequence:
    messages = document.messages or []
    ids, mask = encode_chat(tokenizer, messages, document.where)
    check_words(tokenizer, messages, document.where)
    return TrainSequence(
        np.array(ids[:length], dtype=np.int64),
        np.array(mask[:length], dtype=bool),
        document=document.id,
        cut=cut_at(length, mask),
    )
