"""`mode=decoders`: every way of ours against every peer's, on one target and draft. Settings are chosen at each batch
size and temperature, on all texts together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.common.errors import ConfigError
from decode.drafters.beside.refusals import check_overlap, presumed_family
from decode.drafters.untrained.config import UNTRAINED, check_strict, check_tree
from decode.sampling.config import SamplingConfig
from distill.engines.vllm_support import drafting_with_model
from eval.arms.base import ASSISTED, AUTOREGRESSIVE, LOOKUP, OURS, STATIC, TRANSFORMERS, VLLM, Arm, our_name
from eval.arms.ours import assisted_arms, lookup_arms, our_arm, plain_arms, renamed
from eval.arms.transformers_arms import TransformersArm, assisted_settings, no_compiler, static_options
from eval.comparison_config import PLAIN, DecodersConfig, arm_settings
from eval.inputs import Named, check_models, named_drafts, sampling_at, shared_context
from eval.measure.cells import Cell, Point
from eval.measure.cells import choose as fastest_settings
from eval.measure.held_choice import held_choice
from eval.measure.timed_run import WARM_UPS, fastest, is_plain_chain, warm_up
from eval.modes.compare.arm_set import ArmSet, Loaded, Target
from eval.prompts.kinds import TextPrompts
from eval.results.compared import Choice
from eval.results.figures import Drafted

_EXTRA_CALLS = 8
"""Calls per arm that choosing settings and warming up add to a cell."""
_PER_ROW = 0.07
"""Seconds that one more row adds to a pass, as a share of those of one row."""


class Decoders(ArmSet):
    """Our settings and the peers, with the first draft."""

    is_by_text = False
    vllm_drafting = VLLM
    asked_by = (
        "the largest batch times its count in decoders.batches_timed, or times decoders.screening_batches, or "
        "decoders.screening_prompts"
    )

    @property
    def sizes(self) -> DecodersConfig:
        return self.cfg.decoders

    def targets(self) -> list[Target]:
        cfg = self.cfg
        self._check()
        description, families = check_models(cfg)
        texts = tuple(cfg.prompts.file_kinds or cfg.decoders.texts)
        return [Target("target", cfg.target, description, texts, families, shared_context(cfg, description))]

    def _check(self) -> None:
        cfg, draft = self.cfg, next(iter(self.cfg.drafts.values()), None)
        for temperature in cfg.temperatures:
            arm_settings(cfg.decoders, cfg.decode, temperature)
        for name, changes in cfg.decoders.arms.items():
            check_tree(draft, changes.get("tree", cfg.decode.tree), f"decoders.arms.{name}.tree")
            check_strict(draft, {}, changes.get("strict", cfg.decode.strict), f"decoders.arms.{name}.strict")
            overlap = changes.get("overlap", cfg.decode.overlap)
            check_overlap(presumed_family(draft), overlap, f"decoders.arms.{name}.overlap")
        if cfg.peers.vllm_python is not None and cfg.peers.vllm_draft_tokens and draft in UNTRAINED:
            raise ConfigError(
                f"peers.vllm_draft_tokens={cfg.peers.vllm_draft_tokens} has vLLM draft with {draft}, which is no "
                "folder that it loads. Use peers.vllm_draft_tokens=[]"
            )

    def plan(self, targets: Sequence[Target]) -> list[str]:
        cfg = self.cfg
        tried = {temperature: arm_settings(cfg.decoders, cfg.decode, temperature) for temperature in cfg.temperatures}
        choosing = [f"settings of ours tried at T={one:g}: {', '.join(names)}" for one, names in tried.items()]
        static = no_compiler()
        return [
            *([f"settings: as chosen in {cfg.decoders.choices}"] if cfg.decoders.choices else choosing),
            f"timed in each cell: {AUTOREGRESSIVE}, the best setting and the best plain chain, "
            f"{', '.join(cfg.decoders.fixed) or 'no others'}",
            f"peers: {', '.join([TRANSFORMERS, STATIC, *self.engines()])}; one prompt at a time also {ASSISTED} (best "
            f"of {len(assisted_settings(cfg.peers))} settings) and {LOOKUP} (best of "
            f"{len(cfg.peers.prompt_lookup_num_tokens)})",
            *([f"{STATIC} is left out: {static}"] if static else []),
        ]

    def tokens(self, target: Target, cell: Cell) -> float:
        cfg = self.cfg
        arms = 6 + len(cfg.decoders.fixed) + len(self.engines())
        calls = arms * cfg.timing.rounds * (cfg.decoders.num_timed[cell.batch_size] + _EXTRA_CALLS)
        return calls * cfg.decode.max_new_tokens * (1 + _PER_ROW * (cell.batch_size - 1))

    def tried(self, target: Target, place: Point | Cell, best: Mapping[str, str]) -> dict[str, list[str]]:
        peers = self.cfg.peers
        each = {
            ASSISTED: [one.label for one in assisted_settings(peers)],
            LOOKUP: [f"n={tokens}" for tokens in peers.prompt_lookup_num_tokens],
        }
        return {peer: labels for peer, labels in each.items() if peer in best}

    def drafters(self, target: Target) -> dict[str, Named]:
        return dict([next(iter(named_drafts(self.cfg).items()))])

    def speculation(self, draft_tokens: int) -> dict[str, Any]:
        return drafting_with_model(next(iter(self.cfg.drafts.values())), draft_tokens)

    def in_words(self) -> dict[str, Any]:
        return {
            "drafts": dict([next(iter(self.cfg.drafts.items()))]),
            "settings": {name: dict(changes) for name, changes in self.cfg.decoders.arms.items()},
        }

    def prompts_in_words(self, texts: Mapping[str, TextPrompts], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        mean = sum(cell["mean_tokens"] for cell in cells) / len(cells)
        return {"mean_tokens": mean, "screening_batches": self.cfg.decoders.screening_batches}


@dataclass(frozen=True)
class LoadedDecoders(Loaded):
    """With what is known of transformers' compiled forward."""

    _warm: set[Point] = field(default_factory=set)
    _broken: dict[str, str] = field(default_factory=dict)
    """Arm -> why it is left out, found while it was warmed up."""

    @property
    def drafts_timed_alone(self) -> Mapping[str, Any]:
        return self.drafters

    @property
    def draft(self) -> str:
        """Name of the draft."""
        return next(iter(self.drafters))

    def _settings(self, temperature: float) -> dict[str, SamplingConfig]:
        return arm_settings(self.cfg.decoders, self.cfg.decode, temperature)

    def _ours(self, temperature: float, names: Sequence[str]) -> dict[str, Arm]:
        known, drafter = self._settings(temperature), self.drafters[self.draft]
        return {name: our_arm(our_name(name), self.model, drafter, known[name]) for name in names}

    def _static(self, temperature: float) -> Arm:
        longest = max(prompts.longest for prompts in self.texts.values()) + self.cfg.decode.max_new_tokens
        options = static_options(self.model, longest)
        return TransformersArm(STATIC, self.model, sampling_at(self.cfg, temperature), options)

    def _drafting_peers(self, temperature: float) -> dict[str, dict[str, Arm]]:
        """Peer -> setting -> arm; assisted generation has none for a draft that is no language model."""
        return {
            ASSISTED: assisted_arms(self.cfg, self.model, self.drafters[self.draft], temperature),
            LOOKUP: lookup_arms(self.cfg, self.model, temperature),
        }

    def candidates(self, point: Point) -> dict[str, dict[str, Arm]]:
        """Family -> setting -> arm; beyond batch 1 only ours are tried, since transformers drafts for one prompt."""
        plain = plain_arms(self.cfg, self.model, point.temperature)[0]
        ours = {PLAIN: plain, **self._ours(point.temperature, list(self._settings(point.temperature)))}
        peers = self._drafting_peers(point.temperature) if point.batch_size == 1 else {}
        return {family: arms for family, arms in {OURS: ours, **peers}.items() if arms}

    def choose(self, cell: Cell) -> dict[str, Any]:
        """With "best_chain", the fastest plain chain, and "held", how sure the choice of ours is; ours may be plain
        decoding."""
        prompts = [one for text in self.texts for one in self.screening(cell, text)]
        tried = fastest_settings(self.cfg, cell.point, self.candidates(cell.point), prompts)
        chains = [name for name, one in self._settings(cell.temperature).items() if is_plain_chain(one)]
        speeds = tried["tokens_per_s"][OURS]
        held = held_choice(tried["seconds_per_token"][OURS], self.cfg.seed)
        return {
            **tried,
            "best": {**tried["best"], OURS: held["setting"]},
            "held": held,
            "best_chain": fastest({name: speeds[name] for name in chains}) if chains else None,
        }

    def timed_settings(self, cell: Cell, choice: Choice) -> list[str]:
        """Our settings timed in a cell: the best one, the best plain chain, and the fixed ones."""
        chosen = [choice.best[OURS], choice.best_chain, *self.cfg.decoders.fixed]
        return list(dict.fromkeys(name for name in chosen if name in self._settings(cell.temperature)))

    def drafted(self, cell: Cell, choice: Choice) -> Iterator[Drafted]:
        known, family = self._settings(cell.temperature), self.target.families[self.draft]
        for name in self.timed_settings(cell, choice):
            yield Drafted(our_name(name), family, self.draft, known[name], name)

    def arms(self, cell: Cell, choice: Choice) -> list[Arm]:
        """All that run."""
        temperature, without = cell.temperature, self.left_out(cell)
        ours = self._ours(temperature, self.timed_settings(cell, choice)).values()
        arms = [*plain_arms(self.cfg, self.model, temperature), *ours]
        if cell.batch_size in self.cfg.decoders.static_batches:
            arms.append(self._static(temperature))
        for peer, settings in self._drafting_peers(temperature).items():
            if peer in choice.best:
                arms.append(renamed(settings[choice.best[peer]], peer))
        return [arm for arm in [*arms, *self.vllm_arms(temperature).values()] if arm.name not in without]

    def warm_arms(self, cell: Cell, choice: Choice) -> list[Arm]:
        """Warmed once for all texts; what transformers cannot compile is left out."""
        if cell.point not in self._warm:
            for arm in self.arms(cell, choice):
                self._warm_up(arm, cell)
            self._warm.add(cell.point)
        return self.arms(cell, choice)

    def _warm_up(self, arm: Arm, cell: Cell) -> None:
        prompts, tokens = self.texts[cell.text].screening, self.cfg.decode.max_new_tokens
        timed = [one for text in self.texts.values() for one in text.reported]
        try:
            warm_up([arm], prompts, cell.batch_size, self.cfg.seed, tokens, timed, WARM_UPS)
        except RuntimeError as error:
            if arm.name != STATIC:
                raise
            self._broken[arm.name] = f"compiling failed: {str(error).splitlines()[0]}"

    def left_out(self, cell: Cell) -> dict[str, str]:
        reasons = dict(self._broken)
        if (reason := no_compiler()) is not None:
            reasons[STATIC] = reason
        if cell.batch_size > 1:
            for peer in (ASSISTED, LOOKUP):
                reasons[peer] = f"transformers drafts for one prompt at a time, not {cell.batch_size}"
        elif not self._drafting_peers(cell.temperature)[ASSISTED]:
            reasons[ASSISTED] = "no setting of it is configured, or the draft is not a language model, or has a window"
        return reasons
