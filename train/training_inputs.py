"""What a training run starts from, opened and checked before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import distributed
from transformers import PreTrainedTokenizerBase

from decode.common.errors import ConfigError, InputError
from decode.common.progress import get_logger, is_main_process
from decode.common.run_folder import on_main
from decode.common.typed_config import require
from decode.config import ModelConfig
from decode.models.chat_template import settled
from decode.models.checkpoint_check import is_quantised
from decode.models.compatibility import load_tokenizer
from decode.models.describe import ModelDescription, describe_model
from distill.corpora.bad_rows import BadRowCount
from distill.corpora.configured import load_corpus
from distill.corpora.corpus import Corpus
from distill.objectives.config import NEEDS_ALPHA
from distill.objectives.draft_vocabulary import frequent_tokens
from distill.objectives.objective import build_objective, warm_up_of
from distill.prompts.held_out_count import HeldOutCount, count_held_out
from distill.prompts.tokenizer import train_bpe
from distill.records.record_folder import RecordFolder
from distill.sequences import SequenceSource, record_sequences, text_sequences
from train.batches import PackedSource
from train.config import TrainConfig
from train.drafts.blueprint import Blueprint
from train.drafts.registry import FAMILIES

logger = get_logger("train")

DENSE_STORES = ("full", "last_hidden")
LEAST_COVERED = 0.5
"""Share of the learned tokens that a reduced draft vocabulary must hold. It bounds the acceptance of a draft token, so
that of one half a chain keeps a single token at most, however long it is."""


@dataclass(frozen=True)
class Inputs:
    """Checked inputs."""

    target: ModelDescription | None
    tokenizer: PreTrainedTokenizerBase
    blueprint: Blueprint
    train: PackedSource
    validation: PackedSource
    store: str | None
    """The store of the records that p is read from; None for text."""
    data: dict[str, Any] | None
    """The corpus and its shares (fields of DataConfig), from the records' manifest or the configuration."""
    window: int
    """Draft tokens per round of a family that drafts any number."""
    recorded_weights: str | None = None
    """Fingerprint of the weights that made the records (`decode.models.fingerprint`); None without records, and where
    older ones do not say it."""
    held_out: HeldOutCount | None = None
    """Of the corpus; None where older records do not say it."""
    bad_rows: BadRowCount | None = None
    """Rows of the corpus that were left out; None where older records do not say it."""
    covered: float | None = None
    """Share of the training split's learned tokens that a reduced draft vocabulary holds, where it is chosen here."""

    @property
    def window_along_rows(self) -> int | None:
        """Draft tokens of a round of a family that drafts them one by one; None where a family unrolls its rounds."""
        return self.window if self.blueprint.depth is None else None

    @property
    def num_draft_tokens(self) -> int:
        """Of a round, as training judges it and engines are told to start with."""
        return self.blueprint.depth or self.window

    @property
    def vocab_size(self) -> int:
        """Tokens that logits are over."""
        return self.target.vocab_size if self.target is not None else len(self.tokenizer)

    def widest_row(self, makes_p: bool) -> int:
        """Entries of the longest row that a loss is made of: the draft's own where p is a list of tokens."""
        is_dense = makes_p or self.store is None or self.store in DENSE_STORES
        return self.vocab_size if is_dense else self.blueprint.wants_vocab or self.vocab_size

    @property
    def needs_target_weights(self) -> bool:
        """Whether recorded hidden states have to go through the target's head."""
        return self.store == "last_hidden"


