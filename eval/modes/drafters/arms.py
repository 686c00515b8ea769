"""The cells of the comparison and the arms of each: every way to draft at the length that was chosen for the cell, and
the peers at theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from decode.common.progress import progress
from decode.config import SamplingConfig
from eval.arms.base import LOOKUP, VLLM, VLLM_LOOKUP, Arm, eos_ids, our_name
from eval.arms.ours import OurArm, lookup_arms, our_arm, plain_arms, renamed
from eval.arms.vllm_engines import Engines, drafting_with_lookup, worker_settings
from eval.config import TOKEN_FOR_TOKEN, EvalConfig
from eval.inputs import sampling_at
from eval.measure.cells import Cell, CellRun, tried_settings
from eval.modes.drafters.config import Way, length_name
from eval.modes.drafters.targets import Target
from eval.prompts.held_out import Prompt
from eval.prompts.kinds import TextPrompts
from eval.results.figures import Drafted


def cells(cfg: EvalConfig, targets: Sequence[Target]) -> list[Cell]:
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
    _warm: set[tuple[Any, ...]] = field(default_factory=set)

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

    def warm_up(self, arms: Sequence[Arm], cell: Cell) -> None:
        """Captures and first calls, unmeasured, once for all texts: captures are of shapes of passes, which drafters
        without weights share, at either temperature. Rehearsing them anew for every arm took half of a run."""
        cold = {key: arm for arm in arms if (key := self._shape(arm, cell)) not in self._warm}
        with progress(len(cold), "arms", f"warm-up, {cell.name}") as bar:
            for arm in cold.values():
                self._first_call(arm, cell)
                bar.update(1)
        self._warm.update(cold)

    def _shape(self, arm: Arm, cell: Cell) -> tuple[Any, ...]:
        """What arms have in common that are warm together."""
        if not isinstance(arm, OurArm) or arm.drafter is None or self._has_weights(arm):
            return cell.point, arm.name
        settings = [arm.settings[key] for key in ("num_draft_tokens", "tree", "tree_nodes", "adaptive")]
        return cell.batch_size, *settings, arm.settings["verifier"] in TOKEN_FOR_TOKEN

    def _has_weights(self, arm: OurArm) -> bool:
        ways = self.cfg.drafters.ways(self.cfg.drafts)
        return any(way.has_weights for way in ways if self.drafters.get(way.name) is arm.drafter)

    def _first_call(self, arm: Arm, cell: Cell) -> None:
        new_tokens = self.cfg.decode.max_new_tokens
        every = sorted((one.ids for text in self.texts.values() for one in text.screening), key=len)
        if isinstance(arm, OurArm):  # every number of slots from the shortest prompt to the end of the longest one
            longest = max(prompts.longest for prompts in self.texts.values())
            arm.capture_ahead([every[0]] * cell.batch_size, longest - len(every[0]) + new_tokens)
        else:
            arm.run([every[-1]] * cell.batch_size, list(range(cell.batch_size)), new_tokens, self.cfg.seed)


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
