"""Larger is better, whatever is compared."""

import math

from train.best_checkpoint import rule, score
from train.metric_sums import Sums


def test_tau_decides_where_p_is_known() -> None:
    """2 tokens a pass are better than 1.5, with a higher loss and fewer accepted tokens."""
    better = Sums(loss=8.0, loss_count=4.0, alpha=2.0, alpha_count=4.0, tau=6.0, tau_count=3.0)
    worse = Sums(loss=4.0, loss_count=4.0, alpha=3.0, alpha_count=4.0, tau=4.5, tau_count=3.0)
    assert score(better) == 2.0
    assert score(worse) == 1.5
    assert rule(better) == "highest validation tau estimate"


def test_the_lower_loss_decides_where_none_is() -> None:
    assert score(Sums(loss=4.0, loss_count=4.0)) > score(Sums(loss=3.0, loss_count=2.0))
    assert rule(Sums(loss=4.0, loss_count=4.0)) == "lowest validation loss"


def test_what_is_no_number_is_worse_than_every_number() -> None:
    """Nothing is larger than NaN: kept once, it would stay."""
    nan, worst = float("nan"), Sums(loss=1e30, loss_count=1.0)
    for broken in (Sums(loss=nan, loss_count=1.0), Sums(loss=1.0, loss_count=1.0, tau=nan, tau_count=1.0)):
        assert score(broken) == -math.inf < score(worst)
