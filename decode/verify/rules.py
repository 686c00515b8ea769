"""The rules that decide which draft tokens stand, by name. All but `Typical` are exact in distribution; `Coupled` is
exact token for token.

| rule | proposals | distribution of the output | acceptance of a sampled chain |
|---|---|---|---|
| Greedy | any | argmax | argmaxes agree |
| Coupled | any | that of autoregressive sampling with the same seed, as an equality | at least (1 - TV) / (1 + TV) |
| Rejection | chains from q, trees with and without replacement, anything by the delta rule | p | 1 - TV |
| Block | chains from q | p | at least that of rejection, the most that is possible |
| Typical | any | not p: only with lossy=true, its distance measured | more |

At temperature 0 every rule is Greedy. Coupled: the target's token is argmax(log p + G[row, position]); the child that
equals it is accepted (Gumbel coupling; Daliri, Musco and Suresh 2024 bound its acceptance).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from decode.trees.tree import Drawn
from decode.verify.block import Block
from decode.verify.rejection import Rejection
from decode.verify.typical import Typical
from decode.verify.verdict import Question, Verdict, Verifier, follow

if TYPE_CHECKING:
    from decode.trees.tree_plans import Shape


class Coupled:
    """Accept the child that equals the token which autoregressive sampling with the same noise would emit."""

    shares_noise = True

    def drawn(self, shape: Shape, replacement: bool) -> Drawn | None:
        """Any tree will do, drawn in any way: the draft's best by the shared noise, which differ."""
        return None if replacement else "arbitrary"

    def __call__(self, question: Question) -> Verdict:
        gumbel = question.gumbel
        if gumbel is None:
            return follow(question.tree, question.scores, lambda rows, depths: rows.argmax(-1))
        # normalising log p would shift all scores alike
        return follow(question.tree, question.scores, lambda rows, depths: (rows + gumbel[:, depths]).argmax(-1))


class Greedy(Coupled):
    """Coupled at temperature 0, where there is no noise."""


VERIFIERS: dict[str, Verifier] = {
    "coupled": Coupled(),
    "greedy": Greedy(),
    "rejection": Rejection(),
    "block": Block(),
    "typical": Typical(),
}
