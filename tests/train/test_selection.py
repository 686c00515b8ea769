"""Larger is better, whatever is compared."""

from train.selection import rule, score
from train.sums import Sums


def test_tau_decides_where_p_is_known() -> None:
    """2 tokens a pass are better than 1.5, with a higher loss and fewer accepted tokens."""
    better = Sums(loss=8.0, loss_count=4.0, alpha=2.0, alpha_count=4.0, tau=6.0, tau_count=3.0)
    worse = Sums(loss=4.0, loss_count=4.0, alpha=3.0, alpha_count=4.0, tau=4.5, tau_count=3.0)
    assert score(better) == 2.0
    assert score(worse) == 1.5
    assert rule(better) == "highest held-out tau estimate"


def test_the_lower_loss_decides_where_none_is() -> None:
    assert score(Sums(loss=4.0, loss_count=4.0)) > score(Sums(loss=3.0, loss_count=2.0))
    assert rule(Sums(loss=4.0, loss_count=4.0)) == "lowest held-out loss"
