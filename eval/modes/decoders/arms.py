"""The arms and cells of the comparison: every arm is made from one target, one draft and the vLLM engines that run
beside them; settings are chosen at each batch size and temperature, then all arms of a cell are timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from decode.config import SamplingConfig
from distill.engines.vllm_support import drafting_with_model
from eval.arms.base import ASSISTED, LOOKUP, OURS, STATIC, VLLM, Arm, eos_ids, our_name
from eval.arms.ours import assisted_arms, lookup_arms, our_arm, plain_arms, renamed
from eval.arms.transformers_arms import TransformersArm, no_compiler, static_options
from eval.arms.vllm_engines import Engines, worker_settings
from eval.comparison_config import PLAIN, arm_settings
from eval.config import EvalConfig
from eval.inputs import sampling_at
from eval.measure.cells import Cell, CellRun, Point
from eval.measure.cells import choose as fastest_settings
from eval.measure.held_choice import held_choice
from eval.measure.timed_run import fastest, is_plain_chain, warm_up
from eval.prompts.kinds import TextPrompts
from eval.prompts.prompt import Prompt
from eval.results.figures import Drafted

_WARM_UPS = 2
"""Runs of every arm before its first cell; a pass is captured after some uses of its shape."""


def engine_names(cfg: EvalConfig) -> dict[str, int | None]:
    """Arm name -> draft tokens per pass; None decodes without a draft. Nothing without an interpreter to run vLLM."""
    if cfg.peers.vllm_python is None:
        return {}
    return {VLLM: None} | {f"{VLLM}, k={k}": k for k in cfg.peers.vllm_draft_tokens}


def engine_settings(cfg: EvalConfig, max_length: int, dtype: str) -> dict[str, dict[str, Any]]:
    """Arm name -> the first line of its engine."""
    draft = next(iter(cfg.drafts.values()))
    return {
        name: worker_settings(
            str(cfg.target.path),
            dtype,
            max_length,
            max(cfg.decoders.batch_sizes),
            cfg.seed,
            None if k is None else drafting_with_model(draft, k),
        )
        for name, k in engine_names(cfg).items()
    }


@dataclass(frozen=True)
class Stock:
    """What arms are made of."""

    cfg: EvalConfig
    model: PreTrainedModel
    drafter: Any
    family: str
    """The drafter's family, as rows name it."""
    engines: Engines
    max_length: int
    """Longest prompt and continuation in tokens."""

    def settings(self, temperature: float) -> dict[str, SamplingConfig]:
        """Our settings by name."""
        return arm_settings(self.cfg.decoders, self.cfg.decode, temperature)

    def ours(self, temperature: float, names: Sequence[str] | None = None) -> dict[str, Arm]:
        """Our speculative arms by the name of their setting."""
        known = self.settings(temperature)
        return {
            name: our_arm(our_name(name), self.model, self.drafter, known[name])
            for name in (known if names is None else names)
        }

    def plain(self, temperature: float) -> list[Arm]:
        """Both ways without a draft that a baseline is chosen from."""
        return plain_arms(self.cfg, self.model, temperature)

    def static(self, temperature: float) -> Arm:
        """transformers' compiled static cache."""
        options = static_options(self.model, self.max_length)
        return TransformersArm(STATIC, self.model, sampling_at(self.cfg, temperature), options)

    def assisted(self, temperature: float) -> dict[str, Arm]:
        """transformers assisted generation by setting; none for a draft that is no language model."""
        return assisted_arms(self.cfg, self.model, self.drafter, temperature)

    def vllm(self, temperature: float) -> list[Arm]:
        """vLLM without and with its draft; none unless asked for."""
        sampling, eos = sampling_at(self.cfg, temperature), eos_ids(self.model)
        return list(self.engines.arms(sampling, eos).values())


def points(cfg: EvalConfig) -> list[Point]:
    """Batch size outermost: passes captured and compiled for its shapes serve all of its cells."""
    return [Point(rows, temperature) for rows in cfg.decoders.batch_sizes for temperature in cfg.temperatures]


def cells(cfg: EvalConfig) -> list[Cell]:
    """All cells in the order of the run."""
    return [Cell(one.batch_size, one.temperature, text) for one in points(cfg) for text in texts_of(cfg)]


def candidates(stock: Stock, point: Point) -> dict[str, dict[str, Arm]]:
    """Family -> setting -> arm. transformers drafts for one prompt at a time, so beyond batch 1 only ours are tried."""
    families = {OURS: {PLAIN: stock.plain(point.temperature)[0], **stock.ours(point.temperature)}}
    if point.batch_size == 1:
        families |= {
            ASSISTED: stock.assisted(point.temperature),
            LOOKUP: lookup_arms(stock.cfg, stock.model, point.temperature),
        }
    return {family: arms for family, arms in families.items() if arms}


