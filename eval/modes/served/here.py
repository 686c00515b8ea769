"""The same prompts in our decoder: what is accepted, and how fast it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from decode.common.progress import get_logger
from eval.arms.base import Sample
from eval.arms.ours import OurArm
from eval.config import EvalConfig
from eval.inputs import load, settings_at
from eval.measure.cells import Results
from eval.measure.energy import meter_of
from eval.modes.served.comparison import check_texts, extended, judge, ours
from eval.modes.served.counting import Pair, Texts
from eval.modes.served.faults.faults import explained
from eval.modes.served.folders import ServedDraft
from eval.modes.served.kept import Asked, Compared, Here, OurTimes, Reply, answers_of
from eval.results.energy import energy_entry, energy_pairs

_DRAWS_OTHERWISE = (
    "At temperature 0 this draft drafts there as it does here, so the engine reads it right, and draws or verifies "
    "tokens otherwise. CPU builds of vLLM without Triton read the temperatures of drafted tokens from memory that "
    "nothing has written (vLLM issue 55005); servers that are started here have that mended."
)
log = get_logger("eval")


def measure_here(
    cfg: EvalConfig, results: Results, drafts: Sequence[ServedDraft], asked: Sequence[Asked], prompts: Texts
) -> dict[str, Here]:
    """Our decoder's part by draft, once the engine's processes are gone: memory is then free, and so are the cores."""
    read = {one.name: results.read(f"ours/{one.name}.json") for one in drafts}
    kept = {name: Here.model_validate(content) for name, content in read.items() if content is not None}
    missing = [one for one in drafts if one.name not in kept]
    if missing:
        model, drafters = load(cfg, cfg.target)
        pair = Pair(model, cfg.lossless.batch_size)
        for draft in missing:
            answers = answers_of(asked, draft.name)
            found = [
                _compare(cfg, pair, drafters[draft.name], draft, float(temperature), answer, prompts)
                for temperature, answer in answers.items()
            ]
            found = [_with_greedy(one, found) for one in found]
            timed = [
                _timed_here(cfg, pair, drafters[draft.name], draft, size, prompts) for size in cfg.served.batch_sizes
            ]
            speeds, energy = [one for one, _ in timed], [one for _, spent in timed for one in spent]
            dtype = str(model.dtype).removeprefix("torch.")
            kept[draft.name] = Here(comparisons=found, speeds=speeds, energy=energy, dtype=dtype)
            results.keep(f"ours/{draft.name}.json", kept[draft.name].model_dump())
    return kept


def _compare(
    cfg: EvalConfig,
    pair: Pair,
    drafter: Any,
    draft: ServedDraft,
    temperature: float,
    answer: Reply,
    prompts: Texts,
) -> Compared:
    """One draft at one temperature, here beside there."""
    log.info("counting here: %s, T=%g", draft.name, temperature)
    texts, there = answer.texts, answer.counters
    same = None if temperature else check_texts(pair, prompts, texts, cfg.served.engine)
    here = ours(pair, drafter, prompts, texts, temperature, cfg.seed, draft.compared)
    dtype = str(pair.target.dtype).removeprefix("torch.")
    verdict, faults = judge(there, here, temperature, dtype, cfg.seed), []
    if verdict == "parted" and not temperature:  # of drawn texts what was accepted behind the end is not known
        written = extended(pair, prompts, texts, draft.compared)
        faults = explained(draft.folder, pair.target, prompts, written, there, here)
    return Compared(temperature=temperature, counters=here, verdict=verdict, same_texts=same, faults=faults)


def _with_greedy(one: Compared, every: Sequence[Compared]) -> Compared:
    """A comparison of drawn texts, with what follows where it parted and the greedy one did not."""
    greedy = [other.verdict for other in every if not other.temperature]
    if not one.temperature or one.verdict != "parted" or "parted" in greedy or not greedy:
        return one
    return one.model_copy(update={"faults": [_DRAWS_OTHERWISE]})


def _timed_here(
    cfg: EvalConfig, pair: Pair, drafter: Any, draft: ServedDraft, size: int, prompts: Texts
) -> tuple[OurTimes, list[dict[str, Any]]]:
    """Tokens per second of our decoder by round, with the draft and alone, on one batch of prompts; and the energy of
    both."""
    settings = settings_at(cfg, cfg.temperatures[0]) | {"num_draft_tokens": draft.compared, "eos_token_id": ()}
    batch = [prompts[row % len(prompts)] for row in range(size)]
    arms = {
        "drafted": OurArm("ours", pair.target, drafter, settings),
        "alone": OurArm("alone", pair.target, None, settings),
    }
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    spent: dict[str, list[list[Sample]]] = {name: [] for name in arms}
    meter = meter_of(cfg.timing.watts, pair.target)
    for number in range(cfg.served.rounds + 1):
        for name, arm in arms.items():
            done, joules = meter.around(partial(arm.run, batch, range(size), cfg.served.timed_tokens, cfg.seed))
            if number:  # the first round warms up
                speeds[name].append(done.tokens / done.seconds)
                spent[name].append([replace(done, joules=joules)])
    where, named = f"ours, batch {size}, T={cfg.temperatures[0]:g}", {"drafted": draft.name, "alone": "no draft"}
    energy = [energy_entry(where, named[name], energy_pairs(rounds), meter, cfg.seed) for name, rounds in spent.items()]
    return OurTimes(batch_size=size, **speeds), energy
