"""From measurements to results.json: rows, peers, sweeps and the words that define every figure."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from decode.common.environment import environment, git_state
from decode.models.describe import ModelDescription
from decode.models.quantisation.quantised import method_of
from eval.arms.base import ASSISTED, UNQUANTISED
from eval.arms.ours import HAS_WINDOW, assisted_refusal
from eval.arms.transformers_arms import assisted_settings
from eval.config import EvalConfig
from eval.inputs import described_drafts
from eval.measure.alpha import Alphas
from eval.measure.quality import Quality
from eval.measure.timed_run import promised_speedup
from eval.prompts.held_out import PromptSets
from eval.prompts.prompt import Prompt
from eval.results.compared import Choice
from eval.results.energy import energy_of
from eval.results.figures import Scope, alpha_alone, listed, quality_figures
from eval.results.headline import arm_name, contests, ours_over
from eval.results.schema import SCHEMA, Row
from eval.results.statistics import arm_pairs, arm_ratio, arm_speed, described, finite

LENGTH = "draft length"
"""Among the families of a choice, the first draft by its length."""

DEFINITIONS = {
    "alpha": "How much of the target's next-token distribution p the draft's distribution q covers: the sum over the "
    "vocabulary of min(p, q), averaged over tokens; at temperature 0 the share of positions where both prefer the same "
    "token. Teacher-forced, on text that the target wrote itself after held-out prompts at that temperature; of a head "
    "over all tokens of the rounds that it was trained for.",
    "tau": "Tokens emitted per target pass, the correction or bonus token included, pooled over all passes of the "
    "timed run.",
    "acceptance_by_position": "Of the draft tokens at position i whose predecessors in the same draft were accepted, "
    "the share that was accepted too.",
    "tau_by_context": "tau of the target passes whose row held so many tokens before them, prompt included; intervals "
    "are over the prompts that came so far.",
    "tokens_per_s": "Emitted tokens per second after the first arrival, when the prompt has been read; the median over "
    "prompts. A prompt's figure is its total time over its total tokens in all rounds. Tokens cut off behind the "
    "end are not counted.",
    "baseline": "The faster of two ways without a draft, in the same run and precision: our own autoregressive loop, "
    "and transformers generate on its dynamic cache.",
    "speedup": "Seconds per token of the baseline over ours, paired by prompt; the median over prompts.",
    "whole_call_speedup": "The same for whole calls, reading the prompt included.",
    "ci95": "Percentile bootstrap over prompts, 10,000 resamples; what was measured on one prompt stays together, "
    "for alpha on all prompts of one document. None for a single prompt.",
    "component_times": "Medians of bare forwards timed alone on the decoder's cache at the run's mean context, in "
    "pieces between the prompts of the timed run.",
    "predicted_speedup": "tau x t_target(1) / (k x t_draft + t_target(k + 1)), from the component times; tau is here a "
    "prompt's own, after its first arrival, and its median over prompts, as speedup is. Of chains of one length alone.",
    "realised": "Measured speedup over predicted speedup: what is left after the decoder's own work. Above 1 where the "
    "loop without a draft loses more to its own work than the one with a draft does. Its interval is over prompts; "
    "component times stay as they were measured.",
    "ttft_s": "Seconds until the first tokens arrive, median. For a speculative arm that is a burst.",
    "itl_s": "Seconds between arrivals; the tokens of one target pass arrive together and count as one arrival.",
    "losslessness": "Exact in distribution; equal in fp64; equal in fp32 but for near-ties; bf16 may flip near-ties. "
    "Counted in the precision of `lossless.dtype`, in batches, against the target's own autoregressive text with the "
    "same noise. A mismatch is a divergence where the two tokens' scores (log p, plus the noise at temperatures above "
    "0) lie more than 1e-4 below the best; a closer one is a near-tie. After either, comparison goes on from the "
    "target's own prefix.",
    "dtype_flips": "Sequences of the timed run, in its own precision, that left our autoregressive loop's text of the "
    "same noise, out of dtype_tokens_compared tokens up to there: how often rounding in that precision decides a "
    "near-tie.",
    "uncached_mismatches": "Tokens of the target's own autoregressive text that one plain forward of the model over "
    "that text would not choose: without our cache, masks, batches or captured passes, which both of our loops share, "
    "and which losslessness therefore cannot test. Each token is judged on the text before it as it stands, with the "
    "same noise, penalties and filters: a mismatch lies more than 1e-4 below the best score, a closer one is counted "
    "in uncached_near_ties, out of uncached_tokens_checked. None where lossless.dtype is narrower than float32.",
    "uncached_dtype_flips": "The same for the draft's texts in the timed run, in its own precision, out of "
    "uncached_dtype_tokens: mismatches and near-ties together, since rounding in bf16 flips both. None under rules "
    "that draw noise of their own, whose tokens no single forward determines.",
    "repeated_4gram_share": "Share of 4-token runs in the output that occurred earlier in the same output. A model "
    "that repeats itself is easy to draft for, so a high share flatters every speed figure of that row.",
    "energy_j_per_token": "Joules of whole calls over emitted tokens, the median over prompts: what the counters of "
    "the GPU (NVML), the processor and its memory (RAPL) grew by, other programs included. An estimate is "
    "timing.watts times the seconds of a call. None, with the reason, where there is no meter.",
    "peak_memory_bytes": "Peak of the CUDA allocator in the row's calls; on a CPU that of the whole process "
    "until then, other arms and the check of losslessness included.",
    "peer": "transformers assisted generation with the same target and draft, constant schedule. Its setting was "
    "chosen on separate prompts, then timed in the same interleaved run. ratio_ours_over_peer pairs by prompt like "
    "speedup.",
}


@dataclass(frozen=True)
class MeasuredReport:
    """Everything a report measured."""

    prompts: PromptSets
    quality: Mapping[tuple[float, str], Quality]
    curve: Mapping[tuple[float, str], Alphas]
    cells: Sequence[dict[str, Any]]
    """By temperature, the timed run."""
    choices: Sequence[Choice]
    """By temperature, what was chosen before."""
    target: ModelDescription
    quality_seconds: float
    started: str
    """When the run began, in ISO format: two files that say the same are copies of one run."""


def make_results(cfg: EvalConfig, measured: MeasuredReport) -> dict[str, Any]:
    """The content of results.json."""
    seconds = sum(cell["seconds"] for cell in measured.cells) + sum(one.seconds for one in measured.choices)
    head = heading(cfg, measured.quality_seconds + seconds)
    head["environment"]["started"] = measured.started
    drafts = described_drafts(cfg, measured.target)
    return {
        **head,
        "target": target_entry(measured.target, measured.cells[0]["dtype"]),
        "drafts": dict(cfg.drafts),
        "fingerprints": {name: one.fingerprint for name, one in drafts.items()},
        "settings": _settings(cfg),
        "prompts": _prompts(cfg, measured),
        "length_choice": _length_choice(cfg, measured),
        "headline": contests(cfg, measured.choices, _screening_source(cfg)),
        "definitions": DEFINITIONS,
        "rows": [row.model_dump() for row in _rows(cfg, measured)],
        "energy": energy_of(measured.cells),
        "peers": _peers(cfg, measured),
        "unquantised": _unquantised(measured, cfg.seed),
        "peers_left_out": assisted_refusal(cfg) or (HAS_WINDOW if next(iter(drafts.values())).window else None),
        "arms": [
            {"temperature": cell["temperature"], "arm": one["arm"], "tokens_per_s": arm_speed([cell], one["arm"])}
            for cell in measured.cells
            for one in cell["arms"]
        ],
        "sweeps": {
            "num_draft_tokens": _draft_length_sweep(cfg, measured),
            "temperature": _temperature_sweep(cfg, measured),
        },
    }


def draft_lengths(cfg: EvalConfig, temperature: float, draft: str) -> list[int]:
    """Draft lengths timed: the configured one, and the sweep for the first draft at the first temperature."""
    is_swept = temperature == cfg.temperatures[0] and draft == next(iter(cfg.drafts))
    return sorted({cfg.decode.num_draft_tokens, *(cfg.timing.sweep if is_swept else [])})


def command() -> str:
    """The command line of this process as a user types it, quoted for a shell."""
    return shlex.join(["python", "-m", "eval", *sys.argv[1:]])


def heading(cfg: EvalConfig, seconds: float) -> dict[str, Any]:
    """How results.json begins: what they are, and where, by which command and in how many seconds they were
    measured."""
    facts = {**environment(), "git": git_state(), "command": command(), "seed": cfg.seed, "report_seconds": seconds}
    return {"schema": SCHEMA, "name": cfg.name, "mode": cfg.mode, "environment": facts}


def target_entry(target: ModelDescription, dtype: str) -> dict[str, Any]:
    """The target as results.json names it."""
    return {
        "path": target.path,
        "fingerprint": target.fingerprint,
        "num_parameters": target.num_parameters,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "dtype": dtype,
        "quantization": target.quantization or method_of(target.config),
    }


def _unquantised(measured: MeasuredReport, seed: int) -> list[dict[str, Any]]:
    """By temperature and draft: our speed over that of the target before it was quantised, without a draft."""
    found = []
    for cell in measured.cells:
        for row in _timed(cell) if "unquantised" in cell else ():
            if row.category is None and row.setting is None:
                ratio = arm_ratio([cell], arm_name(row.draft, row.num_draft_tokens), UNQUANTISED, seed)
                about = ("temperature", "draft", "setting", "num_draft_tokens", "tokens_per_s")
                known = {name: getattr(row, name) for name in about}
                plain = {"unquantised_tokens_per_s": arm_speed([cell], UNQUANTISED)}
                found.append({**known, **plain, **described("ratio", ratio), **cell["unquantised"]})
    return found


def _settings(cfg: EvalConfig) -> dict[str, Any]:
    """What figures depend on besides target, drafts and prompts: how k was found does not count, k does."""
    own = {name: asdict(getattr(cfg, name)) for name in ("decode", "timing", "headline", "peers", "lossless")}
    for name in ("choose_k", "screening_prompts", "screening_tokens", *([] if cfg.timing.watts else ["watts"])):
        del own["timing"][name]
    if not cfg.peers.unquantised:
        del own["peers"]["unquantised"]
    return {**own, "temperatures": cfg.temperatures, "curve_temperatures": cfg.curve_temperatures, "seed": cfg.seed}


def _prompts(cfg: EvalConfig, measured: MeasuredReport) -> dict[str, Any]:
    sets = measured.prompts
    ids = json.dumps([prompt.ids for prompt in sets.reported])
    return {
        "source": cfg.prompts.file or f"held-out split of {cfg.data.name}",
        "sha256": hashlib.sha256(ids.encode()).hexdigest(),
        "reported": len(sets.reported),
        "timed": len(sets.timed),
        "screening": len(sets.screening),
        "wanted": {
            "reported": cfg.lossless.prompts,
            "timed": cfg.timing.prompts,
            "screening": cfg.timing.screening_prompts,
        },
        "mean_tokens": sum(len(prompt.ids) for prompt in sets.timed) / len(sets.timed),
        "max_new_tokens": cfg.decode.max_new_tokens,
        "rounds": cfg.timing.rounds,
    }


def scopes(cfg: EvalConfig, sets: PromptSets) -> list[Scope]:
    """All prompts first; then, where prompts are timed one by one and differ in category, each category with a timed
    one."""
    size = cfg.timing.batch_size
    groups = range((len(sets.timed) + size - 1) // size)
    units = [prompt.unit for prompt in sets.reported]
    every = [Scope(cfg.prompts.label, groups, range(len(units)), units=units)]
    categories = dict.fromkeys(prompt.category for prompt in sets.timed if prompt.category is not None)
    if size > 1 or len(categories) < 2:
        return every
    return every + [
        Scope(cfg.prompts.label, _of(sets.timed, category), texts, category, [units[text] for text in texts])
        for category in categories
        for texts in [_of(sets.reported, category)]
    ]


def _of(prompts: list[Prompt], category: str) -> list[int]:
    return [i for i, prompt in enumerate(prompts) if prompt.category == category]


def _length_choice(cfg: EvalConfig, measured: MeasuredReport) -> dict[str, Any] | None:
    choice = measured.choices[0]
    if LENGTH not in choice.best:
        return None
    return {
        "num_draft_tokens": int(choice.best[LENGTH]),
        "tokens_per_s": choice.tokens_per_s[LENGTH],
        "temperature": choice.temperature,
        "source": _screening_source(cfg),
        "prompts": choice.prompts,
    }


def _screening_source(cfg: EvalConfig) -> str:
    if cfg.prompts.file is not None:
        return f"{cfg.prompts.file}, questions that are not reported"
    return f"validation split of {cfg.data.name}"


def _rows(cfg: EvalConfig, measured: MeasuredReport) -> list[Row]:
    """The timed rows at the report's draft length, with what was measured before of their drafts; then those of other
    settings, of which alpha alone is known: it does not depend on them."""
    by_category = {scope.category: scope for scope in scopes(cfg, measured.prompts)}
    rows = [row for cell in measured.cells for row in _timed(cell)]
    usual = [row for row in rows if row.num_draft_tokens == _k(cfg) and row.setting is None]
    found = []
    for category, scope in by_category.items():
        for row in (row for row in [*usual, *(row for row in rows if row.setting)] if row.category == category):
            quality = quality_figures(measured.quality[row.temperature, row.draft], scope, cfg.seed)
            found.append(row.model_copy(update=quality if row.setting is None else alpha_alone(quality)))
    return found


def _timed(cell: Mapping[str, Any]) -> list[Row]:
    return [Row.model_validate(row) for row in cell["rows"]]


def _k(cfg: EvalConfig) -> int:
    return cfg.decode.num_draft_tokens


def _peers(cfg: EvalConfig, measured: MeasuredReport) -> list[dict[str, Any]]:
    """transformers assisted generation at its best setting, and on other prompts at all that were tried."""
    arm, peers = arm_name(next(iter(cfg.drafts)), _k(cfg)), []
    tried = {one.label: one.as_dict() for one in assisted_settings(cfg.peers)}
    for cell, choice in zip(measured.cells, measured.choices, strict=True):
        if ASSISTED not in choice.best:
            continue
        place = {"name": ASSISTED, "draft": next(iter(cfg.drafts)), "temperature": cell["temperature"], "batch_size": 1}
        place["version"] = version("transformers")
        best = {"best": True, "setting": tried[choice.best[ASSISTED]], "prompts": "reported"}
        figures = ours_over(arm_ratio([cell], arm, ASSISTED, cfg.seed))
        pairs = {"seconds_by_prompt": listed(arm_pairs([cell], arm, ASSISTED))}
        peers.append({**place, **best, "tokens_per_s": arm_speed([cell], ASSISTED), **figures, **pairs})
        for label, speed in choice.tokens_per_s[ASSISTED].items():
            screened = {"best": False, "setting": tried[label], "prompts": "screening", "tokens_per_s": speed}
            peers.append({**place, **screened, **ours_over(None)})
    return peers


def _draft_length_sweep(cfg: EvalConfig, measured: MeasuredReport) -> dict[str, Any]:
    first, temperature = next(iter(cfg.drafts)), cfg.temperatures[0]
    shown = {"num_draft_tokens", "tau", "tokens_per_s", "speedup", "speedup_ci95", "predicted_speedup", "realised"}
    shown |= {"passes_by_prompt", "seconds_by_prompt"}
    rows = [row for row in _timed(measured.cells[0]) if (row.draft, row.category, row.setting) == (first, None, None)]
    points = [row.model_dump(include=shown) for row in rows] if cfg.timing.sweep else []
    return {"draft": first, "temperature": temperature, "points": points}


def _temperature_sweep(cfg: EvalConfig, measured: MeasuredReport) -> dict[str, Any]:
    timed = [row for row in _timed(measured.cells[0]) if (row.num_draft_tokens, row.setting) == (_k(cfg), None)]
    costs = {row.draft: row.component_times for row in timed}
    points = []
    for (temperature, draft), alphas in sorted(measured.curve.items()):
        sums = alphas.sums(list(alphas.by_row)).sum(0)
        tau, times = finite(alphas.expected_tau(_k(cfg))), costs[draft]
        predicted = promised_speedup(times, tau) if tau is not None and times is not None else None
        alpha = float(sums[0] / sums[1]) if sums[1] else None
        points.append(
            {"temperature": temperature, "draft": draft, "alpha": alpha, "tau": tau, "predicted_speedup": predicted}
        )
    return {"num_draft_tokens": _k(cfg), "points": points}
