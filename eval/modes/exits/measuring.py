"""Every exit of a target: how often its draft would be accepted, what its passes cost, and results.json of both, from
which `draft.settings.profile=` takes its layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from transformers import PreTrainedModel

from decode.acceptance import predicted_speedup
from decode.autotune.exit_times import ExitTimes
from decode.common.errors import RunError
from decode.drafters.base import Batch, Step
from decode.forward.resume import Lower, left_before, refuse_inseparable
from decode.models.describe import ModelDescription
from decode.models.output_head import head_of
from decode.models.structure import decoder_of, layers_of
from eval.config import EvalConfig
from eval.measure.alpha import Alphas
from eval.results.compared import Heading
from eval.results.document import heading, target_entry
from eval.results.schema import Interval
from eval.results.statistics import bootstrap, ratio_of_sums

DEFINITIONS = {
    "alpha": "Mean of sum_v min(p_v, q_v) over what the target wrote, with q what the exit says; at T = 0 the share of "
    "positions where the argmaxes agree. Brackets are 95% intervals over prompts.",
    "t_lower": "Milliseconds of a pass over one token through the layers that draft, with norm and head.",
    "predicted": "tau x t_target(1) / (k x t_lower + t_rest(k + 1)), with t_rest what is left of the verdict's pass "
    "and tau what the acceptance of consecutive positions promises; at the k where it is the most.",
}


class Length(BaseModel, frozen=True):
    """A draft length, and what it promises."""

    num_draft_tokens: int
    tau: float
    t_rest_s: float
    predicted_speedup: float


class Entry(BaseModel, frozen=True):
    """An exit at one temperature, with the length that promises the most."""

    exit: str
    exit_layer: int
    draft: str | None
    """Folder of an adapter."""
    temperature: float
    alpha: float
    alpha_ci95: Interval | None
    t_lower_s: float
    lengths: list[Length]
    num_draft_tokens: int
    predicted_speedup: float


class Exits(Heading, frozen=True):
    """The content of results.json."""

    definitions: dict[str, str]
    rows: list[Any]
    """None: nothing is decoded."""
    exit_layer: int
    """The recommended one."""
    t_target_1_s: float
    batch_size: int
    prompts: dict[str, Any]
    exits: list[Entry]

    @property
    def plain(self) -> list[Entry]:
        """Without an adapter."""
        return [one for one in self.exits if one.draft is None]

    @property
    def temperatures(self) -> list[float]:
        """In the order of the run."""
        return list(dict.fromkeys(one.temperature for one in self.exits))


@dataclass(frozen=True)
class Exit:
    """A layer to leave behind, and what stands there in place of those above."""

    name: str
    layer: int
    draft: str | None = None
    """Folder of an adapter."""
    adapter: nn.Module | None = None

    @property
    def lower(self) -> Lower:
        """Its part of the target's passes."""
        return Lower(self.layer, self.adapter)


class ExitFace:
    """What an exit says of a whole text, as `measure_alpha` asks a draft."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, found: Exit) -> None:
        self.model, self.adapter = model, found.adapter
        self.upper, self.head = layers_of(model)[found.layer :], head_of(model)

    def unroll(self, batch: Batch) -> Iterator[Step]:
        """One step: row t drafts token t + 1."""
        mask = (batch.document >= 0).long()
        with left_before(self.upper, self.adapter):
            out = decoder_of(self.model)(
                input_ids=batch.ids, attention_mask=mask, position_ids=batch.positions, use_cache=False
            )
        rows = torch.arange(batch.ids.numel(), device=batch.ids.device).view_as(batch.ids)
        yield Step(out.last_hidden_state, self.head, target_rows=rows, valid=batch.next_token_rows())


def exits_of(model: PreTrainedModel, layers: Sequence[int], adapters: Mapping[str, tuple[str, Any]]) -> list[Exit]:
    """The plain exits, then those with an adapter (name -> folder and drafter); InputError for a model that cannot be
    left there."""
    for layer in layers:
        refuse_inseparable(model, layers_of(model), layer)
    plain = [Exit(f"layer {layer}", layer) for layer in layers]
    own = [Exit(name, one.config.exit_layer, folder, one.adapter) for name, (folder, one) in adapters.items()]
    return [*plain, *own]


def entries(
    exits: Sequence[Exit],
    alphas: Mapping[str, Alphas],
    times: ExitTimes,
    temperature: float,
    rows: list[int],
    seed: int,
) -> list[Entry]:
    """An entry for each exit at one temperature; `rows` are the prompts behind alpha. RunError where no text is as long
    as the shortest draft."""
    found = []
    for number, one in enumerate(exits):
        promised = {k: alphas[one.name].expected_tau(k) for k in times.t_rest[number]}
        lengths = [
            Length(
                num_draft_tokens=k,
                tau=promised[k],
                t_rest_s=rest,
                predicted_speedup=predicted_speedup(promised[k], k, times.t_target_1, times.t_lower[number], rest),
            )
            for k, rest in times.t_rest[number].items()
            if math.isfinite(promised[k])
        ]
        if not lengths:
            raise RunError(
                f"at temperature={temperature:g} the target ended every text before {min(promised)} tokens, the "
                "shortest of exits.draft_lengths. Give other prompts, or more decode.max_new_tokens"
            )
        alpha = bootstrap(alphas[one.name].sums(rows), ratio_of_sums, seed)
        best = max(lengths, key=lambda each: each.predicted_speedup)
        found.append(
            Entry(
                exit=one.name,
                exit_layer=one.layer,
                draft=one.draft,
                temperature=temperature,
                alpha=alpha.value,
                alpha_ci95=alpha.interval,
                t_lower_s=times.t_lower[number],
                lengths=lengths,
                num_draft_tokens=best.num_draft_tokens,
                predicted_speedup=best.predicted_speedup,
            )
        )
    return found


def make_results(
    cfg: EvalConfig, target: ModelDescription, found: Sequence[Entry], t_target_1: float, prompts: int, seconds: float
) -> Exits:
    """Of everything that a run measured."""
    plain = [one for one in found if one.draft is None]
    source = cfg.prompts.file or f"validation split of {cfg.data.name}"
    return Exits(
        **heading(cfg, seconds),
        target=target_entry(target, target.dtype_name),
        definitions=DEFINITIONS,
        rows=[],
        exit_layer=best_of(plain, cfg.temperatures[0]).exit_layer,
        t_target_1_s=t_target_1,
        batch_size=cfg.timing.batch_size,
        prompts={"count": prompts, "max_new_tokens": cfg.decode.max_new_tokens, "source": source},
        exits=list(found),
    )


def best_of(found: Sequence[Entry], temperature: float) -> Entry:
    """The exit of most predicted speedup at a temperature."""
    return max((one for one in found if one.temperature == temperature), key=lambda one: one.predicted_speedup)
