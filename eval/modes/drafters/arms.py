"""The cells of the comparison and the arms of each: every way to draft at the length that was chosen for the cell, and
the peers at theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from decode.common.progress import progress
from decode.config import SamplingConfig
from decode.forward.runner import rounded
from decode.trees.tree_plans import parse
from distill.corpora.corpus import in_groups
from eval.arms.base import EARLY_EXIT, LOOKUP, VLLM, VLLM_LOOKUP, Arm, eos_ids, our_name
from eval.arms.ours import OurArm, early_exit_arms, lookup_arms, our_arm, plain_arms, renamed
from eval.arms.vllm_engines import Engines, drafting_with_lookup, worker_settings
from eval.config import TOKEN_FOR_TOKEN, EvalConfig
from eval.inputs import sampling_at
from eval.measure.cells import Cell, CellRun, tried_settings
from eval.modes.drafters.targets import Target
from eval.modes.drafters.way import Way, length_name
from eval.prompts.kinds import TextPrompts
from eval.prompts.prompt import Prompt
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


def engine_settings(
    cfg: EvalConfig, target: Target, max_length: int, dtype: str, given: Mapping[Cell, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Arm name -> the first line of its engine; of those that draft only the ones that some given choice names."""
    rows, path = max(cfg.drafters.batch_sizes), str(target.source.path)
    chosen = {given[cell]["best"].get(VLLM_LOOKUP) for cell in cells(cfg, [target]) if cell in given}
    return {
        name: worker_settings(path, dtype, max_length, rows, cfg.seed, None if k is None else drafting_with_lookup(k))
        for name, k in engine_names(cfg).items()
        if k is None or not chosen or length_name(k) in chosen
    }


class Calls(NamedTuple):
    """Calls that share a cache."""

    shortest: tuple[int, ...]
    """The prompt of the one that begins first."""
    end: int
    """Tokens at which the longest one ends."""


_NO_SHAPE = ("temperature", "verifier", "max_new_tokens")
"""Settings that change no pass, but for the verifier, see `Stock._shape`."""


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
            peers[EARLY_EXIT] = early_exit_arms(self.cfg, self.model, cell.temperature)
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
        """Captures and a first call of every arm, unmeasured. Captures are of shapes of passes, which drafters without
        weights share, at either temperature and for all texts: rehearsing every arm anew took half of a run."""
        longest = max((one.ids for one in self.texts[cell.text].screening), key=len)
        with progress(len(arms), "arms", f"warm-up, {cell.name}") as bar:
            for arm in arms:
                if isinstance(arm, OurArm):
                    self._capture(arm, cell)
                rows = list(range(cell.batch_size))
                arm.run([longest] * cell.batch_size, rows, self.cfg.timing.screening_tokens, self.cfg.seed)
                bar.update(1)

    def _capture(self, arm: OurArm, cell: Cell) -> None:
        """What calls of this batch size may need, but for what other arms' were found to have made."""
        for calls in self._calls(arm, cell.batch_size):
            key = (*self._shape(arm, cell), calls)
            if key not in self._warm:
                arm.capture_ahead([calls.shortest] * cell.batch_size, calls.end - len(calls.shortest))
                self._warm.add(key)

    def _calls(self, arm: OurArm, batch_size: int) -> list[Calls]:
        """All calls of the texts together that share a cache: its size follows the longest prompt of a batch."""
        settings = arm.settings
        shape = parse(settings["tree"], settings["num_draft_tokens"], settings["tree_nodes"])
        drafted = 0 if arm.drafter is None else max(shape.num_nodes, 2 + shape.num_read)
        found: dict[int, Calls] = {}
        for longest, new_tokens in self._batches(batch_size):
            end = len(longest) + new_tokens
            known = found.setdefault(rounded(end + drafted), Calls(longest, end))
            shortest = min(known.shortest, longest, key=len)
            found[rounded(end + drafted)] = Calls(shortest, max(known.end, end))
        return list(found.values())

    def _batches(self, batch_size: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """(longest prompt, new tokens) of every batch that is decoded."""
        timing, new_tokens = self.cfg.timing, self.cfg.decode.max_new_tokens
        for text in self.texts.values():
            for prompts, tokens in ((text.reported, new_tokens), (text.screening, timing.screening_tokens)):
                for batch in in_groups(prompts, batch_size):
                    yield max((one.ids for one in batch), key=len), tokens

    def _shape(self, arm: OurArm, cell: Cell) -> tuple[Any, ...]:
        """What arms have in common that share captures. A clock that is kept, and a draft's own passes, are an arm's
        own."""
        settings = {key: value for key, value in arm.settings.items() if key not in _NO_SHAPE}
        if arm.drafter is None or self._has_weights(arm) or settings["adaptive"]:
            return cell.point, id(arm.drafter), str(settings)
        return cell.batch_size, str(settings), arm.settings["verifier"] in TOKEN_FOR_TOKEN

    def _has_weights(self, arm: OurArm) -> bool:
        ways = self.cfg.drafters.ways(self.cfg.drafts)
        return any(way.has_weights for way in ways if self.drafters.get(way.name) is arm.drafter)


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
    families, peers = stock.families(cell), (LOOKUP, EARLY_EXIT, VLLM_LOOKUP)
    chosen = {name: arms[choice["best"][name]] for name, arms in families.items()}
    stock.warm_up([*stock.plain(cell), *chosen.values()], cell)
    ours_and_peers = [renamed(arm, name if name in peers else our_name(name)) for name, arm in chosen.items()]
    return [*stock.plain(cell), *ours_and_peers]


def left_out(stock: Stock, cell: Cell) -> dict[str, str]:
    """Arm -> why it does not run in this cell."""
    reasons = stock.target.left_out(stock.cfg, cell.text)
    if cell.batch_size > 1:
        reasons[LOOKUP] = f"transformers looks up for one prompt at a time, not {cell.batch_size}"
        if stock.cfg.peers.early_exit_layers:
            reasons[EARLY_EXIT] = f"transformers leaves early for one prompt at a time, not {cell.batch_size}"
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
