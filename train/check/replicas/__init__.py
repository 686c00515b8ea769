"""Drafts of each form as they lie in a folder, computed by functions that know nothing of ours."""

from __future__ import annotations

from train.check.replicas.base import Replica
from train.check.replicas.dflash import dflash
from train.check.replicas.dflash2 import dflash2
from train.check.replicas.dspark import dspark
from train.check.replicas.eagle3 import eagle3
from train.check.replicas.lilicorr import lilicorr
from train.check.replicas.medusa import medusa
from train.check.replicas.mtp import mtp
from train.check.replicas.peagle import peagle

REPLICAS: dict[str, Replica] = {
    "eagle3": eagle3,
    "peagle": peagle,
    "medusa": medusa,
    "dflash": dflash,
    "dflash2": dflash2,
    "lilicorr": lilicorr,
    "dspark": dspark,
    "mtp": mtp,
}
"""By form."""
