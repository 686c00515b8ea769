"""`mode=certificate`: is speculative output the target's own, for this target, draft, precision and these settings?

Speculative decoding is compared with autoregressive decoding in the same runtime, batched: many greedy tokens in fp32,
where every divergence must be a near-tie; then the target's own precision, whose divergences are listed; and every
temperature above 0, where the coupled rule promises equal tokens too. The autoregressive text is held against a plain
forward of the model without a cache as well: both loops run the same passes, and could be wrong alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, Literal

from pydantic import Field

from decode.common.checked_json import Content, JsonFile, Text
from decode.common.environment import environment, git_state
from decode.common.errors import RunError
from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder
from decode.drafters.saved_draft import DraftDescription, describe_draft
from decode.models.describe import ModelDescription
from eval.config import EvalConfig
from eval.inputs import check_models, load, shared_context
from eval.measure.certificate_parts import Counts, Part, State, compare, is_done, measure_padding
from eval.prompts.chats import chat_tokenizer
from eval.prompts.held_out import as_many_as, check_lengths
from eval.prompts.prompt import Prompt
from eval.render.formatting import Column, Table, column, columns, count, number, thousands
from eval.render.page import render_markdown
from eval.report_folder import open_report
from eval.results.document import command
from eval.results.statistics import share

SCHEMA = 1
log = get_logger("eval")
LISTED = 20
LOSSLESS = (
    "Exact in distribution; equal in fp64; equal in fp32 but for near-ties; bf16 may flip near-ties, and the rate is "
    "reported."
)
_DIVERGENCES = [
    Column("part", lambda row: row[0]),
    Column("prompt", lambda row: row[1].prompt),
    Column("position", lambda row: str(row[1].position)),
    Column("target's token", lambda row: str(row[1].target_token)),
    Column("speculative token", lambda row: str(row[1].speculative_token)),
    Column("top-2 margin", lambda row: f"{row[1].top2_margin:.2g}"),
]


class Verdict(Content):
    """certificate.json, as far as it is read back."""

    version: Literal[1] = Field(alias="schema")
    failures: list[Text]


class CertifiedPart(Counts):
    """A part with what was counted."""

    chunks: int = Field(default=0, exclude=True)
    dtype: str
    temperature: float
    is_judged: bool
    wanted_tokens: int
    divergences_per_token: float | None
    uncached_flips_per_token: float | None


class Certificate(Verdict):
    """All of it, as it is written."""

    environment: dict[str, Any]
    target: dict[str, Any]
    draft: dict[str, Any]
    decode: dict[str, Any]
    prompts: dict[str, Any]
    parts: list[CertifiedPart]
    padding: dict[str, Any] | None


CERTIFICATE = JsonFile(Verdict, "a certificate could be taken for a good one", "Delete the folder and certify again.")


def run(cfg: EvalConfig) -> None:
    """Write certificate.json and certificate.md for the first draft; RunError where tokens differ that may not."""
    cfg = replace(cfg, drafts=dict([next(iter(cfg.drafts.items()))]))
    target, _ = check_models(cfg)
    parts = parts_of(cfg, own_dtype(cfg, target))
    wanted = -(-max(part.tokens for part in parts) // cfg.lossless.tokens)
    prompts = as_many_as(cfg, chat_tokenizer(cfg), wanted)
    check_lengths(prompts, cfg, shared_context(cfg, target))
    if cfg.plan:
        sys.stdout.write("\n".join(_plan(cfg, parts, prompts)) + "\n")
        return
    with open_report(cfg) as folder:
        if not folder.is_finished:
            _certify(cfg, folder, target, parts, prompts)
    found = CERTIFICATE.read(folder.file("certificate.json"))
    log.info("certificate: %s", folder.file("certificate.md"))
    if found.failures:
        raise RunError(f"not lossless: {'; '.join(found.failures)}. See {folder.file('certificate.md')}")


def own_dtype(cfg: EvalConfig, target: ModelDescription) -> str:
    """The precision that the target is served in, by name."""
    if cfg.target.dtype != "auto":
        return cfg.target.dtype
    saved = getattr(target.config.get_text_config(), "dtype", None)
    return "float32" if saved is None else str(saved).removeprefix("torch.")


def parts_of(cfg: EvalConfig, own: str) -> list[Part]:
    """fp32 (`lossless.dtype`) first, greedy before sampled; then the same in the target's own precision."""
    size = cfg.certificate
    wide = own if cfg.lossless.dtype == "auto" else cfg.lossless.dtype
    temperatures = [0.0, *(t for t in cfg.temperatures if t > 0)]
    dtypes = dict.fromkeys((wide, own))
    return [
        Part(
            dtype,
            temperature,
            size.tokens if dtype == wide and temperature == 0 else size.other_tokens,
            dtype in ("float32", "float64"),
        )
        for dtype in dtypes
        for temperature in temperatures
    ]


def _plan(cfg: EvalConfig, parts: Sequence[Part], prompts: Sequence[Prompt]) -> list[str]:
    minutes = cfg.certificate.minutes
    return [
        *(f"{part.name}: {part.tokens:,} tokens, written with and without the draft" for part in parts),
        f"prompts: {len(prompts)}, {cfg.lossless.tokens} new tokens each, batches of {cfg.lossless.batch_size}",
        "time: until all are compared" if minutes is None else f"time: at most about {minutes:g} min",
    ]


