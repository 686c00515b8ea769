"""decode.overlap: the text is that of plain decoding, what was drafted ahead keeps its distribution, threads may be
late or fail, and who cannot draft ahead is refused."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from decode import Conversation, generate, load_drafter, warm_up
from decode.api import Output
from decode.common.environment import resolve_device
from decode.common.errors import ConfigError, InputError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig
from decode.drafters.base import Context
from decode.drafters.beside.ahead import AheadDrafter
from decode.drafters.beside.other_device import OtherDeviceDrafter
from decode.drafters.beside.refusals import REASONS, UNNAMED
from decode.drafters.lm import LMDraft
from decode.drafters.untrained.config import UNTRAINED
from decode.forward import passes
from decode.forward.passes import holding
from decode.loop import Loop
from decode.requests import Event, Request
from decode.sampling.config import SamplingConfig
from decode.stage import run
from decode.trees.tree import Tree
from decode.trees.tree_plans import chain
from tests.decode import overlapped
from tests.decode.checks import check_pathwise_equality, ragged_prompts
from tests.decode.drafters import Oracle
from tests.decode.heads import random_head
from tests.decode.overlapped import PROMPT, VOCAB, delay, draft, target, threads
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama
from tests.train.export.saved_heads import save_head

call: Callable[..., Output] = partial(generate, seed=1, eos_token_id=(), max_new_tokens=30)
IDS = torch.tensor(PROMPT)
CASES = [
    (temperature, k, batch, rows, noise)
    for temperature in (1.0, 0.0)
    for batch, rows in ((1, None), (3, None), (5, 2))
    for k in (1, 2, 3, 4, 5)
    for noise in (0.0, 0.02)
]


@pytest.mark.parametrize("check", ["text", "distributions", "noise", "draws"])
def test_what_is_drafted_ahead_is_exact(check: str) -> None:
    getattr(overlapped, f"check_{check}")()


@pytest.mark.parametrize(("temperature", "k", "batch", "rows", "noise"), by_default(5, CASES))
def test_the_text_is_that_of_plain_decoding(
    temperature: float, k: int, batch: int, rows: int | None, noise: float
) -> None:
    settings = {"max_new_tokens": 20, "temperature": temperature, "num_draft_tokens": k, "batch_size": rows}
    out = check_pathwise_equality(target(), draft(noise), batch, overlap=True, audit=True, **settings)
    assert out.stats.ahead_share is not None
    if noise == 0 and batch == 1:
        rounds = [one.ahead for one in out.stats.rounds if one.ahead is not None]
        assert rounds == [False, *[True] * (len(rounds) - 1)]


@pytest.mark.parametrize(
    "settings",
    by_default(
        2,
        [
            {"strict": True},
            {"repetition_penalty": 1.3},
            {"top_k": 5, "temperature": 0.7},
            {"verifier": "rejection", "temperature": 0.0},
            {"verifier": "block", "temperature": 0.0},
        ],
    ),
    ids=str,
)
def test_so_it_is_with_other_settings(settings: dict[str, Any]) -> None:
    check_pathwise_equality(target(), draft(0.02), 2, overlap=True, max_new_tokens=20, **settings)


@pytest.mark.slow
def test_what_a_thread_is_set_to_compute_in_its_other_half_computes_in() -> None:
    """Of autocast, which is a thread's own; packed weights in float32 besides."""
    model, drafter = tiny_llama(VOCAB), LMDraft(tiny_llama(VOCAB, seed=1))
    for settings in ({"enabled": False}, {"dtype": torch.bfloat16}):
        with torch.autocast("cpu", **settings):  # type: ignore[arg-type]
            plain = call(model, None, IDS, num_draft_tokens=2).sequences
            for draft_model in (drafter, LMDraft(model)):
                out = call(model, draft_model, IDS, num_draft_tokens=2, overlap=True)
                same = (out.sequences == plain).float().mean()
                assert same == 1 or ("dtype" in settings and same > 0.3), "bfloat16 may flip near-ties"


@pytest.mark.slow
def test_texts_end_inside_what_was_assumed() -> None:
    free = call(target(), None, IDS).sequences[0].tolist()
    for at in range(3, 20):
        told = {"eos_token_id": free[at]}
        plain, ahead = call(target(), None, IDS, **told), call(target(), draft(0.0), IDS, overlap=True, **told)
        assert torch.equal(plain.sequences, ahead.sequences)
    for length in range(1, 14):
        out = call(target(), draft(0.0), IDS, overlap=True, max_new_tokens=length)
        assert out.sequences[0].tolist() == free[: 3 + length]


