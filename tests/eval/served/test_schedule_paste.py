"""What is printed to paste: whole commands whose lengths are those that were fastest, and figures beside them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eval.modes.served.schedule.paste import Measured, for_others, for_vllm
from eval.modes.served.schedule.schedule import Speed
from train.export.engines import ENGINES
from train.export.engines.base import Launch, Loads

Table = dict[int, tuple[float, ...]]
"""Draft length -> tokens/s at the batch sizes 1 and 8."""


def speeds(table: Table) -> list[Speed]:
    """Of two rounds that differ by a thousandth."""
    return [
        Speed(size, k, (speed, speed * 1.001))
        for k, both in table.items()
        for size, speed in zip((1, 8), both, strict=True)
    ]


def measured(method: str, drafted: Table, plain: Sequence[float] = (100.0, 500.0)) -> Measured:
    """A draft of that method whose accepted tokens per round are half of its length."""
    draft = ["--speculative-config", json.dumps({"method": method, "model": "a/draft", "num_speculative_tokens": 1})]
    return Measured("a/target", method, draft, ["--dtype", "float32"], speeds({0: tuple(plain)}), speeds(drafted))


EAGLE3 = measured("eagle3", {0: (90.0, 450.0), 2: (150.0, 460.0), 4: (180.0, 300.0)})
MEDUSA = measured("medusa", {1: (120.0, 490.0), 3: (150.0, 400.0)})
SLOW = {0: (90.0, 450.0), 2: (80.0, 400.0), 4: (70.0, 300.0)}


def speculation(text: str) -> dict[str, object]:
    """What a command of vLLM says of its draft."""
    words = shlex.split(text)
    return json.loads(words[words.index("--speculative-config") + 1])


def launcher(engine: str, form: str):  # noqa: ANN201
    """The launch command of an engine by draft length."""
    how = ENGINES[engine].forms[form]
    assert isinstance(how, Loads)
    return lambda k: how.launch(Launch("a/target", Path("a/draft"), k, taps=(2, 4, 6)))


def test_vllm_s_command_is_whole_and_holds_the_schedule() -> None:
    paste = for_vllm(EAGLE3)
    assert paste.k == 4
    assert shlex.split(paste.text)[:3] == ["vllm", "serve", "a/target"]
    assert shlex.split(paste.text)[-2:] == ["--dtype", "float32"]
    assert speculation(paste.text) == {
        "method": "eagle3",
        "model": "a/draft",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 8, 2]],
    }


def test_the_figures_are_over_the_target_alone() -> None:
    # At 8, k = 2 is faster than k = 0 with the draft loaded, and slower than the target alone.
    assert for_vllm(EAGLE3).why == (
        "batch size 1: k=4, 1.80 times the target alone (1.80 to 1.80); "
        "batch size 8: k=2, 0.92 times the target alone (0.92 to 0.92)"
    )


def test_what_may_be_faster_is_told_where_it_is_not_certain() -> None:
    unsure = measured("eagle3", {0: (90.0, 450.0), 2: (80.0, 400.0)})
    unsure = replace(unsure, drafted=[*unsure.drafted, Speed(1, 4, (300.0, 100.0)), Speed(8, 4, (300.0, 301.0))])
    first, second = for_vllm(unsure).why.split("; batch size 8: ")
    assert first.startswith("batch size 1: k=0, 0.90 times the target alone (0.90 to 0.90); k=4 was faster, 1.73 times")
    assert first.endswith(", and not beyond the error bar")
    assert second == "k=0, 0.90 times the target alone (0.90 to 0.90)"


def test_a_draft_that_is_nowhere_faster_than_the_target_alone_is_left_out() -> None:
    paste = for_vllm(measured("eagle3", SLOW))
    assert (paste.k, paste.text) == (0, "vllm serve a/target --dtype float32")
    # faster than with the draft loaded and nothing drafted is not enough
    paste = for_vllm(measured("eagle3", {0: (60.0, 300.0), 2: (80.0, 400.0)}))
    assert (paste.k, paste.text) == (0, "vllm serve a/target --dtype float32")


def test_medusa_gets_one_length_for_all_batch_sizes() -> None:
    # 1.2 * 0.98 = 1.176 and 1.5 * 0.8 = 1.2
    paste = for_vllm(MEDUSA)
    assert speculation(paste.text) == {"method": "medusa", "model": "a/draft", "num_speculative_tokens": 3}
    assert paste.why.startswith("over all batch sizes: k=3, 1.10 times the target alone")
    assert for_vllm(measured("medusa", {1: (90.0, 490.0)})).text == "vllm serve a/target --dtype float32"


def test_engines_of_one_user_get_the_length_of_the_smallest_batch() -> None:
    lm = measured("draft_model", {0: (90.0, 450.0), 2: (190.0, 480.0), 4: (200.0, 300.0)})
    commands = {name: launcher(name, "lm") for name in ("sglang", "trtllm", "llamacpp", "transformers")}
    found = {one.engine: one for one in for_others(lm, commands)}
    assert {name: one.k for name, one in found.items()} == {"sglang": 2, "trtllm": 2, "llamacpp": 4, "transformers": 4}
    assert "--spec-draft-n-max 4" in found["llamacpp"].text
    assert "max_draft_len: 2" in found["trtllm"].text
    assert "--speculative-num-steps 2" in found["sglang"].text
    assert "by vLLM's speeds" in found["llamacpp"].why


def test_tgi_speculates_over_all_batch_sizes() -> None:
    (paste,) = for_others(MEDUSA, {"tgi": launcher("tgi", "medusa")})
    assert paste.text.endswith("--speculate 3")


def test_other_engines_are_told_to_leave_it_where_nothing_pays() -> None:
    slow = replace(measured("eagle3", SLOW))
    names = ("sglang", "trtllm", "llamacpp")
    found = for_others(slow, {name: launcher(name, "eagle3") for name in names})
    assert [(one.k, one.text) for one in found] == [(0, "")] * 3
    assert all(one.why.startswith("serve the target without the draft") for one in found)