def open_inputs(cfg: TrainConfig) -> Inputs:
    """Everything but weights; raises ConfigError or InputError for whatever does not fit together. Of several processes
    of a group rank 0 alone reads the corpus."""
    target = None if cfg.target.path is None else describe_model(cfg.target, loads=cfg.target_source == "live")
    if target is not None and cfg.engine.name == "fsdp2" and cfg.target_source == "live":
        _check_shardable(target)
    corpus = None if cfg.data is None else load_corpus(cfg.data)
    tokenizer = _tokenizer(cfg, target, corpus)
    if cfg.data is not None:
        tokenizer = settled(tokenizer, cfg.data, cfg.data.system)
    records = None if cfg.records is None else RecordFolder.open(cfg.records, target)
    store = None if records is None else _choose_store(cfg, records)
    knows_p = store is not None or cfg.makes_p
    unheard = cfg if knows_p else replace(cfg, objective=replace(cfg.objective, confidence_weight=0.0))
    blueprint = FAMILIES[cfg.draft.family](unheard, target, tokenizer)  # whose confidence nothing would train
    _check_length(cfg, target, blueprint)
    if store == "last_hidden" and not blueprint.layers_read:  # which become p through all of the target
        describe_model(cfg.target)
    layers = () if cfg.makes_p else blueprint.layers_read
    sources = [_source(cfg, tokenizer, records or corpus, store, split, layers) for split in ("train", "validation")]
    covered = None
    if blueprint.wants_vocab is not None:
        assert target is not None
        always = special_tokens(target, tokenizer)
        vocab, covered = frequent_tokens(sources[0], blueprint.wants_vocab, target.vocab_size, always)
        blueprint = blueprint.with_vocab(vocab)
    _check_rounds(cfg, blueprint, min(int(source.lengths.max()) for source in sources))
    train, validation = (PackedSource.of(source, cfg.sequence_length, cfg.seed, layers) for source in sources)
    _check_learned(cfg, "training split", train, range(len(train.rows)))
    _check_covered(cfg, covered)
    sample = validation.sample(cfg.validation_rows)
    _check_learned(cfg, f"{len(sample)} validation rows", validation, sample)
    data = records.manifest.config.data.model_dump() if records is not None else cfg.data and asdict(cfg.data)
    recorded = None if records is None else records.manifest.target.weights
    told = (records.manifest.held_out, records.manifest.bad_rows) if records else _left_aside(corpus, tokenizer)
    return Inputs(target, tokenizer, blueprint, train, validation, store, data, cfg.window, recorded, *told, covered)


def check_enough(cfg: TrainConfig, inputs: Inputs, world_size: int) -> int:
    """Rows per optimizer step; ConfigError where the training split does not fill a single one."""
    rows = cfg.batch_size * cfg.gradient_accumulation * world_size
    found = len(inputs.train.rows)
    require(
        found >= rows,
        f"the training split fills {found} rows of {cfg.sequence_length} tokens; one step takes {rows} (batch_size "
        f"{cfg.batch_size} x gradient_accumulation {cfg.gradient_accumulation} x {world_size} processes). Lower "
        "batch_size, or give more data",
    )
    return rows


def _check_shardable(target: ModelDescription) -> None:
    if is_quantised(target.config):
        raise InputError(
            f"target.path={target.path} is quantised, and engine=fsdp2 shards weights in floating point. Use "
            "engine=ddp, or records (target_source=records)"
        )


def _check_length(cfg: TrainConfig, target: ModelDescription | None, blueprint: Blueprint) -> None:
    of_draft = f"the context of {cfg.draft.init_from}" if cfg.draft.init_from else "draft.max_positions"
    limits = {"the target's context": target.max_positions if target else None, of_draft: blueprint.max_positions}
    for what, limit in limits.items():
        require(
            limit is None or cfg.sequence_length <= limit,
            f"sequence_length={cfg.sequence_length} is longer than {what}, {limit} tokens; positions beyond it mean "
            f"nothing. Use sequence_length={limit} or less",
        )


def _check_rounds(cfg: TrainConfig, blueprint: Blueprint, longest: int) -> None:
    """`longest` are the tokens of the longest text that a row holds, of the split whose texts are shorter."""
    require(
        blueprint.depth is not None or cfg.objective.credit == "none" or cfg.window < longest,
        f"objective.credit={cfg.objective.credit} weighs whole rounds, and no text (of {longest} tokens at most, "
        f"sequence_length={cfg.sequence_length}) holds one of window={cfg.window}. Use a smaller window",
    )


def _check_learned(cfg: TrainConfig, what: str, packed: PackedSource, rows: Iterable[int]) -> None:
    require(
        packed.teaches(rows),
        f"no token of the {what} is to be learned: sequence_length={cfg.sequence_length} cuts every text before its "
        "first learned token. Use a longer sequence_length, or more validation_rows",
    )


