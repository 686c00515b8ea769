"""Threads that run passes: in turn over one model, at once over two."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import LlamaForCausalLM

from decode.forward import passes
from decode.forward.passes import holding
from tests.tiny import tiny_llama

MODEL, OTHER = tiny_llama(), tiny_llama()
TWIN = LlamaForCausalLM(MODEL.config)
BORROWER = tiny_llama()
BORROWER.model.layers[0] = MODEL.model.layers[0]


@pytest.mark.parametrize(
    ("models", "waits"), [([MODEL], True), ([TWIN], True), ([OTHER, MODEL], True), ([BORROWER], True), ([OTHER], False)]
)
def test_passes_wait_for_those_over_the_same_model_or_configuration(models: list, waits: bool) -> None:
    order: list[str] = []

    def other() -> None:
        with holding(*models):
            order.append("other")

    thread = threading.Thread(target=other)
    with holding(MODEL):
        thread.start()
        thread.join(0.2 if waits else 60)
        order.append("this")
    thread.join(60)
    assert order == (["this", "other"] if waits else ["other", "this"])


def test_threads_that_need_the_same_models_do_not_wait_for_one_another() -> None:
    def many(turn: int) -> None:
        pair = (MODEL, OTHER) if turn else (OTHER, MODEL)
        for _ in range(2000):
            with holding(*pair), holding(pair[0]), holding(*reversed(pair)):
                pass

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(many, turn) for turn in range(2)]:
            done.result(timeout=60)


def test_a_model_that_is_gone_leaves_nothing() -> None:
    before = len(passes._turns)
    model = tiny_llama()
    with holding(model):
        assert len(passes._turns) == before + 1
    del model
    gc.collect()
    assert len(passes._turns) <= before
