"""Logs: a few templates in turn, filled with names of the file, a counter, and a field that repeats."""

from __future__ import annotations

import random

Parts = tuple[str, str]
GIVEN, CONTINUED = 6, 8
"""Lines in the prompt and in the answer."""
TEMPLATES = (
    "{count:02} {place}: open {name}",
    "{count:02} {place}: {name} is {state}",
    "{count:02} {place}: wrote {name}, {state}",
    "{count:02} INFO {place} reads {name}",
    "{count:02} {name}={state} in {place}",
)
STATES = ("ok", "done", "ready", "waiting", "retry", "closed")


def log(names: list[str], rng: random.Random) -> Parts | None:
    """A log whose lines take turns through two or three templates; None where there are too few names."""
    if len(names) < 4:
        return None
    place, *fields = rng.sample(names, 4)
    templates = rng.sample(TEMPLATES, rng.randint(2, 3))
    states = rng.sample(STATES, len(templates))
    first = rng.randint(0, 80)
    lines = []
    for number in range(GIVEN + CONTINUED):
        turn = number % len(templates)
        filled = templates[turn].format(count=first + number, place=place, name=fields[turn], state=states[turn])
        lines.append(filled)
    return "# log\n" + "\n".join(lines[:GIVEN]), "\n" + "\n".join(lines[GIVEN:])
