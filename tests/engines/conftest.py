"""One worker of vLLM and one set of toys for all tests of this package."""

from collections.abc import Iterator

import pytest

from distill.engines.worker_process import Engine
from tests.engines.environment import vllm_python
from tests.engines.serving import WORKER
from tests.engines.toys import Toys


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(vllm_python(), WORKER, {}, tmp_path_factory.mktemp("vllm") / "log") as found:
        yield found


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))