def test_nothing_is_drafted_beyond_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, propose = [], LMDraft.propose

    def noted(self: LMDraft, context: Context) -> Tree:
        reached.append((int(context.lengths.max()), context.is_undecided))
        return propose(self, context)

    monkeypatch.setattr(LMDraft, "propose", noted)
    call(target(), draft(0.0), IDS, overlap=True, num_draft_tokens=3, max_new_tokens=9)
    assert reached == [(3, False), (6, True)]  # rounds of 4, 4 and 1 tokens


def test_a_draft_with_a_shorter_context_stops_where_it_ends() -> None:
    short = overlapped.tiny_llama(64, dtype=torch.float64, max_position_embeddings=16)
    out = check_pathwise_equality(target(), LMDraft(short), 2, overlap=True, max_new_tokens=30)
    assert out.stats.rounds[-1].drafted == 0


def test_a_target_may_be_its_own_draft() -> None:
    check_pathwise_equality(target(), LMDraft(target()), 1, overlap=True, max_new_tokens=20)


def test_a_conversation_goes_on() -> None:
    told, plain = Conversation(), Conversation()
    ids = IDS
    for _ in range(3):
        want = call(target(), None, ids, conversation=plain).sequences
        assert torch.equal(call(target(), draft(0.02), ids, conversation=told, overlap=True).sequences, want)
        ids = torch.cat([want, IDS], 1)


@pytest.mark.slow
def test_a_draft_elsewhere_drafts_the_same() -> None:
    """Here `elsewhere` is the same CPU: what is moved stays what it is."""
    ids, _ = ragged_prompts(2)
    for verifier in ("coupled", "rejection"):
        request = Request(ids.tolist(), 20, verifier=verifier, shape=chain(3), seed=1, audit=True)
        for wrap in (lambda one: one, AheadDrafter):
            here, there = (
                Loop(target(), wrap(one), request).run() for one in (draft(0.02), OtherDeviceDrafter(draft(0.02)))
            )
            assert here[0] == there[0]
            assert here[1].rounds == there[1].rounds


@pytest.mark.slow
def test_tokens_follow_the_target_over_rounds_drafted_ahead() -> None:
    """Of 1500 seeds, the two tokens behind a round of one draft (G statistic of 16 pairs, threshold of 1e-9 at 15
    degrees)."""
    model, near = (overlapped.tiny_llama(4, dtype=torch.float64, initializer_range=0.15) for _ in range(2))
    with torch.no_grad():
        for weight in near.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    prompt, counts, ahead = [2, 1], torch.zeros(4, 4, 4, 4), 0
    for seed in range(1500):
        request = Request([prompt], 4, verifier="rejection", shape=chain(1), seed=seed, overlap=True)
        (tokens,), stats = Loop(model, LMDraft(near), request).run()
        counts[tuple(tokens[2:])] += 1
        ahead += stats.rounds[1].ahead is True
    assert ahead > 300
    expected = torch.ones(4, 4, 4, 4, dtype=torch.float64)
    for text in torch.cartesian_prod(*[torch.arange(4)] * 4):
        rows = model(torch.tensor([[*prompt, *text.tolist()]])).logits[0, 1:-1].softmax(-1)
        expected[tuple(text.tolist())] = rows[torch.arange(4), text].prod()
    seen, want = counts.double().sum((0, 1)), expected.sum((0, 1)) * 1500
    assert 2 * (seen * (seen.clamp(min=1) / want).log()).sum() < 75


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_draft_on_a_second_gpu_changes_nothing(overlap: bool) -> None:
    models: list[Any] = [overlapped.tiny_llama(64, dtype=torch.float64) for _ in range(2)]
    model, near = (one.to(f"cuda:{place}") for place, one in enumerate(models))
    ids = IDS.to("cuda:0")
    plain = call(model, None, ids, max_new_tokens=60)
    out = call(model, LMDraft(near), ids, max_new_tokens=60, overlap=overlap)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.tau > 4


@pytest.mark.parametrize("draft_s", [0.01, 0.0])
@pytest.mark.parametrize("target_s", [0.01, 0.0])
@pytest.mark.parametrize("seed", [None, 3])
def test_delays_change_nothing(
    draft_s: float, target_s: float, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay(monkeypatch, draft_s, target_s, seed)
    check_pathwise_equality(target(), draft(0.02), 2, overlap=True, max_new_tokens=20, num_draft_tokens=2)


def test_calls_of_several_threads_do_not_meet() -> None:
    prompts = [torch.tensor([[5 + row, 9, 1]]) for row in range(4)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda ids: call(target(), draft(0.02), ids, overlap=True).sequences, prompts))
    assert all(
        torch.equal(have, call(target(), None, ids).sequences) for have, ids in zip(together, prompts, strict=True)
    )
    assert threads() == 0