def _certify(
    cfg: EvalConfig, folder: RunFolder, target: ModelDescription, parts: list[Part], prompts: list[Prompt]
) -> None:
    for line in _plan(cfg, parts, prompts):
        log.info(line)
    state = State.open(folder.file("progress.json"), parts)
    padding = None
    for dtype, group in groupby(parts, key=lambda part: part.dtype):
        todo = [part for part in group if not is_done(part, state.parts[part.name], _allowed(cfg, state, part, parts))]
        is_last = dtype == parts[-1].dtype
        if not todo and not (is_last and cfg.decode.strict):
            continue
        model, drafters = load(cfg, replace(cfg.target, dtype=dtype))
        drafter = next(iter(drafters.values()))
        for part in todo:
            compare(cfg, model, drafter, prompts, part, state, _allowed(cfg, state, part, parts))
        if is_last and cfg.decode.strict:
            padding = measure_padding(cfg, model, drafter, prompts)
    found = _certificate(cfg, target, parts, state, len(prompts), padding)
    CERTIFICATE.write(folder.file("certificate.json"), found.model_dump(by_alias=True))
    folder.file("certificate.md").write_text(render_certificate(found), encoding="utf-8")
    folder.finish({"failures": found.failures})


def _allowed(cfg: EvalConfig, state: State, part: Part, parts: Sequence[Part]) -> float:
    return state.allowed_s(part, parts, cfg.certificate.minutes)


def _certificate(
    cfg: EvalConfig,
    target: ModelDescription,
    parts: Sequence[Part],
    state: State,
    num_prompts: int,
    padding: dict[str, Any] | None,
) -> Certificate:
    rows = [_row(part, state) for part in parts]
    name = next(iter(cfg.drafts))
    draft = describe_draft(cfg.drafts[name], target)
    return Certificate(
        schema=SCHEMA,
        failures=failures(rows, cfg.decode.strict),
        environment={**environment(), "git": git_state(), "command": command(), "seed": cfg.seed},
        target=_identity(target),
        draft={"name": name, **_identity(draft)},
        decode=asdict(cfg.decode),
        prompts={
            "source": cfg.prompts.file or f"held-out split of {cfg.data.name}",
            "prompts": num_prompts,
            "new_tokens": cfg.lossless.tokens,
            "batch_size": cfg.lossless.batch_size,
        },
        parts=rows,
        padding=padding,
    )


def _identity(model: ModelDescription | DraftDescription) -> dict[str, Any]:
    return {"path": model.path, "fingerprint": model.fingerprint, "num_parameters": model.num_parameters}


def _row(part: Part, state: State) -> CertifiedPart:
    counts = state.parts[part.name]
    return CertifiedPart(
        **{**asdict(part), **counts.model_dump()},
        wanted_tokens=part.tokens,
        divergences_per_token=share(len(counts.divergences), counts.tokens),
        uncached_flips_per_token=share(counts.uncached_flips, counts.uncached_tokens_checked),
    )


def failures(rows: Sequence[CertifiedPart], strict: bool) -> list[str]:
    """What contradicts the promise: mismatches in fp32, with the other loop or with an uncached forward; with strict,
    any divergence of the loops in any precision."""
    found = []
    for row in rows:
        where = f"{row.tokens:,} tokens ({row.dtype}, T={row.temperature:g})"
        if row.mismatches:
            found.append(f"{count(row.mismatches, 'mismatch', 'es')} in {where}")
        elif strict and row.divergences:
            found.append(f"{count(len(row.divergences), 'divergence')} in {where}, although decode.strict=true")
        if row.uncached_mismatches:
            tokens = f"{row.uncached_tokens_checked:,} tokens ({row.dtype}, T={row.temperature:g})"
            wrong = count(row.uncached_mismatches, "mismatch", "es")
            found.append(f"{wrong} of the autoregressive text with an uncached forward in {tokens}")
    return found


def render_certificate(found: Certificate) -> str:
    """Verdict, counts, what was compared, divergences, and on what."""
    counts, divergences = Table("Counts", _COUNTS, found.parts), _divergences(found)
    more = {"counts": counts, "divergences": divergences, "lossless": LOSSLESS}
    return render_markdown("certificate.md.j2", found=found, **more)


def _judged(header: str, key: str) -> Column:
    return Column(header, lambda part: thousands(getattr(part, key) if part.is_judged else None))


def _per_10_000(key: str) -> Column:
    return column("per 10,000 tokens", key, lambda rate: number(None if rate is None else 1e4 * rate))


_COUNTS = columns(
    *(column("precision", "dtype"), "T", column("tokens", write=thousands)),
    *(column("asked for", "wanted_tokens", thousands), column("texts", "sequences", thousands)),
    *(_judged("mismatches", "mismatches"), _judged("near-ties", "near_ties")),
    Column("divergences", lambda part: thousands(len(part.divergences))),
    _per_10_000("divergences_per_token"),
    *(_judged("uncached: mismatches", "uncached_mismatches"), _judged("near-ties", "uncached_near_ties")),
    *(column("flips", "uncached_flips", thousands), column("in tokens", "uncached_tokens_checked", thousands)),
    _per_10_000("uncached_flips_per_token"),
)


def _divergences(found: Certificate) -> Table:
    rows = [(f"{part.dtype}, T={part.temperature:g}", one) for part in found.parts for one in part.divergences]
    largest = max((one.top2_margin for _, one in rows), default=0.0)
    note = (
        f"{min(LISTED, len(rows))} of {len(rows):,}; all are in certificate.json. The margin is by how much the target "
        "prefers its best token to its second (in that precision, noise included); the largest is "
        f"{largest:.2g}."
    )
    return Table("Divergences", _DIVERGENCES, rows[:LISTED], note)
