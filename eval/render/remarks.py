"""Sentences that a report says of its own figures, each by a fixed rule: which draft does not pay, why, and which
length would; which one is the fastest for which category; how many prompts there were; what a prediction that was
exceeded means; that one process is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from operator import itemgetter, mul

from decode.acceptance import predicted_speedup
from eval.render.formatting import count, named, number, share, with_interval
from eval.results.reported import LengthSweep, Prompts, Report
from eval.results.schema import ComponentTimes, Row

MOST_REALISED = 1.05
"""Of the predicted speedup; above it the page says what that means."""
ONE_PROCESS = (
    "One process measured this, once: another time or machine may give another speedup. Measure three times and pool "
    "them with python -m eval.publish."
)


def remarks(results: Report) -> list[str]:
    """All that is to be said of these results; of a comparison's nothing."""
    rows = results.overall
    found = [text for row in rows if (text := why_it_does_not_pay(row, results.sweeps.num_draft_tokens))]
    return [
        *found,
        *_not_shown(rows),
        *_by_category(results.rows),
        *_faster_than_predicted(rows),
        *_few_prompts(results.prompts),
        *([] if results.runs else [ONE_PROCESS]),
    ]


def why_it_does_not_pay(row: Row, sweep: LengthSweep) -> str | None:
    """Cost against acceptance, and the length that pays or would; None for a draft that pays."""
    if row.speedup is None or row.speedup >= 1:
        return None
    speed = with_interval(row.speedup, row.speedup_ci95)
    verdict = "does not pay" if (row.speedup_ci95 or [0, 0])[1] < 1 else "is not shown to pay"
    lead = f"At T={row.temperature:g} {named(row)} {verdict} with k={row.num_draft_tokens}: {speed} times the speed"
    return f"{lead} without a draft. {_other_length(row, sweep) or _reason(row)}"


def _other_length(row: Row, sweep: LengthSweep) -> str | None:
    """A length that pays, as measured, or else as predicted and then realised to the row's own share."""
    if (sweep.draft, sweep.temperature) == (row.draft, row.temperature):
        timed = max(sweep.points, key=lambda point: point.speedup or 0, default=None)
        if timed is not None and (timed.speedup or 0) > 1:
            verdict = "pays" if (timed.speedup_ci95 or [0])[0] > 1 else "may pay"
            return f"k={timed.num_draft_tokens} {verdict}: {with_interval(timed.speedup, timed.speedup_ci95)}."
    others = {k: speed for k, speed in predicted_by_length(row).items() if k != row.num_draft_tokens}
    best = max(others, key=lambda k: others[k], default=None)
    if best is None or row.realised is None or others[best] * min(1, row.realised) <= 1:
        return None
    return f"k={best} would pay: predicted {number(others[best])}."


def _reason(row: Row) -> str:
    predicted = predicted_by_length(row)
    if not predicted:
        return "Its passes were not timed alone, so what it costs is not known; a plain chain (decode.tree=chain) is."
    best, longest = max(predicted, key=lambda k: predicted[k]), max(predicted)
    if predicted[best] > 1:
        return (
            f"By its passes alone k={best} would give {number(predicted[best])}, and the decoder's own work takes more "
            "than that gains."
        )
    limit, alpha = dearest_draft(row), f"at alpha {number(row.alpha)}" if row.alpha else "at its acceptance"
    if limit <= 0:
        return (
            f"No k up to {longest} pays: checking {best + 1} tokens takes {number(verification(row, best))} target "
            f"passes, which {alpha} even a free draft would not win back."
        )
    return (
        f"No k up to {longest} pays: drafting one token costs {number(draft_cost(row))} of a target pass; {alpha} that "
        f"would have to be below {number(limit)}."
    )


def _not_shown(rows: Sequence[Row]) -> Iterator[str]:
    found = [one for one in rows if one.speedup and one.speedup >= 1 and (one.speedup_ci95 or [2.0])[0] <= 1]
    if found:
        who = ", ".join(f"{named(one)} at T={one.temperature:g}" for one in found)
        yield f"Not shown to be faster than no draft, since the interval of the speedup holds 1: {who}."


