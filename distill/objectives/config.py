"""What a user sets about what a draft is fitted by; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from decode.common.typed_config import require, require_at_least

TermName = Literal["cross_entropy", "forward_kl", "tv", "neg_log_alpha", "reverse_kl", "jsd"]
ObjectiveName = Literal[TermName, "lk_hybrid", "mixture"]
CreditName = Literal["none", "decay", "dpace", "first_failure", "on_policy", "e2e_tv"]
NEEDS_ALPHA = ("dpace", "first_failure", "on_policy")  # credits that ask how likely the tokens before were accepted


@dataclass
class ObjectiveConfig:
    """What a draft is fitted by (group `objective` of the train stage)."""

    name: ObjectiveName = "forward_kl"
    """cross_entropy learns from text alone; forward_kl, tv, neg_log_alpha and lk_hybrid take any record; reverse_kl and
    jsd need full p; mixture is what `terms` says."""
    terms: dict[TermName, float] = field(default_factory=dict)
    """mixture only: objective -> weight; {} is {cross_entropy: 0.1, tv: 0.9}, DSpark's (arXiv 2607.05147)."""
    eta: float = 3.0
    """lk_hybrid only: a row's loss is w KL + (1 - w) TV with w = exp(-eta alpha)."""
    warm_up: TermName | None = None
    """Objective that is minimised at first, until the held-out alpha reaches `switch_at`; None is none."""
    switch_at: float = 0.3
    """warm_up only: the acceptance from which the objective itself takes over, for good."""
    beta: float = 0.5
    """jsd only: weight of p in the mixture m = beta p + (1 - beta) q."""
    chunk_rows: int | None = None
    """Rows of logits held at once: a few times chunk_rows * vocabulary * 4 bytes of memory; None is 1024, or as many as
    make 128 MB for a large vocabulary."""
    credit: CreditName = "none"
    """What each token of a round counts: all alike, `decay`, the chance that it is of use (dpace) or reached
    (first_failure), how often decoding the text would try it (on_policy); e2e_tv minimises what a whole round loses
    (with objective=tv)."""
    decay: float = 0.8
    """credit=decay only: the next token of a round counts this share of the one before it."""
    confidence_weight: float = 1.0
    """Weight of the confidence loss, for families that predict their own acceptance; 0 leaves it untrained."""

    def __post_init__(self) -> None:
        require(
            0 < self.beta < 1, f"objective.beta={self.beta} is outside (0, 1); its ends are forward_kl and reverse_kl"
        )
        require_at_least(1, self, "objective.", "chunk_rows")
        require(0 < self.decay <= 1, f"objective.decay={self.decay} is outside (0, 1]; 1 counts all tokens alike")
        require_at_least(0, self, "objective.", "confidence_weight")
        require(
            self.credit != "e2e_tv" or self.name == "tv",
            f"objective.credit=e2e_tv multiplies the acceptances 1 - TV of a round, and objective={self.name} is not a "
            "TV. Use objective=tv, or another credit",
        )
        self._check_terms()
        require(
            0 < self.switch_at < 1,
            f"objective.switch_at={self.switch_at} is an acceptance that a draft never crosses; use one inside (0, 1)",
        )
        require(
            self.warm_up is None or self.credit != "e2e_tv",
            f"objective.credit=e2e_tv multiplies acceptances, and objective.warm_up={self.warm_up} is to be weighed by "
            "it as well. Train the warm-up as a run of its own, and start from it by draft.init_from",
        )

    def _check_terms(self) -> None:
        require_at_least(0, self, "objective.", "eta")
        if self.name == "mixture" and not self.terms:
            self.terms = {"cross_entropy": 0.1, "tv": 0.9}
        require(
            not self.terms or self.name == "mixture",
            f"objective.terms={self.terms} and objective={self.name}, which would ignore them: they are the terms of "
            "objective=mixture. Say objective=mixture, or leave them out",
        )
        wrong = {name: weight for name, weight in self.terms.items() if not weight > 0}
        require(
            not wrong,
            f"objective.terms={self.terms} has weights that are not above 0, {wrong}: such a term would teach nothing, "
            "or the opposite. Give positive weights, or leave it out",
        )
