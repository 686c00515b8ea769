"""Whether it pays to draft the next round while the target verifies this one (decode.overlap=true), simulated before
any hardware is bought; no model is loaded.

python scripts/overlap_simulation.py --target-ms 30 --draft-ms 3 --alpha 0.85 0.8 0.75 --links-ms 0 5
python scripts/overlap_simulation.py --report runs/toy/report/results.json

The clock begins with a verification, and a round lasts until the next one begins. Both ways accept the same tokens.
In turn, the verdict goes to the draft, which drafts k tokens and sends them. Ahead, as `decode.drafters.beside.ahead`
does, the draft goes on as if all k tokens were accepted, and guesses the target's own token too: k + 1 tokens while the
target verifies. Where the verdict of every row is as assumed, the next verification waits for nothing but these. Else
the draft is told once it is through, and drafts anew. Threads, copies and the decoder's own work are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decode.common.errors import InputError, UserError
from eval.config import TOKEN_FOR_TOKEN
from eval.results.schema import read_results

LENGTHS = range(1, 13)
"""Draft lengths tried; each way has its best one."""
JITTER, ROUNDS, SEED = 0.1, 20_000, 0


@dataclass(frozen=True)
class Pair:
    """Milliseconds of passes that run alone, and what is accepted."""

    name: str
    target_ms: float
    """Of the target over one token."""
    token_ms: float
    """That each further token of the same pass adds."""
    draft_ms: float
    """Of the draft, per token."""
    acceptance: tuple[float, ...]
    """That a draft token is accepted, where those before it were; the last one stands for all positions behind."""
    batch_size: int = 1

    def chances(self, count: int) -> list[float]:
        """Acceptance at the first `count` positions."""
        known = list(self.acceptance[:count])
        return known + [self.acceptance[-1]] * (count - len(known))


class Rounds(NamedTuple):
    """Of N simulated rounds, by index."""

    tokens: np.ndarray
    """(N,) emitted, mean of the rows."""
    milliseconds: np.ndarray
    """(N,) from one verification to the next."""
    foreseen: np.ndarray
    """(N,) bool: the verdict was as assumed, in every row."""

    @property
    def rate(self) -> float:
        """Tokens a millisecond."""
        return float(self.tokens.sum() / self.milliseconds.sum())


def simulate(
    way: str, pair: Pair, k: int, link_ms: float, jitter: float = JITTER, rounds: int = ROUNDS, seed: int = SEED
) -> Rounds:
    """`way` is "in turn" or "ahead". Times scatter around their means (lognormal, `jitter` their standard deviation
    as a share of the mean). The target's own token is guessed as often as a draft token there would be accepted, which
    holds under the coupled rule, whose noise the guess shares."""
    generator = np.random.default_rng(seed)
    drawn = generator.random((rounds, pair.batch_size, k + 1)) < np.array(pair.chances(k + 1))
    taken = np.cumprod(drawn, axis=-1)
    tokens, foreseen = 1 + taken[..., :k].sum(-1).mean(-1), np.asarray(taken[..., k].all(-1))
    sigma = np.sqrt(np.log1p(jitter**2))

    def times(mean_ms: float) -> np.ndarray:
        return mean_ms * generator.lognormal(-(sigma**2) / 2, sigma, rounds)

    verify_ms = pair.target_ms + k * pair.token_ms
    if way == "in turn":
        back, drafting, forth = times(link_ms), times(k * pair.draft_ms), times(link_ms)
        return Rounds(tokens, times(verify_ms) + back + drafting + forth, foreseen)
    verifying, guessing = times(verify_ms), times((k + 1) * pair.draft_ms)
    told, back, forth = (times(link_ms) for _ in range(3))
    as_assumed = np.maximum(verifying, told + guessing + forth)
    anew = np.maximum(verifying + back, told + guessing) + times(k * pair.draft_ms) + forth
    return Rounds(tokens, np.where(foreseen, as_assumed, anew), foreseen)


def measured(file: Path) -> list[Pair]:
    """The rows of a report's draft LMs under a token-for-token rule whose passes were timed alone; InputError where
    there are none. Heads wait for the target's hidden states."""
    found = []
    for row in read_results(file)["rows"]:
        accepted = tuple(takewhile(lambda share: share is not None, row["acceptance_by_position"]))
        is_asked = row["drafter"] == "lm" and row["verifier"] in TOKEN_FOR_TOKEN
        if not is_asked or row["category"] or row["setting"] or not row["component_times"] or not accepted:
            continue
        times, name = row["component_times"], f"{row['draft']}, T={row['temperature']:g}, batch {row['batch_size']}"
        further = (times["t_target_k1_s"] - times["t_target_1_s"]) / times["num_draft_tokens"]  # noise: below 0, too
        each = 1e3 * times["t_target_1_s"], 1e3 * max(0.0, further), 1e3 * times["t_draft_s"]
        found.append(Pair(name, *each, accepted, row["batch_size"]))
    if not found:
        raise InputError(
            f"{file} has no row of a draft LM under decode.verifier=coupled whose passes were timed alone. Name the "
            "results.json of a report (mode=report) of one, or give --target-ms, --draft-ms and --alpha"
        )
    return found


def table(pairs: Sequence[Pair], links_ms: Sequence[float]) -> Iterator[str]:
    """Markdown: speedups over the target without a draft, each way at the k with which it is the fastest."""
    yield "| pair | link ms | in turn: k | speedup | ahead: k | speedup | foreseen | ahead / in turn |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for pair in pairs:
        for link_ms in links_ms:
            (turns, in_turn), (early, ahead) = (
                max(((k, simulate(way, pair, k, link_ms)) for k in LENGTHS), key=lambda one: one[1].rate)
                for way in ("in turn", "ahead")
            )
            speeds = [one.rate * pair.target_ms for one in (in_turn, ahead)]
            yield (
                f"| {pair.name} | {link_ms:g} | {turns} | {speeds[0]:.2f} | {early} | {speeds[1]:.2f} | "
                f"{ahead.foreseen.mean():.0%} | {speeds[1] / speeds[0]:.2f} |"
            )


def _number(least: float, most: float = float("inf")) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not least <= float(text) <= most or float(text) == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not from {least:g} to {most:g}")
        return float(text)

    return parse


def main() -> None:
    """Print the table; exit code 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="results.json of a report, whose draft LMs are pairs")
    parser.add_argument("--target-ms", type=_number(1e-6), help="of a pass over one token")
    parser.add_argument("--draft-ms", type=_number(1e-6), help="of a draft token")
    parser.add_argument("--alpha", type=_number(0, 1), nargs="+", help="acceptance, of each position where several")
    parser.add_argument("--token-ms", type=_number(0), default=0.0, help="that a further token adds to a target pass")
    parser.add_argument("--batch-size", type=int, choices=range(1, 257), default=1, metavar="ROWS")
    parser.add_argument("--links-ms", type=_number(0), nargs="+", default=[0.0, 0.05, 1.0, 10.0], help="one way")
    asked = parser.parse_args()
    given = (asked.target_ms, asked.draft_ms, asked.alpha)
    if (asked.report is None) == (None in given):
        parser.error("give either --report, or --target-ms, --draft-ms and --alpha")
    try:
        own = Pair("given", asked.target_ms, asked.token_ms, asked.draft_ms, tuple(asked.alpha or ()), asked.batch_size)
        pairs = [own] if asked.report is None else measured(asked.report)
        sys.stdout.write("\n".join(table(pairs, asked.links_ms)) + "\n")
    except UserError as error:
        sys.stderr.write(f"draftsmith overlap: error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
