"""Drafts and their folders, made once."""

import pytest

from tests.train.check.folders import Folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("served"))