def _check_covered(cfg: TrainConfig, covered: float | None) -> None:
    require(
        covered is None or covered >= LEAST_COVERED,
        f"draft.head.vocab={cfg.draft.head.vocab} holds {covered or 0:.1%} of the learned tokens, and acceptance "
        f"cannot exceed that. Use one that holds {LEAST_COVERED:.0%} at least (better 95%), or null, which drafts "
        "every token",
    )


def _choose_store(cfg: TrainConfig, records: RecordFolder) -> str | None:
    names = list(records.layout.store)
    dense = [name for name in names if name in DENSE_STORES]
    every = [one for one in (build_objective(cfg.objective), warm_up_of(cfg.objective)) if one is not None]
    needs_dense = any(one.needs == "dense" for one in every)
    if not cfg.makes_p:
        for one in every:
            one.check_source(None if not names else bool(dense) if one.needs == "dense" else True)
        require(
            bool(names) or cfg.objective.credit not in NEEDS_ALPHA,
            f"objective.credit={cfg.objective.credit} asks what was accepted before a token, and "
            f"records={cfg.records} hold text alone (records.store=[]). Use records with p, target_source=live, "
            "or objective.credit=none",
        )
    return dense[0] if needs_dense and dense else next(iter(names), None)


def _tokenizer(cfg: TrainConfig, target: ModelDescription | None, corpus: Corpus | None) -> PreTrainedTokenizerBase:
    if target is not None:
        return load_tokenizer(cfg.target)
    if cfg.tokenizer.path is not None:
        return load_tokenizer(ModelConfig(path=cfg.tokenizer.path))
    return on_main(_reads(), lambda: _own_tokenizer(cfg, corpus))


def _own_tokenizer(cfg: TrainConfig, corpus: Corpus | None) -> PreTrainedTokenizerBase:
    """Trained on the corpus, by this run or the part of it before."""
    saved = tokenizer_folder(cfg)
    if cfg.resume != "never" and saved.is_dir():
        return load_tokenizer(ModelConfig(path=str(saved)))
    if corpus is None or cfg.tokenizer.train_entries is None:
        raise ConfigError("a tokenizer is trained on text: choose data=NAME and set tokenizer.train_entries")
    logger.info("training a tokenizer of %d entries", cfg.tokenizer.train_entries)
    texts = (document.text for document in corpus.documents("train") if document.text is not None)
    return train_bpe(texts, cfg.tokenizer.train_entries)


def _left_aside(corpus: Corpus | None, tokenizer: PreTrainedTokenizerBase) -> tuple[HeldOutCount, BadRowCount]:
    """What is held out, and the rows that could not be used; said once, when all was read."""
    assert corpus is not None, "checked by TrainConfig"
    return on_main(_reads(), lambda: (count_held_out(corpus, tokenizer), corpus.bad.report()))


def _reads() -> bool:
    """Whether this process reads the corpus: rank 0 of a group, or one that is in none."""
    return is_main_process() or not (distributed.is_available() and distributed.is_initialized())


def tokenizer_folder(cfg: TrainConfig) -> Path:
    """Where a tokenizer that was trained here is kept."""
    return Path(cfg.output_dir) / "tokenizer"


def special_tokens(target: ModelDescription, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """What a reduced draft vocabulary always holds: every end of text, and the other special tokens."""
    ends = target.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    return {token for token in (*ends, *tokenizer.all_special_ids) if token < target.vocab_size}


def _source(
    cfg: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    texts: RecordFolder | Corpus | None,
    store: str | None,
    split: str,
    layers: tuple[int, ...],
) -> SequenceSource:
    assert texts is not None, "checked by TrainConfig"
    if isinstance(texts, RecordFolder):
        return record_sequences(texts, split, cfg.sequence_length, store, layers)
    logger.info("reading and tokenising the %s split", split)
    return on_main(
        _reads(),
        lambda: text_sequences(texts, tokenizer, split, cfg.sequence_length),  # type: ignore[arg-type]
    )
