"""results.json, schema 2: written and read back by the same classes, so that no figure is lost or renamed between."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decode.common.checked_json import read_json, write_json
from decode.common.errors import InputError
from eval.config import Mode
from eval.measure.energy import Kind
from eval.results.published import unpacked

Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
"""[low, high] at 95%."""
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]
"""Two quantities of one prompt, of which the first is divided by the second."""
Share = Annotated[float, Field(ge=0, le=1 + 1e-4)]  # sums of float32 probabilities round
Count = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """What results.json holds: no unknown key, no NaN, no text for a number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class ComponentTimes(Part):
    """Seconds of bare forwards timed alone on the same cache at the run's mean context; medians."""

    num_draft_tokens: Count
    """Tokens drafted in a round; fewer than asked for where a head drafts no more."""
    t_target_1_s: float
    """Target over 1 token."""
    t_target_k1_s: float
    """Target over k + 1 tokens."""
    t_draft_s: float
    """Draft, per drafted token."""


class Gaps(Part):
    """Seconds between arrivals."""

    p50: float | None
    p95: float | None


class ContextBucket(Part):
    """Target passes whose row held context_from ... context_below - 1 tokens before them."""

    context_from: Count
    context_below: Count
    prompts: Count
    """That reached it; of batches, batches."""
    passes: Count
    tau: float
    """Tokens emitted per pass."""
    tau_ci95: Interval | None


class Row(Part):
    """What each figure means stands under `definitions` in the same file; None is what was not measured."""

    drafter: str
    draft: str
    setting: str | None = None
    verifier: str
    tree: str
    dtype: str
    text: str
    category: str | None = None
    temperature: float
    batch_size: Count
    num_draft_tokens: Count
    seed: int
    prompts: Count
    tokens: Count
    alpha: Share | None = None
    alpha_ci95: Interval | None = None
    alpha_tokens: Count = 0
    tau: float
    tau_ci95: Interval | None
    acceptance_by_position: list[Share | None]
    tokens_per_s: float | None
    baseline: str
    baseline_tokens_per_s: float | None
    speedup: float | None
    speedup_ci95: Interval | None
    whole_call_speedup: float | None
    whole_call_speedup_ci95: Interval | None
    predicted_speedup: float | None
    realised: float | None
    component_times: ComponentTimes | None
    ttft_s: float
    itl_s: Gaps
    mismatches: Count | None = None
    near_ties: Count | None = None
    tokens_checked: Count = 0
    uncached_mismatches: Count | None = None
    uncached_near_ties: Count | None = None
    uncached_tokens_checked: Count = 0
    dtype_flips: Count | None
    dtype_tokens_compared: Count
    uncached_dtype_flips: Count | None = None
    uncached_dtype_tokens: Count = 0
    repeated_4gram_share: Share | None
    energy_j_per_token: float | None = None
    energy_j_per_token_ci95: Interval | None = None
    energy_kind: Kind | None = None
    energy_reason: str | None = None
    peak_memory_bytes: Count
    alpha_by_document: list[Pair] | None = None
    """[sum of alpha, tokens]."""
    passes_by_prompt: list[Pair] | None = None
    """[tokens emitted, target passes]."""
    seconds_by_prompt: list[Pair | None] | None = None
    """[baseline's seconds per token, ours] after the first arrival."""
    call_seconds_by_prompt: list[Pair | None] | None = None
    """The same for whole calls."""
    joules_by_prompt: list[Pair] | None = None
    """[joules, tokens emitted]."""
    speedup_by_run: list[float | None] | None = None
    """Of runs that were pooled."""
    realised_ci95: Interval | None = None
    ahead_share: Share | None = None
    """Of the rounds with drafts, those whose drafts were made during the pass before; None without decode.overlap."""
    tau_by_context: list[ContextBucket] | None = None
    """Shortest contexts first; one bucket where all are short."""


LATER = ("alpha_by_document", "passes_by_prompt", "seconds_by_prompt", "call_seconds_by_prompt", "speedup_by_run")
LATER += ("realised_ci95", "energy_j_per_token_ci95", "energy_kind", "joules_by_prompt", "tau_by_context")
LATER += ("ahead_share",)
"""Fields that results of this schema may lack: they were written before these came."""
SCHEMA = 2
_EDITED = "it was edited or cut, and what it says was not measured. Write the report again"


class Energy(Part):
    """Joules per emitted token of an arm; None with the reason where nothing was metered."""

    where: str
    arm: str
    joules_per_token: float | None
    joules_per_token_ci95: Interval | None
    kind: Kind | None
    source: str | None
    """Counters that were read and added."""
    reason: str | None
    by_batch: list[Pair] | None
    """[joules, tokens emitted] by batch of prompts; None where several runs were pooled."""


class ResultsFile(Part):
    """What every mode's results.json holds; a mode adds keys of its own."""

    model_config = ConfigDict(extra="allow")

    schema_version: Literal[2] = Field(alias="schema")
    mode: Mode
    name: str
    environment: dict[str, Any]
    """Machine, versions, revision, command, seed and seconds."""
    target: dict[str, Any]
    definitions: dict[str, str]
    """What each figure means, in words."""
    rows: list[Row]
    energy: list[Energy] | None = None
    """None in results of a time before energy was metered."""


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write them whole or not at all, in the layout that `read_results` reads."""
    ResultsFile.model_validate(results)
    write_json(path, results)


def read_results(path: Path) -> dict[str, Any]:
    """The content of results.json; InputError names what is not as this version writes it."""
    content = unpacked(read_json(path))
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"{path} has schema {schema!r}, and this version reads schema {SCHEMA}; write the report again"
        )
    try:
        rows = ResultsFile.model_validate(content).rows
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {where}: {first['msg']}, found {str(first['input'])[:80]!r}: {_EDITED}") from error
    for number, row in enumerate(rows):
        missing = sorted(Row.model_fields.keys() - row.model_fields_set - set(LATER))
        if missing:
            raise InputError(f"{path}: row {number} lacks {', '.join(missing)}: {_EDITED}")
    return content