def texts_of(cfg: EvalConfig) -> list[str]:
    """Kinds of text: those of prompts.file, where it is given, and of held-out text otherwise."""
    return cfg.prompts.file_kinds or list(cfg.decoders.texts)


def choose(stock: Stock, point: Point, texts: Mapping[str, TextPrompts]) -> dict[str, Any]:
    """{"best": family -> setting, "best_chain": setting, "held": how sure that of ours is, "tokens_per_s": family ->
    setting -> speed}; ours may be plain decoding."""
    tried = fastest_settings(stock.cfg, point, candidates(stock, point), _screening_prompts(stock.cfg, point, texts))
    chains = [name for name, one in stock.settings(point.temperature).items() if is_plain_chain(one)]
    speeds = tried["tokens_per_s"][OURS]
    held = held_choice(tried["seconds_per_token"][OURS], stock.cfg.seed)
    return {
        **tried,
        "best": {**tried["best"], OURS: held["setting"]},
        "held": held,
        "best_chain": fastest({name: speeds[name] for name in chains}) if chains else None,
    }


def _screening_prompts(cfg: EvalConfig, point: Point, texts: Mapping[str, TextPrompts]) -> list[Prompt]:
    each = point.batch_size * cfg.decoders.batches_screened(point.batch_size)
    return [prompt for prompts in texts.values() for prompt in prompts.screening[:each]]


def timed_settings(stock: Stock, cell: Cell, choice: Mapping[str, Any]) -> list[str]:
    """Our settings timed in a cell: the best one, the best plain chain, and the fixed ones."""
    known = stock.settings(cell.temperature)
    chosen = [choice["best"][OURS], choice["best_chain"], *stock.cfg.decoders.fixed]
    return list(dict.fromkeys(name for name in chosen if name in known))


def arms_of(stock: Stock, cell: Cell, choice: Mapping[str, Any], without: Sequence[str]) -> list[Arm]:
    """All arms of a cell, those named in `without` left out."""
    temperature = cell.temperature
    arms = [*stock.plain(temperature), *stock.ours(temperature, timed_settings(stock, cell, choice)).values()]
    if cell.batch_size in stock.cfg.decoders.static_batches:
        arms.append(stock.static(temperature))
    families = {ASSISTED: stock.assisted(temperature), LOOKUP: lookup_arms(stock.cfg, stock.model, temperature)}
    for family, settings in families.items():
        if family in choice["best"]:
            arms.append(renamed(settings[choice["best"][family]], family))
    return [arm for arm in [*arms, *stock.vllm(temperature)] if arm.name not in without]


def left_out(cell: Cell, stock: Stock, broken: Mapping[str, str]) -> dict[str, str]:
    """Arm -> why it does not run in this cell."""
    reasons = dict(broken)
    if (reason := no_compiler()) is not None:
        reasons[STATIC] = reason
    if cell.batch_size > 1:
        for peer in (ASSISTED, LOOKUP):
            reasons[peer] = f"transformers drafts for one prompt at a time, not {cell.batch_size}"
    elif not stock.assisted(cell.temperature):
        reasons[ASSISTED] = "no setting of it is configured, or the draft is not a language model, or has a window"
    return reasons


def warm(arms: Sequence[Arm], prompts: Sequence[Prompt], cell: Cell, stock: Stock) -> dict[str, str]:
    """Run every arm unmeasured. Returns arm -> reason where transformers' compiled forward raises: it is left out."""
    cfg, broken = stock.cfg, {}
    for arm in arms:
        try:
            for _ in range(_WARM_UPS):
                warm_up([arm], prompts, cell.batch_size, cfg.seed, cfg.decode.max_new_tokens)
        except RuntimeError as error:
            if arm.name != STATIC:
                raise
            broken[arm.name] = f"compiling failed: {str(error).splitlines()[0]}"
    return broken


def measure(
    stock: Stock, cell: Cell, choice: Mapping[str, Any], texts: Mapping[str, TextPrompts], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """The cell's content for results.json."""
    cfg, draft = stock.cfg, next(iter(stock.cfg.drafts))
    prompts = texts[cell.text].reported[: cell.batch_size * cfg.decoders.num_timed[cell.batch_size]]
    known = stock.settings(cell.temperature)
    drafted = [
        Drafted(our_name(name), stock.family, draft, known[name], name) for name in timed_settings(stock, cell, choice)
    ]
    run = CellRun(cfg, stock.model, {draft: stock.drafter})
    content = run.time(cell, arms_of(stock, cell, choice, list(reasons)), drafted, prompts)
    return {**content, "left_out": dict(reasons), "vllm_version": stock.engines.version}
