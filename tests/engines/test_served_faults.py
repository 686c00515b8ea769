"""A server that was started with a damaged folder: `mode=served` says which fault it is, from counters alone."""

import json
import shutil
from pathlib import Path

import pytest

from decode import load_drafter
from decode.config import ModelConfig
from decode.models.describe import describe_loaded
from decode.models.load import load_model
from distill.engines.server import running
from distill.engines.vllm_command import serve_command
from distill.engines.worker_process import environment_of
from eval import stage
from eval.modes.served.counting import Pair
from eval.modes.served.faults.counting import along
from eval.modes.served.faults.faults import likely_faults
from eval.modes.served.faults.reading import open_reading
from tests.engines.environment import vllm_python
from tests.engines.faults import FAULTS
from tests.engines.serving import options
from tests.engines.test_served import settings
from tests.engines.toys import NEW_TOKENS, PROMPTS, K, Toys
from tests.eval.served.named import NAMED

pytestmark = pytest.mark.engines
SHORT = {"options": ["--enforce-eager", "--num-gpu-blocks-override", "32", "--dtype", "float32"]}


@pytest.mark.parametrize(
    ("draft", "fault"),
    [("eagle3-reduced", "norm_before_residual"), ("medusa-reduced", "medusa_fc_bias left out")],
)
def test_a_fault_of_a_served_folder_is_named(toys: Toys, tmp_path: Path, draft: str, fault: str) -> None:
    family = draft.split("-")[0]
    folder = Path(shutil.copytree(toys.exported("llama", draft), tmp_path / "served"))
    next(one for one in FAULTS if (one.family, one.name) == (family, fault)).damage(folder)
    launch = [word for name, value in options(folder).items() for word in _words(name, value)]
    command = serve_command(vllm_python(), str(toys.target("llama")), launch, SHORT["options"])
    with running(command, environment_of(vllm_python()), tmp_path / "log", 300) as server:
        cfg = settings(toys, tmp_path, (draft,), url=server.url, options=[])
        cfg.temperatures = [0.0]
        stage.run(cfg)
    (greedy,) = json.loads((tmp_path / "report/results.json").read_text())["comparisons"]
    assert greedy["verdict"] == "parted"
    assert greedy["same_texts"] == greedy["prompts"]
    assert greedy["faults"][0].startswith(f"Likely fault: {NAMED[family, fault]}")
    assert "gives the same counters" in greedy["faults"][0]


def _words(name: str, value: object) -> list[str]:
    return [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]


@pytest.mark.parametrize("fault", ["another rope", "hidden states one layer early", "norm_output left out"])
def test_in_half_precision_the_nearest_is_named_first(toys: Toys, tmp_path: Path, fault: str) -> None:
    """Ties fall otherwise, in the engine and here; the engine is our own decoder on the damaged folder."""
    whole = toys.exported("llama", "eagle3-reduced")
    folder = Path(shutil.copytree(whole, tmp_path / "served"))
    next(one for one in FAULTS if (one.family, one.name) == ("eagle3", fault)).damage(folder)
    target = load_model(ModelConfig(path=str(toys.target("llama")), dtype="bfloat16", device="cpu"))
    pair = Pair(target, len(PROMPTS))
    texts = pair.write(PROMPTS, NEW_TOKENS + K, 0.0, 0)
    ours, there = (
        pair.counters_along(load_drafter(str(one), target), PROMPTS, texts, NEW_TOKENS, K) for one in (whole, folder)
    )
    assert ours != there
    reading = open_reading(str(whole), describe_loaded(target, check=False))
    found = likely_faults(reading, along(target, PROMPTS, texts, NEW_TOKENS, K), there, ours)
    assert found[0].name == NAMED["eagle3", fault]
