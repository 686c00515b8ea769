"""`mode=drafters`: every way to draft at the length that was chosen for the cell, and the peers at theirs. Each text is
written by one target, with the ways that are for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from decode.common.progress import progress
from decode.drafters.untrained.early_exit import refuse_exit
from eval.arms.base import AUTOREGRESSIVE, EARLY_EXIT, LOOKUP, TRANSFORMERS, VLLM, VLLM_LOOKUP, Arm, our_name
from eval.arms.ours import OurArm, early_exit_arms, early_exit_settings, lookup_arms, our_arm, plain_arms, renamed
from eval.arms.vllm_engines import drafting_with_lookup
from eval.config import TOKEN_FOR_TOKEN
from eval.inputs import Named
from eval.measure.cells import Cell, Point, tried_settings
from eval.measure.timed_run import first_to_capture
from eval.modes.compare.arm_set import ArmSet, Loaded, Target
from eval.modes.compare.drafter_targets import describe_targets
from eval.modes.compare.drafters_config import DraftersConfig, as_known
from eval.modes.compare.way import Way, length_name
from eval.prompts.kinds import TextPrompts
from eval.render.formatting import by_reason
from eval.results.compared import Choice
from eval.results.figures import Drafted

_PER_ROW = 0.15
"""Seconds that one more row adds to a pass, as a share of those of one row."""
_DRAFTED = 2.5
"""Tokens of a pass that drafts, as an order of magnitude."""


class Drafters(ArmSet):
    """Ways to draft, and what others look up."""

    is_by_text = True
    vllm_drafting = VLLM_LOOKUP
    asked_by = "the largest batch times its count in drafters.batches_timed, or drafters.screening_prompts"

    @property
    def sizes(self) -> DraftersConfig:
        return self.cfg.drafters

    @property
    def ways(self) -> list[Way]:
        """All of the configuration."""
        return self.cfg.drafters.ways(self.cfg.drafts)

    def ways_of(self, target: Target, text: str) -> list[Way]:
        """The ways to draft that are timed on one of a target's texts."""
        return [way for way in self.ways if way.name in target.families and as_known(text) in way.texts]

    def refused(self, target: Target, text: str) -> dict[str, str]:
        """Arm for that text -> why it is not timed there."""
        wanted = {way.name: as_known(text) in way.texts for way in self.ways}
        reasons = {name: reason for name, reason in target.refused.items() if wanted[name]}
        return reasons | dict.fromkeys(self.sizes.without_datastore(text), "drafters.datastore names no folder")

    def targets(self) -> list[Target]:
        found = describe_targets(self.cfg)
        for one in found:
            for layers in self.cfg.peers.early_exit_layers:
                refuse_exit(layers, one.description.num_layers, one.description.path)
        return found

    def plan(self, targets: Sequence[Target]) -> list[str]:
        cfg, peers = self.cfg, self.cfg.peers
        texts = [(one, text) for one in targets for text in one.texts]
        arms = {text: ", ".join(way.name for way in self.ways_of(one, text)) for one, text in texts}
        refused = {text: by_reason(self.refused(one, text)) for one, text in texts}
        prompts = f"{cfg.drafters.screening_prompts} prompts or a batch, {cfg.timing.screening_tokens} new tokens"
        exits = f", {EARLY_EXIT} (best of {len(early_exit_settings(peers))})" if peers.early_exit_layers else ""
        return [
            *(f"{one.key}={one.description.path} writes {', '.join(one.texts)}" for one in targets),
            *(f"arms for {text}: {names or 'none'}" for text, names in arms.items()),
            *(f"left out for {text}: {reasons}" for text, reasons in refused.items() if reasons),
            f"settings: as chosen in {cfg.drafters.choices}"
            if cfg.drafters.choices
            else f"draft lengths: tried on {prompts}",
            f"beside them: {', '.join([AUTOREGRESSIVE, TRANSFORMERS, *self.engines()])}; one prompt at a time also "
            f"{LOOKUP} (best of {len(peers.prompt_lookup_num_tokens)}){exits}",
        ]

    def tokens(self, target: Target, cell: Cell) -> float:
        """What is timed, and the warm-up and trial of every setting."""
        cfg, ways = self.cfg, self.ways_of(target, cell.text)
        tried = 0 if cfg.drafters.choices else sum(len(way.lengths) for way in ways)
        choosing = tried * (1 + cfg.drafters.batches_screened(cell.batch_size)) * cfg.timing.screening_tokens / _DRAFTED
        calls = 1 + cfg.timing.rounds * cfg.drafters.num_timed[cell.batch_size]
        arms = len(ways) / _DRAFTED + 3 + len(self.engines())  # transformers generate takes twice as long as our loop
        return (choosing + arms * calls * cfg.decode.max_new_tokens) * (1 + _PER_ROW * (cell.batch_size - 1))

    def tried(self, target: Target, place: Point | Cell, best: Mapping[str, str]) -> dict[str, list[str]]:
        assert isinstance(place, Cell)
        peers = self.cfg.peers
        each = {way.name: [length_name(k) for k in way.lengths] for way in self.ways_of(target, place.text)}
        if place.batch_size == 1 and peers.prompt_lookup_num_tokens:
            each[LOOKUP] = [f"n={tokens}" for tokens in peers.prompt_lookup_num_tokens]
        if place.batch_size == 1 and peers.early_exit_layers:
            each[EARLY_EXIT] = list(early_exit_settings(peers))
        if peers.vllm_python is not None and peers.vllm_draft_tokens:
            each[VLLM_LOOKUP] = [length_name(k) for k in peers.vllm_draft_tokens]
        return each

    def drafters(self, target: Target) -> dict[str, Named]:
        return {way.name: (way.draft, way.settings) for text in target.texts for way in self.ways_of(target, text)}

    def speculation(self, draft_tokens: int) -> dict[str, Any]:
        return drafting_with_lookup(draft_tokens)

    def in_words(self) -> dict[str, Any]:
        arms = {
            way.name: {
                **{key: value for key, value in asdict(way).items() if key not in ("name", "is_asked")},
                "lengths": list(way.lengths),
                "texts": list(way.texts),
                "members": way.members,
                "has_weights": way.has_weights,
            }
            for way in self.ways
        }
        return {"drafts": dict(self.cfg.drafts), "arms": arms}

    def prompts_in_words(self, texts: Mapping[str, TextPrompts], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        lengths = {text: [len(one.ids) for one in prompts.reported] for text, prompts in texts.items()}
        means = {text: sum(each) / len(each) for text, each in lengths.items()}
        return {"file": self.cfg.prompts.file, "mean_tokens": means}


_NO_SHAPE = ("temperature", "verifier", "max_new_tokens")
"""Settings that change no pass, but for the verifier, see `LoadedDrafters._shape`."""


@dataclass(frozen=True)
class LoadedDrafters(Loaded):
    """With the shapes of passes that are captured."""

    arm_set: Drafters
    _warm: set[tuple[Any, ...]] = field(default_factory=set)

    def families(self, cell: Cell) -> dict[str, dict[str, Arm]]:
        """Arm -> setting -> how it is run there: all that a cell chooses from. transformers looks up for one prompt at
        a time."""
        peers = {VLLM_LOOKUP: self._vllm(cell)}
        if cell.batch_size == 1:
            peers[LOOKUP] = lookup_arms(self.cfg, self.model, cell.temperature)
            peers[EARLY_EXIT] = early_exit_arms(self.cfg, self.model, cell.temperature)
        ours = {way.name: self._ours(way, cell) for way in self.arm_set.ways_of(self.target, cell.text)}
        return {name: arms for name, arms in (ours | peers).items() if arms}

    def _ours(self, way: Way, cell: Cell) -> dict[str, Arm]:
        settings = way.sampling(self.cfg.decode, cell.temperature)
        drafter = self.drafters[way.name]
        return {
            length: our_arm(our_name(f"{way.name}, {length}"), self.model, drafter, one)
            for length, one in settings.items()
        }

    def _vllm(self, cell: Cell) -> dict[str, Arm]:
        arms = self.vllm_arms(cell.temperature)
        return {name.removeprefix(f"{VLLM_LOOKUP}, "): arm for name, arm in arms.items() if name != VLLM}

    def plain(self, cell: Cell) -> list[Arm]:
        """Everything that drafts nothing: the two that the baseline is chosen from, and vLLM's."""
        vllm = [arm for name, arm in self.vllm_arms(cell.temperature).items() if name == VLLM]
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
        key = self._shape(arm, cell)
        if key not in self._warm:
            sets = [prompts for text in self.texts.values() for prompts in (text.reported, text.screening)]
            first = min((first_to_capture(prompts, cell.batch_size) for prompts in sets), key=len)
            arm.capture_ahead([first] * cell.batch_size, self.cfg.decode.max_new_tokens)
            self._warm.add(key)

    def _shape(self, arm: OurArm, cell: Cell) -> tuple[Any, ...]:
        """What arms have in common that share captures. A clock that is kept, and a draft's own passes, are an arm's
        own."""
        settings = {key: value for key, value in arm.settings.items() if key not in _NO_SHAPE}
        if arm.drafter is None or self._has_weights(arm) or settings["adaptive"]:
            return cell.point, id(arm.drafter), str(settings)
        return cell.batch_size, str(settings), arm.settings["verifier"] in TOKEN_FOR_TOKEN

    def _has_weights(self, arm: OurArm) -> bool:
        return any(way.has_weights for way in self.arm_set.ways if self.drafters.get(way.name) is arm.drafter)

    def choose(self, cell: Cell) -> dict[str, Any]:
        """An arm of one setting is not tried."""
        families = self.families(cell)
        several = {name: arms for name, arms in families.items() if len(arms) > 1}
        self.warm_up([arm for arms in several.values() for arm in arms.values()], cell)
        found = tried_settings(self.cfg, cell, several, self.screening(cell, cell.text))
        return {**found, "best": {name: found["best"].get(name) or next(iter(arms)) for name, arms in families.items()}}

    def warm_arms(self, cell: Cell, choice: Choice) -> list[Arm]:
        peers = (LOOKUP, EARLY_EXIT, VLLM_LOOKUP)
        chosen = {name: arms[choice.best[name]] for name, arms in self.families(cell).items()}
        self.warm_up([*self.plain(cell), *chosen.values()], cell)
        ours_and_peers = [renamed(arm, name if name in peers else our_name(name)) for name, arm in chosen.items()]
        return [*self.plain(cell), *ours_and_peers]

    def left_out(self, cell: Cell) -> dict[str, str]:
        reasons = self.arm_set.refused(self.target, cell.text)
        if cell.batch_size > 1:
            reasons[LOOKUP] = f"transformers looks up for one prompt at a time, not {cell.batch_size}"
            if self.cfg.peers.early_exit_layers:
                reasons[EARLY_EXIT] = f"transformers leaves early for one prompt at a time, not {cell.batch_size}"
        return reasons

    def drafted(self, cell: Cell, choice: Choice) -> Iterator[Drafted]:
        for way in self.arm_set.ways_of(self.target, cell.text):
            settings = way.sampling(self.cfg.decode, cell.temperature)[choice.best[way.name]]
            yield Drafted(our_name(way.name), self.target.families[way.name], way.draft, settings, way.name)

    def facts(self, choice: Choice) -> dict[str, Any]:
        return {"target": self.target.key, "settings": dict(choice.best)}