def _by_category(rows: Sequence[Row]) -> Iterator[str]:
    """At each temperature, which draft is the fastest for which category, and where none is faster than no draft."""
    for temperature in dict.fromkeys(row.temperature for row in rows):
        best: dict[str, tuple[float, str]] = {}
        for row in rows:
            if row.temperature == temperature and row.category is not None and row.speedup is not None:
                one = row.speedup, named(row)
                best[row.category] = max(best.get(row.category, one), one, key=itemgetter(0))
        pays: dict[str, list[str]] = {}
        for category, (speedup, who) in best.items():
            if speedup > 1:
                pays.setdefault(who, []).append(f"{category} ({number(speedup)})")
        nothing = [category for category, (speedup, _) in best.items() if speedup <= 1]
        told = [f"{who} is the fastest for {', '.join(where)}" for who, where in pays.items()]
        told += [f"nothing pays for {', '.join(nothing)}"] if nothing else []
        if told:
            yield f"At T={temperature:g}, by the median over few prompts each: {'; '.join(told)}."


def _faster_than_predicted(rows: Sequence[Row]) -> Iterator[str]:
    found = [row for row in rows if row.realised is not None and row.realised > MOST_REALISED]
    if not found:
        return
    who = [f"{named(one)} at T={one.temperature:g} ({share(one.realised)} of that speedup)" for one in found]
    token = max(_token_in_passes(one) for one in found)
    told = (
        f"Without a draft a token takes up to {number(token)} times its pass, and a draft saves part of what the "
        "decoder adds to each pass, too"
        if token > MOST_REALISED
        else "Passes took longer when timed alone than within the run"
    )
    yield f"Faster than the passes alone predict: {', '.join(who)}. {told}. The speedup itself is measured."


def _token_in_passes(row: Row) -> float:
    """What a token takes without a draft, in bare passes."""
    assert row.baseline_tokens_per_s is not None
    return row.batch_size / (row.baseline_tokens_per_s * _times(row).t_target_1_s)


def _few_prompts(prompts: Prompts) -> Iterator[str]:
    wanted = prompts.wanted
    if prompts.reported < wanted.reported or prompts.timed < wanted.timed:
        yield (
            f"There were {prompts.reported} of the {count(wanted.reported, 'prompt')} that were wanted, "
            f"{prompts.timed} of {wanted.timed} timed: intervals are wider for it."
        )


def taus(row: Row) -> dict[int, float]:
    """k -> tokens per target pass that the measured acceptance by position promises, up to the length that was run."""
    known = (one or 0.0 for one in takewhile(lambda share: share is not None, row.acceptance_by_position))
    reached = accumulate(known, mul)  # that all of the first k are accepted
    return {k: 1 + total for k, total in enumerate(accumulate(reached), start=1)}


def _times(row: Row) -> ComponentTimes:
    """Of a row whose passes were timed alone."""
    assert row.component_times is not None
    return row.component_times


def verification(row: Row, k: int) -> float:
    """t_target(k + 1) in target passes over one token, in a straight line between the two sizes that were timed."""
    times = _times(row)
    slope = (times.t_target_k1_s / times.t_target_1_s - 1) / times.num_draft_tokens
    return 1 + slope * k


def draft_cost(row: Row) -> float:
    """A drafted token in target passes over one token."""
    return _times(row).t_draft_s / _times(row).t_target_1_s


def predicted_by_length(row: Row) -> dict[int, float]:
    """k -> predicted speedup; nothing where passes were not timed alone."""
    if row.component_times is None:
        return {}
    cost = draft_cost(row)
    return {k: predicted_speedup(tau, k, 1.0, cost, verification(row, k)) for k, tau in taus(row).items()}


def dearest_draft(row: Row) -> float:
    """What a drafted token may cost, in target passes, for some k to pay: tau(k) > k * cost + t(k + 1) solved for it.
    Not above 0 where checking alone costs more than the draft wins."""
    return max((tau - verification(row, k)) / k for k, tau in taus(row).items())
