"""Settings that every test needs: offline, quiet, and as many threads as a shared machine has to spare."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers, tiny matrices: more threads would wait for each other
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

import pytest  # noqa: E402 - what tests import reads the environment


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass step by step, where captures are not what is tested: each costs as much as a hundred passes of a tiny
    model, and few texts here are long enough for that."""
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that a worker has it while the other one runs the rest (test.sh keeps the order)."""
    items.sort(key=lambda item: item.path.name != "test_tutorial.py")
