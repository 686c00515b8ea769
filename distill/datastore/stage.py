"""The datastore stage: tokenise the training split, sort its places, write the manifest last."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.common.extras import extra, require_installed
from decode.common.progress import get_logger, progress
from decode.common.run_folder import RunFolder, check_run, free_disk_check, open_run
from decode.drafters.untrained.index.datastore import MANIFEST, ORDER_FILE, TOKENS_FILE, order_dtype
from decode.drafters.untrained.index.several_texts import BETWEEN
from decode.models.chat_template import settled
from decode.models.compatibility import chat_template_hash, load_tokenizer, token_map_hash
from decode.models.describe import describe_model
from distill.corpora.configured import load_corpus
from distill.corpora.corpus import Corpus, Document, in_groups
from distill.datastore.config import DatastoreConfig
from distill.prompts.chat import check_words, render
from distill.prompts.run_chats import bound_to, with_day
from distill.prompts.tokenizer import encode_texts

GROUP = 256
"""Documents tokenised together."""
SORT = "pydivsufsort"
log = get_logger("datastore")


def run(config: DatastoreConfig) -> None:
    """Write a datastore. Raises ConfigError and InputError."""
    require_installed(SORT, "python -m distill.datastore", f"Install it, {extra('train')}")
    vocab_size, own = describe_model(config.target, loads=False).vocab_size, load_tokenizer(config.target)
    config, bound = replace(config, data=with_day(config.data, own, config.output_dir)), bound_to(own)
    tokenizer = settled(own, config.data, config.data.system)
    corpus = load_corpus(config.data)
    if config.plan:
        most = "all tokens" if config.tokens is None else f"at most {config.tokens} tokens"
        sys.stdout.write(f"plan: {most} of the training split of {corpus.where}; 8 bytes a token, 12 beyond 2**31\n")
        return
    if check_run(config.output_dir, "datastore", config, config.resume, bound):
        return
    with open_run(config.output_dir, "datastore", config, config.resume, bound_to=bound) as folder:
        if not folder.is_finished:
            _build(folder, _tokens(corpus, tokenizer, vocab_size, config.tokens), own, corpus)


def _build(folder: RunFolder, texts: Iterator[list[int]], tokenizer: PreTrainedTokenizerBase, corpus: Corpus) -> None:
    documents = 0
    with folder.file(TOKENS_FILE).open("wb") as file, progress(None, "tokens", "tokenising") as bar:
        for ids in texts:
            np.array(ids, dtype=np.int32).tofile(file)
            documents += 1
            bar.update(len(ids))
    bad_rows = corpus.bad.report()
    tokens = np.fromfile(folder.file(TOKENS_FILE), dtype=np.int32)
    free_disk_check(folder.path, tokens.size * order_dtype(tokens.size).itemsize)
    log.info("sorting %d tokens of %d documents", tokens.size, documents)
    sorted_places(tokens).tofile(folder.file(ORDER_FILE))
    folder.finish(
        {
            "tokens": int(tokens.size),
            "documents": documents,
            "token_map_hash": token_map_hash(tokenizer),
            "chat_template_hash": chat_template_hash(tokenizer),
            "data": asdict(corpus.config),
            "bad_rows": bad_rows.model_dump(),
        },
        MANIFEST,
    )
    log.info("%s: %d tokens of %d documents", folder.path, tokens.size, documents)


def _tokens(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, vocab_size: int, most: int | None
) -> Iterator[list[int]]:
    """The ids of one document after another, BETWEEN behind each and in place of tokens that the target has no
    embedding of, since they were added to the tokenizer alone."""
    left = most
    for group in in_groups(_texts(corpus, tokenizer), GROUP):
        for ids in encode_texts(tokenizer, group):
            kept = [one if one < vocab_size else BETWEEN for one in [*ids, BETWEEN]][:left]
            yield kept
            left = None if left is None else left - len(kept)
            if left == 0:
                return


def _texts(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    for document in corpus.documents("train"):
        if document.text is not None:
            yield document.text
        elif document.messages:
            text = corpus.bad.attempt(_chat_text, tokenizer, document)
            if text is not None:
                yield text


def _chat_text(tokenizer: PreTrainedTokenizerBase, document: Document) -> str:
    assert document.messages is not None
    check_words(tokenizer, document.messages, document.where)
    return render(tokenizer, document.messages, document.where)


def sorted_places(tokens: np.ndarray) -> np.ndarray:  # (N,) int32 -> (N,)
    """Places of the tokens, sorted by the text that ends there, read backwards: the suffix array of the reversed
    corpus (libdivsufsort: Mori 2008)."""
    from pydivsufsort import divsufsort  # an extra

    backwards = np.ascontiguousarray(tokens[::-1]) - BETWEEN
    return (tokens.size - 1 - divsufsort(backwards)).astype(order_dtype(tokens.size))
