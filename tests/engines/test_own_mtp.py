"""vLLM drafts with a target's own MTP layer, tuned here and written back, as our decoder does with the draft."""

from pathlib import Path

import pytest

from decode.drafters.saved_draft import load_drafter
from distill.engines.worker_process import Engine
from tests.engines.counters import our_counters
from tests.engines.serving import GREEDY, served
from tests.engines.test_counters import says_something
from tests.engines.toys import NEW_TOKENS, PROMPTS, K, Toys
from tests.train.own_layer import add_own_layer
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.stage import run

pytestmark = pytest.mark.engines


def test_a_tuned_layer_of_the_target_is_drafted_from_alike(engine: Engine, toys: Toys, tmp_path: Path) -> None:
    add_own_layer(toys.target("exaone_moe"))
    draft, folder = toys.run("exaone_moe", "mtp"), tmp_path / "served"
    run(ExportConfig(format="vllm", output_dir=str(folder), draft=SavedDraftConfig(path=str(draft))))
    target = toys.loaded("exaone_moe")
    ours = our_counters(target, load_drafter(str(draft), target), PROMPTS, NEW_TOKENS, K)
    (theirs,) = served(engine, folder, folder, GREEDY)
    assert says_something(theirs)
    assert theirs == ours
