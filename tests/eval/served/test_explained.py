"""What `mode=served` says of an engine whose counters or texts are not ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from eval import stage
from eval.modes.served.comparison import other_texts
from eval.modes.served.counting import Pair
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.faults.faults import observed
from tests.engines.faults import another_rope, edit_config
from tests.eval.served.test_mode import Toy, results_of
from tests.eval.served.test_mode import toy as toy  # a fixture
from tests.fake_server import serving
from tests.tiny import save_tiny_target

pytestmark = pytest.mark.usefixtures("uncaptured")

PROMPTS = [[5, 9, 3, 7], [8, 2, 6, 4, 1], [3, 3, 11]]
OURS = Counters(100, 300, (80, 60, 40))


@pytest.mark.slow
def test_an_engine_that_turns_a_draft_otherwise_is_told_so(toy: Toy, tmp_path: Path) -> None:
    turned = Path(shutil.copytree(toy.draft, tmp_path / "turned"))
    edit_config(another_rope, turned)
    with serving(toy.engine(drafted=str(turned))) as there:
        stage.run(toy.config(tmp_path, there.root, temperatures=[0.0], served={"batch_sizes": []}))
    (greedy,) = results_of(tmp_path)["comparisons"]
    assert greedy["verdict"] == "parted"
    assert greedy["faults"][0].startswith("Likely fault: another rotary base (rope_theta=1e+06 for 10000")
    assert "gives the same counters" in greedy["faults"][0]
    assert "Write both, equal" in greedy["faults"][0]
    assert "Likely fault: another rotary base" in (tmp_path / "report/summary.md").read_text()
    assert json.dumps(greedy["faults"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(_target(tmp_path_factory.mktemp("pair"), 0), 4)


def _target(folder: Path, seed: int) -> PreTrainedModel:
    save_tiny_target(folder / f"{seed}", seed=seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder / f"{seed}", dtype=torch.float32)
    return model.eval()


def test_texts_of_the_target_say_nothing(pair: Pair) -> None:
    assert other_texts(pair.target, PROMPTS, pair.write(PROMPTS, 12, 0.0, 0)) is None


def test_texts_that_were_drawn_are_told_from_those_of_another_target(pair: Pair, tmp_path: Path) -> None:
    drawn = other_texts(pair.target, PROMPTS * 4, pair.write(PROMPTS * 4, 24, 1.0, 3))
    assert drawn is not None
    assert "the engine samples" in drawn
    other = Pair(_target(tmp_path, 7), 4).write(PROMPTS, 24, 0.0, 0)
    strange = other_texts(pair.target, PROMPTS, other)
    assert strange is not None
    assert "has another target" in strange


def test_a_token_before_the_prompts_is_found(pair: Pair) -> None:
    config = pair.target.config
    config.bos_token_id, before = 2, config.bos_token_id
    try:
        more = other_texts(pair.target, PROMPTS, pair.write([[2, *prompt] for prompt in PROMPTS], 8, 0.0, 0))
        less = other_texts(pair.target, PROMPTS, pair.write([prompt[1:] for prompt in PROMPTS], 8, 0.0, 0))
    finally:
        config.bos_token_id = before
    assert more is not None
    assert "with the beginning of text (2) before the prompts" in more
    assert less is not None
    assert "without the first token of the prompts" in less


def test_texts_that_part_by_rounding_are_ties(pair: Pair) -> None:
    texts = pair.write(PROMPTS * 4, 24, 0.0, 0)
    texts[0][-1] = (texts[0][-1] + 1) % 64
    said = other_texts(pair.target, PROMPTS * 4, texts)
    assert said is not None
    assert "ties between tokens" in said


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Counters(0, 0, (0, 0, 0)), "no draft at all"),
        (Counters(100, 200, (80, 60, 0)), "drafts 2.00 tokens a round"),
        (Counters(250, 750, (1, 0, 0)), "next to nothing is accepted at position 1"),
        (Counters(110, 330, (88, 40, 10)), "what is fed back is not"),
        (Counters(150, 450, (60, 45, 30)), "the first pass itself reads something else"),
        (Counters(101, 303, (80, 60, 39)), "ties between tokens"),
    ],
)
def test_counters_say_something_by_themselves(engine: Counters, words: str) -> None:
    assert any(words in one for one in observed(engine, OURS, 3))
