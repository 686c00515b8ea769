"""The interleaved run: order, warm-up, totals, and what each arm really does."""

import pytest
import torch
from transformers import GenerationConfig

from decode import generate
from decode.drafters.lm import LMDraft
from decode.sampling.warp import Sampling
from eval.arms.base import Sample, emitted
from eval.arms.ours import OurArm
from eval.arms.transformers_arms import (
    Setting,
    TransformersArm,
    assisted_settings,
    generation_config,
    run_transformers,
    using,
)
from eval.measure.config import PeersConfig
from eval.measure.timed_run import (
    CostMeter,
    call_seconds_per_token,
    interleave,
    order,
    promised_speedup,
    seconds_per_token,
    warm_up,
)
from eval.prompts.prompt import Prompt
from eval.results.schema import ComponentTimes
from tests.tiny import tiny_llama

GREEDY = Sampling(0.0)
GREEDILY = {"temperature": 0.0, "verifier": "greedy", "num_draft_tokens": 3}
PROMPTS = [Prompt(f"p{i}", None, tuple(range(5 + i, 13 + i))) for i in range(3)]


class FakeArm:
    """Notes who was called when, and answers with one token per millisecond."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def run(self, prompts, rows, max_new_tokens, seed):
        self.calls.append((self.name, tuple(rows), seed))
        new = [[1] * max_new_tokens for _ in prompts]
        return Sample(new, 0.010 + seed, 0.004, len(prompts), [0.004, 0.010], [])


def test_every_round_gives_every_prompt_to_every_arm_before_the_next_prompt():
    calls, pieces = [], []
    arms = [FakeArm(name, calls) for name in "abcd"]
    samples = interleave(arms, PROMPTS, 4, 2, 7, 1, "x", before_each=lambda: pieces.append(len(calls)))
    assert len(calls) == 2 * 3 * 4
    for start in range(0, len(calls), 4):
        block = calls[start : start + 4]
        assert {name for name, _, _ in block} == set("abcd")
        assert len({(rows, seed) for _, rows, seed in block}) == 1  # same prompt, same seed
    assert len({tuple(name for name, _, _ in calls[i : i + 4]) for i in range(0, len(calls), 4)}) > 1
    assert pieces == [0, 4, 8, 12, 16, 20]  # what is timed beside the arms sees the machine that they see
    assert all(len(rounds) == 2 for groups in samples.values() for rounds in groups)


def test_the_order_is_a_permutation_drawn_from_seed_round_and_prompt():
    arms = [FakeArm(str(i), []) for i in range(6)]
    names = [[arm.name for arm in order(arms, 0, turn, group)] for turn in range(3) for group in range(3)]
    assert all(sorted(each) == sorted(names[0]) for each in names)
    assert len({tuple(each) for each in names}) > 5
    assert order(arms, 0, 1, 2) == order(arms, 0, 1, 2)


def test_batches_keep_the_rows_of_their_prompts():
    calls = []
    interleave([FakeArm("a", calls)], PROMPTS, 4, 1, 0, 2, "x")
    assert [rows for _, rows, _ in calls] == [(0, 1), (2,)]


def test_figures_are_totals_over_rounds_and_leave_out_the_first_arrival():
    group = [Sample([[1] * 5], 0.5, 0.1, 1, [0.1, 0.5], []), Sample([[1] * 9], 1.0, 0.2, 3, [0.2, 1.0], [])]
    assert seconds_per_token([group])[0] == pytest.approx((0.4 + 0.8) / (4 + 6))
    assert call_seconds_per_token([group])[0] == pytest.approx(1.5 / 14)
    nothing_after = [Sample([[1]], 0.5, 0.5, 1, [0.5], [])]
    assert str(seconds_per_token([nothing_after])[0]) == "nan"


def test_emitted_drops_overshoot_and_what_follows_the_end():
    assert emitted([5, 6, 2, 7], (2,), 10) == [5, 6, 2]
    assert emitted([5, 6, 7, 8], (2,), 3) == [5, 6, 7]
    assert emitted([5, 6], (), 3) == [5, 6]


def test_our_arm_reports_rounds_and_arrivals():
    model, draft = tiny_llama(seed=0), LMDraft(tiny_llama(seed=0))
    sample = OurArm("x", model, draft, GREEDILY).run([PROMPTS[0].ids], [0], 13, 0)
    assert sample.tokens == 13
    assert sample.first_tokens == 4  # the draft is the target, so all of the first burst is accepted
    assert sample.decode_tokens == 9
    assert len(sample.arrivals) == len(sample.rounds) == 4
    assert 0 < sample.first_s < sample.seconds


@pytest.mark.slow
def test_all_arms_agree_when_greedy():
    model, draft = tiny_llama(seed=0), tiny_llama(seed=1, num_layers=1)
    arms = [
        OurArm("alone", model, None, GREEDILY),
        OurArm("drafted", model, LMDraft(draft), GREEDILY),
        TransformersArm("transformers", model, GREEDY),
        TransformersArm("assisted", model, GREEDY, draft=draft, setting=Setting(3, 0.0)),
    ]
    warm_up(arms, PROMPTS, 1, 0, max_new_tokens=2)
    new = [arm.run([PROMPTS[1].ids], [1], 12, 0).new_ids for arm in arms]
    assert new[0] == new[1] == new[2] == new[3]


def test_transformers_samples_what_we_ask_for_and_not_its_defaults():
    model = tiny_llama(seed=0)
    model.generation_config = GenerationConfig(top_k=1, temperature=0.1, repetition_penalty=5.0, do_sample=True)
    torch.manual_seed(0)
    config = generation_config(model, Sampling(1.0), 5)
    assert (config.top_k, config.temperature, config.top_p, config.repetition_penalty) == (0, 1.0, 1.0, 1.0)
    drawn = {tuple(run_transformers(model, Sampling(1.0), [PROMPTS[0].ids], 3, seed).new_ids[0]) for seed in range(8)}
    assert len(drawn) > 1  # top_k=1 of the model's own habits would give one text


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_assisted_arm_drafts_as_many_tokens_as_its_setting_says(k, monkeypatch):
    """Counted in passes: transformers 5.17 streams a round's tokens one by one."""
    model, draft = tiny_llama(seed=0), tiny_llama(seed=0)
    calls = {"target": 0, "draft": 0}

    def counted(name, forward):
        def call(*args, **kwargs):
            calls[name] += 1
            return forward(*args, **kwargs)

        return call

    monkeypatch.setattr(model, "forward", counted("target", model.forward))
    monkeypatch.setattr(draft, "forward", counted("draft", draft.forward))
    sample = TransformersArm("x", model, GREEDY, draft=draft, setting=Setting(k, 0.0)).run(
        [PROMPTS[0].ids], [0], 2 * (k + 1), 0
    )
    assert sample.tokens == 2 * (k + 1)
    assert calls["target"] == 2  # the draft is the target: k accepted and a bonus, twice
    assert calls["draft"] <= 2 * k + 1  # after a draft that was accepted whole, one pass reads its last token


