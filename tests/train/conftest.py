"""One corpus, target and record folder for all tests of this package, which are only read; a clock; writes stopped."""

from pathlib import Path

import pytest

from tests.train.small_loop import Clock
from tests.train.toy import save_target, write_corpus, write_records


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "files")


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory, target: Path, corpus: Path) -> Path:
    return write_records(tmp_path_factory.mktemp("records") / "sparse", target, corpus)


@pytest.fixture(scope="session")
def full_records(tmp_path_factory: pytest.TempPathFactory, target: Path, corpus: Path) -> Path:
    return write_records(tmp_path_factory.mktemp("records") / "dense", target, corpus, ["full", "last_hidden"])


@pytest.fixture(scope="session")
def feature_records(tmp_path_factory: pytest.TempPathFactory, target: Path, corpus: Path) -> Path:
    """All of p, and the hidden states that the heads of these tests read."""
    folder = tmp_path_factory.mktemp("records") / "features"
    return write_records(folder, target, corpus, ["full"], features={"layers": [0, 1, -1]})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the meter looks at."""
    clock = Clock()
    monkeypatch.setattr("train.speed_meter.time", clock)
    return clock


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint there is only what Checkpoints writes itself, which is all that these tests look at."""
    monkeypatch.setattr("accelerate.Accelerator.save_state", lambda self, folder: None)


@pytest.fixture(autouse=True)
def _step_by_step(uncaptured: None) -> None:
    """What is trained and exported is decoded with in a few short calls; the tests of decode capture their passes."""
