"""The datastore stage: tokenise the training split, sort its places, write the manifest last."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.common.errors import InputError
from decode.common.extras import extra, require_installed
from decode.common.progress import get_logger, progress
from decode.common.run_folder import RunFolder, check_run, free_disk_check, open_run
from decode.config import ModelConfig
from decode.drafters.untrained.datastore import BETWEEN, MANIFEST, ORDER_FILE, TOKENS_FILE, order_dtype
from decode.models.compatibility import load_tokenizer, token_map_hash
from distill.corpora.configured import load_corpus
from distill.corpora.corpus import Corpus, in_groups
from distill.datastore.config import DatastoreConfig
from distill.prompts.chat import render
from distill.prompts.tokenizer import encode_texts

GROUP = 256
"""Documents tokenised together."""
SORT = "pydivsufsort"
log = get_logger("datastore")


def run(config: DatastoreConfig) -> None:
    """Write a datastore. Raises ConfigError and InputError before anything is written."""
    require_installed(SORT, "python -m distill.datastore", f"Install it, {extra('train')}")
    tokenizer = load_tokenizer(config.target)
    corpus = load_corpus(config.data)
    if config.plan:
        most = "all tokens" if config.tokens is None else f"at most {config.tokens} tokens"
        sys.stdout.write(f"plan: {most} of the training split of {corpus.where}; 8 bytes a token, 12 beyond 2**31\n")
        return
    if check_run(config.output_dir, "datastore", config, config.resume):
        return
    with open_run(config.output_dir, "datastore", config, config.resume) as folder:
        if not folder.is_finished:
            _build(folder, corpus, tokenizer, config)


def _build(folder: RunFolder, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DatastoreConfig) -> None:
    documents = _write_tokens(folder.file(TOKENS_FILE), corpus, tokenizer, config.tokens)
    tokens = np.fromfile(folder.file(TOKENS_FILE), dtype=np.int32)
    free_disk_check(folder.path, tokens.size * order_dtype(tokens.size).itemsize)
    log.info("sorting %d tokens of %d documents", tokens.size, documents)
    sorted_places(tokens).tofile(folder.file(ORDER_FILE))
    folder.finish(
        {
            "tokens": int(tokens.size),
            "documents": documents,
            "vocab_size": len(tokenizer),
            "token_map_hash": token_map_hash(tokenizer),
        },
        MANIFEST,
    )
    log.info("%s: %d tokens of %d documents", folder.path, tokens.size, documents)


def _write_tokens(path: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, most: int | None) -> int:
    """int32 ids of one document after another, BETWEEN behind each; the number of documents. InputError where there
    are none."""
    written = documents = 0
    texts = _texts(corpus, tokenizer)
    with path.open("wb") as file:
        for group in progress(in_groups(texts, GROUP), "tokenising", "groups"):
            for ids in encode_texts(tokenizer, group):
                kept = [*ids, BETWEEN] if most is None else [*ids, BETWEEN][: most - written]
                np.array(kept, dtype=np.int32).tofile(file)
                written, documents = written + len(kept), documents + 1
                if written == most:
                    return documents
    if not written:
        raise InputError(f"{corpus.where}: its training split holds no text, so nothing can be drafted from it")
    return documents


def _texts(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    for document in corpus.documents("train"):
        if document.text is not None:
            yield document.text
        elif document.messages:
            yield render(tokenizer, document.messages, document.id)


def sorted_places(tokens: np.ndarray) -> np.ndarray:  # (N,) int32 -> (N,)
    """Places of the tokens, sorted by the text that ends there, read backwards: the suffix array of the reversed
    corpus (libdivsufsort: Mori 2008)."""
    from pydivsufsort import divsufsort  # an extra

    backwards = np.ascontiguousarray(tokens[::-1]) - BETWEEN
    return (tokens.size - 1 - divsufsort(backwards)).astype(order_dtype(tokens.size))
