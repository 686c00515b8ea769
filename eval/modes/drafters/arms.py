"""The cells of the comparison and the arms of each: every way to draft at the length that was chosen for the cell, and
the peers at theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from decode.config import SamplingConfig
from eval.arms.base import LOOKUP, VLLM, Arm, eos_ids, our_name
from eval.arms.ours import lookup_arms, our_arm, plain_arms, renamed
from eval.arms.vllm_engines import Engines, drafting_with_lookup, worker_settings
from eval.config import EvalConfig
from eval.inputs import sampling_at
from eval.measure.cells import Cell, CellRun, tried_settings
from eval.measure.timed_run import warm_up
from eval.modes.drafters.config import Way, length_name
from eval.modes.drafters.targets import Target
from eval.prompts.held_out import Prompt
from eval.prompts.kinds import TextPrompts
from eval.results.figures import Drafted

VLLM_LOOKUP = f"{VLLM} ngram"
"""vLLM's prompt lookup, at its best of peers.vllm_draft_tokens."""


def cells(cfg: EvalConfig, targets: list[Target]) -> list[Cell]:
    """All cells in the order of the run: a target's cells together, its batch sizes one after another."""
    return [
        Cell(rows, temperature, text)
        for target in targets
        for rows in cfg.drafters.batch_sizes
        for temperature in cfg.temperatures
        for text in target.texts
    ]


def engine_names(cfg: EvalConfig) -> dict[str, int | None]:
    """Arm name -> draft tokens per pass; None decodes without a draft. Nothing without an interpreter to run vLLM."""
    if cfg.peers.vllm_python is None:
        return {}
    return {VLLM: None} | {f"{VLLM_LOOKUP}, {length_name(k)}": k for k in cfg.peers.vllm_draft_tokens}


def engine_settings(cfg: EvalConfig, target: Target, max_length: int, dtype: str) -> dict[str, dict[str, Any]]:
    """Arm name -> the first line of its engine."""
    rows, path = max(cfg.drafters.batch_sizes), str(target.source.path)
    return {
        name: worker_settings(path, dtype, max_length, rows, cfg.seed, None if k is None else drafting_with_lookup(k))
        for name, k in engine_names(cfg).items()
    }


@dataclass(frozen=True)
class Stock:
    """What the arms of one target are made of."""

    cfg: EvalConfig
    target: Target
    model: PreTrainedModel
    drafters: Mapping[str, Any]
    """Arm -> its drafter."""
    engines: Engines
    texts: Mapping[str, TextPrompts]
    _warm: set[tuple[Cell, str]] = field(default_factory=set)

    def families(self, cell: Cell) -> dict[str, dict[str, Arm]]:
        """Arm -> setting -> how it is run there: all that a cell chooses from. transformers looks up for one prompt at
        a time."""
        peers = {VLLM_LOOKUP: self._vllm(cell)}
        if cell.batch_size == 1:
            peers[LOOKUP] = lookup_arms(self.cfg, self.model, cell.temperature)
        ours = {way.name: self._ours(way, cell) for way in self.target.ways(self.cfg, cell.text)}
        return {name: arms for name, arms in (ours | peers).items() if arms}

    def _ours(self, way: Way, cell: Cell) -> dict[str, Arm]:
        settings = way.sampling(self.cfg.decode, cell.temperature)
        drafter = self.drafters[way.name]
        return {
            length: our_arm(our_name(f"{way.name}, {length}"), self.model, drafter, one)
            for length, one in settings.items()
        }

    def _vllm(self, cell: Cell) -> dict[str, Arm]:
        arms = self._engines(cell)
        return {name.removeprefix(f"{VLLM_LOOKUP}, "): arm for name, arm in arms.items() if name != VLLM}

    def _engines(self, cell: Cell) -> dict[str, Arm]:
        return self.engines.arms(sampling_at(self.cfg, cell.temperature), eos_ids(self.model))

    def plain(self, cell: Cell) -> list[Arm]:
        """Everything that drafts nothing: the two that the baseline is chosen from, and vLLM's."""
        vllm = [arm for name, arm in self._engines(cell).items() if name == VLLM]
        return [*plain_arms(self.cfg, self.model, cell.temperature), *vllm]

    def warm_up(self, arms: list[Arm], cell: Cell) -> None:
        """Run those once, unmeasured, that did not run in this cell yet, as long as when they are timed."""
        cold, prompts = [arm for arm in arms if (cell, arm.name) not in self._warm], self.texts[cell.text].screening
        warm_up(cold, prompts, cell.batch_size, self.cfg.seed, self.cfg.decode.max_new_tokens)
        self._warm.update((cell, arm.name) for arm in cold)


def choose(stock: Stock, cell: Cell) -> dict[str, Any]:
    """{"best": arm -> setting, "tokens_per_s": arm -> setting -> speed, ...} of a cell, on prompts that are not
    reported; an arm of one setting is not tried."""
    cfg, families = stock.cfg, stock.families(cell)
    several = {name: arms for name, arms in families.items() if len(arms) > 1}
    stock.warm_up([arm for arms in several.values() for arm in arms.values()], cell)
    found = tried_settings(cfg, cell, several, _screening_prompts(stock, cell))
    return {**found, "best": {name: found["best"].get(name) or next(iter(arms)) for name, arms in families.items()}}


def _screening_prompts(stock: Stock, cell: Cell) -> list[Prompt]:
    wanted = cell.batch_size * stock.cfg.drafters.batches_screened(cell.batch_size)
    return stock.texts[cell.text].screening[:wanted]


def warm_arms(stock: Stock, cell: Cell, choice: Mapping[str, Any]) -> list[Arm]:
    """All arms of a cell, each at its chosen setting and warm."""
    families, peers = stock.families(cell), (LOOKUP, VLLM_LOOKUP)
    chosen = {name: arms[choice["best"][name]] for name, arms in families.items()}
    stock.warm_up([*stock.plain(cell), *chosen.values()], cell)
    ours_and_peers = [renamed(arm, name if name in peers else our_name(name)) for name, arm in chosen.items()]
    return [*stock.plain(cell), *ours_and_peers]


def left_out(stock: Stock, cell: Cell) -> dict[str, str]:
    """Arm -> why it does not run in this cell."""
    reasons = stock.target.left_out(stock.cfg, cell.text)
    if cell.batch_size > 1:
        reasons[LOOKUP] = f"transformers looks up for one prompt at a time, not {cell.batch_size}"
    return reasons


def measure(stock: Stock, cell: Cell, choice: Mapping[str, Any]) -> dict[str, Any]:
    """The cell's content for results.json."""
    cfg = stock.cfg
    prompts = stock.texts[cell.text].reported[: cell.batch_size * cfg.drafters.num_timed[cell.batch_size]]
    drafted = [_drafted(stock, way, cell, choice) for way in stock.target.ways(cfg, cell.text)]
    content = CellRun(cfg, stock.model, {}).time(cell, warm_arms(stock, cell, choice), drafted, prompts)
    return {
        **content,
        "target": stock.target.key,
        "settings": dict(choice["best"]),
        "left_out": left_out(stock, cell),
        "vllm_version": stock.engines.version,
    }


def _drafted(stock: Stock, way: Way, cell: Cell, choice: Mapping[str, Any]) -> Drafted:
    settings: SamplingConfig = way.sampling(stock.cfg.decode, cell.temperature)[choice["best"][way.name]]
    return Drafted(our_name(way.name), stock.target.families[way.name], way.draft, settings, way.name)
