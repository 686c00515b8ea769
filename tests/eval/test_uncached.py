"""What both of our loops get wrong alike is seen by a forward that shares nothing with them."""

import pytest
import torch
from transformers import LogitsProcessorList

from decode.drafters.lm import LMDraft
from decode.forward.target import NodePass
from decode.sampling.config import SamplingConfig
from decode.sampling.penalties import asked_processors, penalties
from decode.sampling.warp import Sampling
from eval.arms.ours import OurArm
from eval.measure import losslessness as uncached
from eval.measure.continuations import Job, Text, generator
from eval.measure.losslessness import MARGIN, Check, check, check_samples, check_uncached, margin_from
from eval.measure.timed_run import interleave
from eval.prompts.prompt import Prompt
from tests.tiny import tiny_llama, tiny_tokenizer

SEED, NEW = 7, 12
JOBS = [Job(row, tuple(range(3 + row, 9 + 2 * row)), NEW) for row in (0, 1, 5)]
SETTINGS = {
    "greedy": Sampling(0.0),
    "sampled": Sampling(1.0),
    "filtered": Sampling(0.8, top_k=9, top_p=0.9, min_p=0.01),
}


@pytest.fixture(autouse=True)
def uncaptured(monkeypatch):
    monkeypatch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)


def arguments(sampling: Sampling) -> dict:
    return {"num_draft_tokens": 3, **vars(sampling)}


def written(model, sampling: Sampling, **settings) -> list[Text]:
    return generator(model, None, {**arguments(sampling), **settings}, SEED, 2, "alone")(JOBS)


def off_by_one(monkeypatch) -> None:
    over = NodePass._over

    def shifted(self, tokens, own, positions, visible, keys):
        return over(self, tokens, own, positions + 1, visible, keys)

    monkeypatch.setattr(NodePass, "_over", shifted)


def first_token_hidden(monkeypatch) -> None:
    from decode.forward import target

    masks = target.layer_masks

    def hiding(config, visible, at, keys, dtype):
        return masks(config, visible & ((at[:, :, None] == 0) | (keys[:, None] > 0)), at, keys, dtype)

    monkeypatch.setattr(target, "layer_masks", hiding)


@pytest.mark.parametrize("fault", [off_by_one, first_token_hidden])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_fault_that_both_loops_share_is_seen(monkeypatch, fault, temperature):
    fault(monkeypatch)
    model, sampling = tiny_llama(seed=0), Sampling(temperature)
    reference = written(model, sampling)
    drafted = generator(model, LMDraft(tiny_llama(seed=1, num_layers=1)), arguments(sampling), SEED, 2, "drafted")
    compared = check(reference, drafted, margin_from(model, sampling, SEED))
    assert sum(compared, Check()) == Check(0, 0, len(JOBS) * NEW)  # both loops are wrong alike
    assert sum(check_uncached(model, reference, sampling, SEED), Check()).mismatches > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_what_our_loop_writes_is_what_an_uncached_forward_would_choose(name):
    model = tiny_llama(seed=0)
    found = check_uncached(model, written(model, SETTINGS[name]), SETTINGS[name], SEED)
    assert found == [Check(0, 0, NEW)] * len(JOBS)


def test_each_wrong_token_counts_alone_whatever_precedes_it():
    model, sampling = tiny_llama(seed=0), Sampling(1.0)
    text = written(model, sampling)[1]
    (last,) = check_uncached(model, [changed(text, NEW - 1)], sampling, SEED)
    assert last == Check(1, 0, NEW)
    (first,) = check_uncached(model, [changed(text, 0)], sampling, SEED)
    assert first.mismatches > 1  # the others were written after another first token


def changed(text: Text, at: int) -> Text:
    return Text(text.row, text.prompt, (*text.new[:at], (text.new[at] + 1) % 64, *text.new[at + 1 :]))


@pytest.mark.parametrize("key", ["seed", "row"])
def test_the_noise_is_that_of_the_seed_and_the_row(key):
    model, sampling = tiny_llama(seed=0), Sampling(1.0)
    text = written(model, sampling)[2]
    if key == "row":
        text = Text(text.row + 1, text.prompt, text.new)
    (found,) = check_uncached(model, [text], sampling, SEED + (key == "seed"))
    assert found.mismatches > NEW // 3


def test_a_choice_within_the_margin_is_a_near_tie():
    model, sampling = tiny_llama(seed=0), Sampling(0.0)
    text = written(model, sampling)[0]
    at, token = NEW - 1, text.new[NEW - 1]
    other = (token + 1) % 64
    twin = Text(text.row, text.prompt, (*text.new[:at], other))
    for gap, expected in ((MARGIN / 4, Check(0, 1, NEW)), (8 * MARGIN, Check(1, 0, NEW))):
        with torch.no_grad():  # `other` lies `gap` below the token that was chosen
            hidden = model.model(torch.tensor([[*text.prompt, *text.new[:at]]])).last_hidden_state[0, -1]
            row = model.lm_head.weight[token].clone()
            model.lm_head.weight[other] = row - gap * hidden / hidden.square().sum()
        (found,) = check_uncached(model, [twin], sampling, SEED)
        assert Check(found.mismatches, found.near_ties, found.tokens) == expected