def test_the_threads_error_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = LMDraft.propose

    def failing(self: LMDraft, context: Context) -> Tree:
        if context.is_undecided:
            raise RuntimeError("no power")
        return propose(self, context)

    with monkeypatch.context() as patch:
        patch.setattr(LMDraft, "propose", failing)
        with pytest.raises(RuntimeError, match="no power"):
            call(target(), draft(0.0), IDS, overlap=True)
    assert threads() == 0
    check_pathwise_equality(target(), draft(0.0), 1, overlap=True, max_new_tokens=20)


def test_an_error_of_the_caller_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(event: Event) -> None:
        raise KeyboardInterrupt

    delay(monkeypatch, 0.05, 0.0)
    with pytest.raises(KeyboardInterrupt):
        call(target(), draft(0.0), IDS, overlap=True, observer=observe)
    assert threads() == 0


def test_calls_leave_nothing_behind() -> None:
    for _ in range(50):
        call(target(), draft(0.02), IDS, overlap=True, max_new_tokens=8)
    gc.collect()
    assert threads() == 0
    assert not [one for one in gc.get_objects() if type(one) in (AheadDrafter, Loop)]


def test_drafting_takes_no_time_of_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 ms each: a round takes 120 one after another, and 60 at once."""
    warm_up(target(), draft(0.0), IDS, 30, temperature=0, overlap=True)
    delay(monkeypatch, 0.06, 0.06)
    seconds = {}
    for overlap in (False, True):
        began = time.perf_counter()
        call(target(), draft(0.0), IDS, temperature=0, overlap=overlap)
        seconds[overlap] = time.perf_counter() - began
    assert seconds[True] < 0.8 * seconds[False]


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


THREE = torch.tensor([[1, 2, 3]])
CONFIDENT: dict[str, Any] = {"adaptive": True, "confidence": True}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ngram", "looks its tokens up"),
        ("jacobi", "in the target's own passes"),
        ("medusa", "hidden states"),
        ("oracle", "is no draft language model"),
    ],
)
def test_other_drafters_say_why(name: str, why: str) -> None:
    model: PreTrainedModel = tiny_llama()
    drafter: Any = Oracle([], 64) if name == "oracle" else None
    drafter = random_head(name, model) if name == "medusa" else drafter or load_drafter(name, target=model)
    with pytest.raises(ConfigError, match=f"overlap=true .*{why}"):
        generate(model, drafter, THREE, overlap=True)


@pytest.mark.parametrize("settings", [{"tree": "2x1"}, {"adaptive": True}, CONFIDENT])
def test_only_chains_of_one_length_are_drafted_ahead(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="overlap=true"):
        SamplingConfig(overlap=True, **settings)


def test_a_head_is_found_out_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_target(tmp_path / "target")
    save_head(tmp_path / "head", tmp_path / "target", "medusa")
    monkeypatch.setattr("decode.stage.load_model", lambda *_: pytest.fail("weights were loaded"))
    target = ModelConfig(path=str(tmp_path / "target"))
    cases: list[tuple[str | None, dict[str, Any], str]] = [
        (None, {"overlap": True}, "hidden states"),
        ("cpu", {}, "device of its own"),
        (None, CONFIDENT, r"decode\.confidence=true.*predicts nothing"),
    ]
    for device, settings, message in cases:
        draft = DrafterConfig(path=str(tmp_path / "head"), device=device)
        with pytest.raises(ConfigError, match=message):
            run(DecodeConfig(target, draft, SamplingConfig(**settings), prompt="a"))


@pytest.mark.parametrize("name", ["lm", "medusa", "dflash", "ngram"])
def test_no_round_ends_by_what_a_draft_does_not_predict(name: str) -> None:
    model: Any = tiny_llama(num_layers=6)
    made = {"lm": lambda: LMDraft(tiny_llama()), "ngram": lambda: load_drafter("ngram", target=model)}
    drafter: Any = made.get(name, lambda: random_head(name, model))()
    with pytest.raises(ConfigError, match="confidence=true .*predicts nothing.*adaptive=true alone"):
        generate(model, drafter, THREE, **CONFIDENT)


def test_a_draft_is_loaded_where_it_is_asked_for(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, tiny_llama(), check=False, device="cpu")
    assert isinstance(loaded, LMDraft)
    assert loaded.device == torch.device("cpu")
    with pytest.raises(InputError, match=r"on cpu in .*, and meta and .* are asked for"):
        load_drafter(model, tiny_llama(), device="meta")
    with pytest.raises(ConfigError, match=r"device=cpu, and ngram is no draft language model"):
        load_drafter("ngram", model, device="cpu")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda") == torch.device("cuda")
    with pytest.raises(InputError, match="device=cuda:1, but torch sees 1 CUDA devices"):
        resolve_device("cuda:1")


def test_every_drafter_without_training_has_a_reason() -> None:
    assert set(REASONS) - {UNNAMED} == set(UNTRAINED)
