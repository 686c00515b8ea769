"""Counters that part are explained: each fault of an exported folder is named from what is counted with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from decode import load_drafter
from decode.config import ModelConfig
from decode.models.describe import ModelDescription, describe_model
from decode.models.load import load_model
from eval.modes.served.counting import Pair
from eval.modes.served.engine.metrics import Counters, total
from eval.modes.served.faults.counting import Texts, along, count
from eval.modes.served.faults.faults import HYPOTHESES, distance, explained, likely_faults
from eval.modes.served.faults.reading import Reading, open_reading
from tests.engines.faults import FAULTS, Fault, setting
from tests.eval.served.followed import follow
from tests.eval.served.named import NAMED, UNEXPLAINED
from tests.tiers import by_default, spread
from tests.train.check.folders import Folders
from tests.train.check.test_faults import DAMAGED

pytestmark = pytest.mark.usefixtures("uncaptured")

K = 3
COUNTED = [one for one in FAULTS if one.in_vllm == "counters"]
UNREAD = ("medusa_fc_bias left out", "the target's layers counted", "not a number")
SEEN = [one for one in COUNTED if "left out" not in one.name and one.name not in UNREAD]
SEEN += [one for one in COUNTED if one.name in ("d2t left out", "norm_output left out", "the mask left out")]
"""Those of which a folder still says what the engine computes; what it does not find is random there."""


class Toys:
    """Random drafts, and texts that follow them."""

    def __init__(self, folder: Path) -> None:
        self.folders = Folders(folder)

    @cache  # noqa: B019 - one object a module
    def target(self) -> PreTrainedModel:
        return load_model(ModelConfig(path=str(self.folders.target("llama")), dtype="float32", device="cpu"))

    @cache  # noqa: B019
    def known(self) -> ModelDescription:
        return describe_model(ModelConfig(path=str(self.folders.target("llama"))))

    @cache  # noqa: B019
    def reading(self, draft: str) -> Reading:
        return open_reading(str(self.folders.exported("llama", draft)), self.known())

    @cache  # noqa: B019
    def texts(self, draft: str) -> Texts:
        drawn, limit = random.Random(1), 24 if draft in ("dflash", "dflash2", "lilicorr", "dspark") else 48
        prompts = [[drawn.randrange(300) for _ in range(6)] for _ in range(3)]
        return follow(self.reading(draft), self.target(), prompts, limit, K)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


def draft_of(family: str) -> str:
    return DAMAGED.get(family, f"{family}-reduced")


@pytest.mark.slow
@pytest.mark.parametrize("fault", SEEN, ids=lambda one: f"{one.family}: {one.name}")
def test_a_fault_is_named_from_its_counters(toys: Toys, tmp_path: Path, fault: Fault) -> None:
    draft = draft_of(fault.family)
    folder = toys.folders.copied("llama", draft, tmp_path / "damaged")
    fault.damage(folder)
    texts, whole = toys.texts(draft), toys.reading(draft)
    engine, ours = count(open_reading(str(folder), toys.known()), texts), count(whole, texts)
    found = likely_faults(whole, texts, engine, ours)
    if (fault.family, fault.name) in UNEXPLAINED:
        assert not [one for one in found if one.match == "equal"]
        return
    named = {one.name: one for one in found}
    right = named[NAMED[fault.family, fault.name]]
    assert (right.match, right.counters) == ("equal", total(engine))
    assert right.remedy
    assert right.effect
    if sum(total(engine).accepted) >= 10:
        assert {one.match for one in found} == {"equal"}


def test_every_fault_that_counters_show_is_in_the_table() -> None:
    assert {(one.family, one.name) for one in COUNTED} == NAMED.keys() | UNEXPLAINED
    assert set(NAMED.values()) <= {one.name for one in HYPOTHESES}


@pytest.mark.parametrize("draft", by_default(2, ["lm", "eagle3", "medusa", "dspark-reduced"]))
def test_rounds_are_counted_as_our_decoder_counts_them(toys: Toys, draft: str) -> None:
    """Prompt by prompt, along texts that follow the draft."""
    drafter = load_drafter(toys.folders.draft("llama", draft), toys.target())
    texts = toys.texts(draft)
    pairs = [
        (ids[:length].tolist(), ids[length:].tolist()) for ids, length in zip(texts.ids, texts.lengths, strict=True)
    ]
    prompts, written = zip(*pairs, strict=True)
    ours = Pair(toys.target(), 2).counters_along(drafter, prompts, written, texts.limit, K)
    assert count(toys.reading(draft), texts) == ours
    assert total(ours).accepted[1] > 3


@pytest.mark.parametrize(
    ("draft", "what"), spread(2, [("dflash2", 0), ("dflash2", 1), ("dflash2", 2), ("lilicorr", 0), ("lilicorr", 2)])
)
def test_an_engine_that_drafts_as_dflash_does_is_named(toys: Toys, draft: str, what: int) -> None:
    reading, texts = toys.reading(draft), toys.texts(draft)
    (plain,) = [one for one in HYPOTHESES if one.name == "a block drafted as DFlash's"]
    detail, altered = list(plain.variants(reading))[what]
    engine, ours = count(altered, texts), count(reading, texts)
    assert engine != ours
    found = {one.name: one for one in likely_faults(reading, texts, engine, ours)}
    assert detail in found[plain.name].detail
    assert found[plain.name].match == "equal"


def test_equal_counters_have_no_fault(toys: Toys) -> None:
    ours = count(toys.reading("eagle3-reduced"), toys.texts("eagle3-reduced"))
    assert likely_faults(toys.reading("eagle3-reduced"), toys.texts("eagle3-reduced"), ours, ours) == []


def test_from_a_folder_and_prompts(toys: Toys) -> None:
    """The whole way, on texts that the target writes."""
    drawn = random.Random(1)
    prompts = [[drawn.randrange(300) for _ in range(size)] for size in (3, 6)]
    texts = Pair(toys.target(), 2).write(prompts, 12 + K, 0.0, 0)
    ours = count(toys.reading("lm"), along(toys.target(), prompts, texts, 12, K))
    engine = [Counters(one.drafts - 3, 0, (9, 7, 5)) for one in ours]
    said = explained(str(toys.folders.exported("llama", "lm")), toys.target(), prompts, texts, engine, ours)
    assert said[0].startswith("None of the faults that were tried explains this")
    assert any("osition 1" in one for one in said[1:])


def test_a_head_of_several_layers_is_not_tried(toys: Toys, tmp_path: Path) -> None:
    folder = toys.folders.copied("llama", "eagle3", tmp_path / "deep")
    setting(num_hidden_layers=2)(folder)
    engine, ours = [Counters(9, 27, (1, 0, 0))], [Counters(4, 12, (3, 2, 2))]
    said = explained(str(folder), toys.target(), [[1, 2]], [[3] * 12], engine, ours)
    assert "heads of one layer alone" in said[0]
    assert len(said) > 1


def other(weight: torch.Tensor) -> torch.Tensor:
    """Numbers that nobody chose."""
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * 0.3


def lost(pattern: str) -> Callable[[Reading], Reading]:
    """An engine that did not find these tensors."""
    return lambda one: one.with_weights({name: other(one.weights[name]) for name in one.names(pattern)})


def without_biases(one: Reading) -> Reading:
    kept = {name: weight for name, weight in one.weights.items() if not name.endswith(".bias")}
    return one.with_served(weights=kept)


def of_first_tokens(one: Reading) -> Reading:
    """vLLM shares the target's output head, of which it takes as many rows."""
    return one.with_weights({"lm_head.weight": one.served.head[: len(one.weights["lm_head.weight"])]})


LOST: dict[tuple[str, str], Callable[[Reading], Reading]] = {
    ("medusa", "medusa_fc_bias left out"): without_biases,
    ("medusa", "a head left out"): lost(r"^blocks\.1\."),
    ("eagle3", "fc left out"): lost(r"^fc\.weight"),
    ("eagle3", "a projection left out"): lost("down_proj"),
    ("eagle3", "the output head left out"): of_first_tokens,
}


@pytest.mark.parametrize(("family", "fault"), spread(2, LOST), ids=": ".join)
def test_what_an_engine_leaves_out_is_named(toys: Toys, family: str, fault: str) -> None:
    draft = draft_of(family)
    texts, whole = toys.texts(draft), toys.reading(draft)
    engine, ours = count(LOST[family, fault](whole), texts), count(whole, texts)
    assert distance(engine, ours) > 0
    assert NAMED[family, fault] in {one.name for one in likely_faults(whole, texts, engine, ours)}