def test_a_token_that_the_filters_forbid_is_a_mismatch():
    model, sampling = tiny_llama(seed=0), Sampling(1.0, top_k=1)
    text = written(model, sampling)[0]
    (found,) = check_uncached(model, [changed(text, NEW - 1)], sampling, SEED)
    assert found == Check(1, 0, NEW)


def test_penalties_are_those_of_the_run():
    model, sampling = tiny_llama(seed=0), Sampling(1.0)
    asked = {"repetition_penalty": 1.7, "presence_penalty": 1.9, "logit_bias": {5: 2.0}, "banned_words": [9]}
    texts = written(model, sampling, **asked)
    assert sum(check_uncached(model, texts, sampling, SEED), Check()).mismatches > 0
    processors = LogitsProcessorList(penalties(64, None, SamplingConfig(**asked)))
    assert check_uncached(model, texts, sampling, SEED, processors) == [Check(0, 0, NEW)] * len(JOBS)


def test_a_grammar_is_that_of_the_run(tmp_path):
    tokenizer, sampling = tiny_tokenizer(300), Sampling(1.0)
    model = tiny_llama(300, seed=0)
    asked = {"grammar": str(tmp_path / "words.regex"), "tokenizer": tokenizer}
    (tmp_path / "words.regex").write_text("([a-y]|z[0-9]){40}")
    texts = written(model, sampling, **asked)
    assert sum(check_uncached(model, texts, sampling, SEED), Check()).mismatches > 0
    settings = SamplingConfig(grammar=asked["grammar"])
    processors = LogitsProcessorList(asked_processors(300, tokenizer, settings, ends=()))
    assert check_uncached(model, texts, sampling, SEED, processors) == [Check(0, 0, NEW)] * len(JOBS)
    other = texts[0].new[4] + 1
    assert margin_from(model, sampling, SEED, processors)(texts[0], 4, other) > MARGIN


@pytest.mark.parametrize("positions", [1, 5])
def test_logits_are_held_for_a_few_positions_at_a_time(monkeypatch, positions):
    model, sampling = tiny_llama(seed=0), Sampling(1.0)
    texts = written(model, sampling)
    wrong = [changed(text, 7) for text in texts]
    at_once = check_uncached(model, wrong, sampling, SEED)
    monkeypatch.setattr(uncached, "MOST_LOGITS", positions * 64)
    widths = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: widths.append(output.shape[1]))
    assert check_uncached(model, wrong, sampling, SEED) == at_once
    assert max(widths) == positions
    assert sum(widths) == len(JOBS) * NEW


@pytest.mark.parametrize("size", [1, 2])
def test_timed_texts_are_judged_with_the_noise_they_were_timed_with(size):
    model, sampling = tiny_llama(seed=0), Sampling(1.0)
    arm = OurArm("alone", model, None, arguments(sampling))
    prompts = [Prompt(f"p{i}", None, tuple(range(5 + i, 9 + i))) for i in range(4)]
    samples = interleave([arm], prompts, 6, 2, SEED, size, "timing")["alone"]
    found = check_samples(model, prompts, samples, size, sampling, SEED)
    assert found == [Check(0, 0, 2 * 6 * size)] * (4 // size)
    for other in (samples[1:] + samples[:1], [rounds[::-1] for rounds in samples]):  # rows, seeds
        assert sum(check_samples(model, prompts, other, size, sampling, SEED), Check()).mismatches > 6


def test_a_text_without_new_tokens_counts_nothing():
    assert check_uncached(tiny_llama(), [Text(0, (1, 2), ())], Sampling(1.0), SEED) == [Check()]


def test_no_cache_and_no_pass_of_ours_is_used(monkeypatch):
    model = tiny_llama(seed=0)
    texts = written(model, Sampling(1.0))
    monkeypatch.setattr(NodePass, "_over", lambda *_: pytest.fail("a pass of ours"))
    asked = []
    model.register_forward_pre_hook(lambda _, given, named: asked.append(named), with_kwargs=True)
    check_uncached(model, texts, Sampling(1.0), SEED)
    assert len(asked) == len(JOBS)
    assert all(
        named["use_cache"] is False and set(named) == {"input_ids", "use_cache", "logits_to_keep"} for named in asked
    )
    assert [named["input_ids"].shape for named in asked] == [(1, len(text.ids) - 1) for text in texts]