def test_the_confidence_threshold_reaches_transformers(monkeypatch):
    model, draft = tiny_llama(seed=0), tiny_llama(seed=1, num_layers=1)
    counts = {}
    for threshold in (0.0, 0.999999):
        calls = []
        forward = type(draft).forward
        monkeypatch.setattr(draft, "forward", lambda *a, **kw: calls.append(1) or forward(draft, *a, **kw))  # noqa: B023
        TransformersArm("x", model, GREEDY, draft=draft, setting=Setting(5, threshold)).run(
            [PROMPTS[0].ids], [0], 12, 0
        )
        counts[threshold] = len(calls)
    assert counts[0.999999] < counts[0.0]  # an unsure draft stops after its first token


def test_the_drafts_own_settings_come_back():
    draft = tiny_llama(seed=0)
    draft.generation_config.num_assistant_tokens = 17
    with using(draft, Setting(3, 0.4)):
        assert draft.generation_config.num_assistant_tokens == 3
        assert draft.generation_config.num_assistant_tokens_schedule == "constant"
        assert draft.generation_config.assistant_confidence_threshold == 0.4
    assert draft.generation_config.num_assistant_tokens == 17


def test_settings_are_the_whole_grid():
    assert len(assisted_settings(PeersConfig())) == 6
    assert len({one.label for one in assisted_settings(PeersConfig())}) == 6


def test_component_times_predict_a_speedup():
    times = ComponentTimes(num_draft_tokens=3, t_target_1_s=10.0, t_target_k1_s=12.0, t_draft_s=1.0)
    assert promised_speedup(times, 3.0) == 2.0  # 3 x 10 / (3 x 1 + 12)


@pytest.mark.slow
def test_component_times_are_measured_by_drafter_and_length():
    model, draft = tiny_llama(seed=0), LMDraft(tiny_llama(seed=1, num_layers=1))
    meter = CostMeter(model, {"d": draft}, {"d": [1, 3]}, context=16, batch_size=1, repeats=2)
    meter.sample()
    meter.sample()
    costs = meter.result()
    assert set(costs) == {("d", 1), ("d", 3)}
    assert (costs["d", 1].num_draft_tokens, costs["d", 3].num_draft_tokens) == (1, 3)
    assert costs["d", 3].t_target_1_s == costs["d", 1].t_target_1_s
    assert costs["d", 3].t_target_k1_s != costs["d", 1].t_target_k1_s  # passes over 4 and over 2 tokens


def test_our_arm_gives_the_text_of_generate():
    model = tiny_llama(seed=0)
    ids = torch.tensor([PROMPTS[2].ids])
    expected = generate(model, None, ids, max_new_tokens=6, temperature=1.0, seed=3, rows=[2]).sequences[0, 8:].tolist()
    assert OurArm("x", model, None, {"temperature": 1.0}).run([PROMPTS[2].ids], [2], 6, 3).new_ids == [expected]
