"""A corpus of tokens on disk, in which the longest match of any text is found by binary search (REST: He et al. 2024,
"REST: Retrieval-Based Speculative Decoding").

`tokens.bin` holds int32 ids, document after document, BETWEEN behind each; `order.bin` the places of all tokens, sorted
by the text that ends there, read backwards. So the places that end as a text does lie together, those that agree with
more of it in the middle. Both are mapped, not read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from decode.common.checked_json import Count, JsonFile, Sha256, Size
from decode.common.errors import InputError
from decode.common.run_folder import RunEnd
from decode.drafters.provenance import TextOrigin
from decode.drafters.untrained.config import LONGEST_MATCH
from decode.drafters.untrained.index.several_texts import until_end

TOKENS_FILE, ORDER_FILE = "tokens.bin", "order.bin"


class DatastoreManifest(RunEnd):
    """manifest.json of a datastore, written last."""

    tokens: Size
    documents: Count
    token_map_hash: Sha256
    chat_template_hash: Sha256 | None = None
    data: TextOrigin | None = None
    """Its corpus, of which it holds the training split; older datastores do not say it."""


MANIFEST = JsonFile(
    DatastoreManifest,
    "drafts would be looked up in something else",
    "Build it again with python -m distill.datastore.",
)


def manifest_of(folder: str | Path) -> DatastoreManifest | None:
    """What a datastore was made of; None where there is none, InputError where its manifest is damaged."""
    file = Path(folder) / "manifest.json"
    return MANIFEST.read(file) if file.is_file() else None


def order_dtype(num_tokens: int) -> np.dtype:
    """Of the places in `order.bin`."""
    return np.dtype(np.int32 if num_tokens < 2**31 else np.int64)


class Datastore:
    """An open datastore."""

    def __init__(self, tokens: np.ndarray, order: np.ndarray) -> None:
        self._tokens, self._order = tokens, order

    @classmethod
    def open(cls, folder: str | Path, token_map_hash: str | None) -> Datastore:
        """InputError where it is unfinished or damaged, or holds the tokens of another tokenizer."""
        path = Path(folder)
        if not (path / "manifest.json").is_file():
            raise InputError(
                f"datastore={folder} has no manifest.json: it is no datastore, or its build was not finished. Build it "
                "with python -m distill.datastore output_dir=FOLDER (resume=auto goes on with an unfinished one)"
            )
        told = MANIFEST.read(path / "manifest.json")
        if token_map_hash is not None and told.token_map_hash != token_map_hash:
            raise InputError(
                f"datastore={folder} holds tokens of another tokenizer: token map {told.token_map_hash[:12]} there, "
                f"{token_map_hash[:12]} of the target. Build one with python -m distill.datastore target.path=TARGET"
            )
        tokens = _mapped(path / TOKENS_FILE, np.dtype(np.int32), told.tokens)
        return cls(tokens, _mapped(path / ORDER_FILE, order_dtype(told.tokens), told.tokens))

    def found(self, text: Sequence[int], least: int, hits: int, depth: int) -> tuple[int, list[list[int]]]:
        """(tokens of the longest match of the end of `text`, what follows it at up to `hits` places, `depth` tokens of
        the same document each); (0, []) where fewer than `least` tokens match."""
        wanted = list(text[-LONGEST_MATCH:])[::-1]
        place = bisect_left(self._order, wanted, key=partial(self._backwards, len(wanted)))
        near = [self._order[at] for at in (place - 1, place) if 0 <= at < len(self._order)]
        length = max((_common(wanted, self._backwards(len(wanted), at)) for at in near), default=0)
        if length < max(1, least):
            return 0, []
        key = partial(self._backwards, length)
        low = bisect_left(self._order, wanted[:length], key=key)
        high = bisect_right(self._order, wanted[:length], lo=low, key=key)
        step = max(1, (high - low) // hits)
        places = self._order[low:high:step][:hits].tolist()
        follows = (until_end(self._tokens[at + 1 : at + 1 + depth].tolist()) for at in places)
        return length, [one for one in follows if one]

    def _backwards(self, length: int, place: int) -> list[int]:
        """The last `length` tokens up to a place, the last one first."""
        return self._tokens[max(0, place + 1 - length) : place + 1][::-1].tolist()


def _mapped(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    wanted, found = count * dtype.itemsize, file.stat().st_size if file.is_file() else 0
    if wanted != found:
        raise InputError(
            f"{file} has {found} bytes, and manifest.json tells of {count} tokens, {wanted} bytes: the datastore is "
            "damaged or was copied in part. Copy it again, or build it with python -m distill.datastore"
        )
    return np.memmap(file, dtype=dtype, mode="r")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Equal tokens at the beginning."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length
