"""`python -m tests.decode.mixed_calls N`: bytes in memory after two calls of each of 108 kinds (batch size, tree,
temperature and drafter; the prompt's length is drawn), and after N of each."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import torch

from decode import generate
from decode.drafters.lm import LMDraft
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.edit import EditDrafter
from decode.drafters.untrained.ngram import NgramDrafter
from tests.decode.heads import random_head
from tests.decode.matrix_drafters import InTurn
from tests.tiny import tiny_llama


def resident() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main(times: int) -> None:
    """Write the size after the second call of every kind, and after so many of each. Runners of twelve sizes take turns
    in the places of eight.

    Not after the first: of what is kept up to a bound, captures above all, a part is first made in the second. Measured
    after one to five calls of each kind: 924, 1045, 1041, 1037 and 1038 MB.
    """
    model = tiny_llama(num_layers=6).requires_grad_(False)
    draft, lookup = LMDraft(tiny_llama(seed=1)), NgramDrafter(NgramConfig(least_match=1, memory=1000))
    cascade = CascadeDrafter(LMDraft(tiny_llama(seed=2)), lookup)
    drafters = [None, draft, random_head("eagle3", model), cascade, InTurn([lookup, EditDrafter(), draft])]
    trees = [(drafters[0], "chain"), *itertools.product(drafters[1:], ["chain", "2x2x1"])]
    kinds = list(itertools.product(trees, range(1, 7), [0.0, 0.7]))
    rng = random.Random(0)
    for number in range(times):
        for (drafter, tree), rows, temperature in rng.sample(kinds, len(kinds)):
            ids = torch.randint(2, 64, (rows, rng.choice([3, 40, 200])))
            settings = {"temperature": temperature, "tree": tree, "num_draft_tokens": 3}
            generate(model, drafter, ids, max_new_tokens=24, eos_token_id=(), **settings)  # type: ignore[arg-type]
        if number in (1, times - 1):
            sys.stdout.write(f"{resident()}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
