"""The rules that decide which draft tokens stand, by name. All but `Typical` are exact in distribution; `Coupled` is
exact token for token.

| rule | proposals | distribution of the output | acceptance of a sampled chain |
|---|---|---|---|
| Greedy | any | argmax | argmaxes agree |
| Coupled | any | that of autoregressive sampling with the same seed, as an equality | at least (1 - TV) / (1 + TV) |
| Rejection | chains from q, trees with and without replacement, anything by the delta rule | p | 1 - TV |
| Block | chains from q, others by the delta rule | p | at least that of rejection, the most that is possible |
| Typical | any | not p: only with lossy=true, its distance measured | more |

At temperature 0 every rule is Greedy. Coupled: the target's token is argmax(log p + G[row, position]); the child that
equals it is accepted (Gumbel coupling; Daliri, Musco and Suresh 2024 bound its acceptance).
"""

from decode.verify.block import Block
from decode.verify.rejection import Rejection
from decode.verify.typical import Typical
from decode.verify.verdict import Coupled, Verifier

VERIFIERS: dict[str, Verifier] = {
    "coupled": Coupled(),
    "greedy": Coupled(),
    "rejection": Rejection(),
    "block": Block(),
    "typical": Typical(),
}
