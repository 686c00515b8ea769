"""Responses: what the target writes under its sampling settings, and which of it is learned."""

import json
from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from decode import load_drafter
from distill.config import DataConfig, DistillConfig, PromptConfig, ResponseDraftConfig, ResponseSampling
from distill.prompts.drawn_prompts import DrawnPrompt
from distill.responses import Heard, Response, Writer, alike, target_sampler, unheard
from tests.tiny import tiny_llama, tiny_tokenizer

MODEL = tiny_llama()
PROMPTS = [[5, 9, 1], [7, 3, 20, 11, 30, 2]]
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "gone"},
    {"role": "user", "content": "Go on"},
]


class Scripted:
    """Answers every prompt with its own tokens, and keeps what it was asked."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.asked = answer, []

    def __call__(self, prompts: list[list[int]], rows: list[int], seed: int, heard: Heard = unheard) -> list[Response]:
        self.asked.append((prompts, rows, seed))
        answers = [Response(self.answer, "eos") for _ in prompts]
        for place, one in enumerate(answers):
            heard(place, one, None)
        return answers


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def writer(prompts: list[DrawnPrompt], sampler: Scripted | None, positions: int = 1000, **fields: object) -> Writer:
    base = {"prompts": PromptConfig(tokens=3), "sampling": ResponseSampling(max_new_tokens=4)}
    return Writer(DistillConfig(**base | fields), chat_tokenizer(), sampler, positions, prompts)  # type: ignore[arg-type]


def greedy(prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(MODEL(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_response_does_not_depend_on_the_others_of_its_batch() -> None:
    sample = target_sampler(MODEL, ResponseSampling(max_new_tokens=5), batch_size=2)
    together = sample(PROMPTS, [4, 9], 3)
    assert together == [sample([PROMPTS[0]], [4], 3)[0], sample([PROMPTS[1]], [9], 3)[0]]
    assert [len(response.ids) for response in together] == [5, 5]
    assert [response.finish_reason for response in together] == ["length", "length"]


def test_texts_that_would_hold_others_up_are_written_apart_and_say_the_same() -> None:
    prompts = [[7] * 60, *PROMPTS, [9] * 30]
    prompts.sort(key=lambda prompt: -len(prompt))
    sampling = ResponseSampling(max_new_tokens=5)
    heard: list[int] = []
    apart = target_sampler(MODEL, sampling, 2, slots=40)(
        prompts, [3, 4, 9, 1], 3, lambda place, one, states: heard.append(place)
    )
    assert apart == target_sampler(MODEL, sampling, 2)(prompts, [3, 4, 9, 1], 3)
    assert sorted(heard) == [0, 1, 2, 3]
    assert alike([65, 35, 10, 9], 2, 40) == [[0], [1], [2, 3]]
    assert alike([65, 35, 10, 9], 2, 110) == [[0, 1, 2, 3]]
    assert alike([65, 35, 10, 9], 2, None) == [[0, 1, 2, 3]]


def test_a_draft_changes_no_token_and_saves_passes() -> None:
    """One that is the target itself: five of its tokens are accepted, and the pass gives a sixth."""
    draft = ResponseDraftConfig("any", num_draft_tokens=5)
    sampling = ResponseSampling(max_new_tokens=12, draft=draft)
    alone = target_sampler(MODEL, sampling, batch_size=2)(PROMPTS, [4, 9], 3)
    drafted = target_sampler(MODEL, sampling, 2, load_drafter(deepcopy(MODEL), MODEL))(PROMPTS, [4, 9], 3)
    assert drafted == alone
    assert [one.passes for one in alone] == [12, 12]
    assert [one.passes for one in drafted] == [2, 2]


def test_a_response_ends_with_its_end_token_and_holds_no_padding() -> None:
    model = tiny_llama()
    first, second = (greedy(prompt, 4) for prompt in PROMPTS)
    assert first[1] not in (first[0], *second)
    model.generation_config.eos_token_id = first[1]
    sample = target_sampler(model, ResponseSampling(temperature=0.0, max_new_tokens=4), batch_size=2)
    assert sample(PROMPTS, [0, 1], 0) == [Response(first[:2], "eos"), Response(second, "length")]


def test_rows_and_seeds_have_noise_of_their_own() -> None:
    sample = target_sampler(MODEL, ResponseSampling(max_new_tokens=8), batch_size=3)
    first, second, third = sample([PROMPTS[0]] * 3, [0, 1, 2], 3)
    assert len({tuple(one.ids) for one in (first, second, third, sample([PROMPTS[0]], [0], 4)[0])}) == 4


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_every_sampling_setting_reaches_the_decoder(settings: dict[str, float]) -> None:
    """At its end each of them leaves the likeliest token alone."""
    sample = target_sampler(MODEL, ResponseSampling(max_new_tokens=4, **settings), batch_size=2)  # type: ignore[arg-type]
    assert [one.ids for one in sample(PROMPTS, [0, 1], 0)] == [greedy(prompt, 4) for prompt in PROMPTS]


def test_later_turns_and_other_runs_are_sampled_with_seeds_of_their_own() -> None:
    seeds = []
    for seed in (0, 1):
        sampler = Scripted([40])
        writer([DrawnPrompt(7, "d", "train", messages=ASKED)], sampler, seed=seed).write(0, 1)
        assert [rows for _, rows, _ in sampler.asked] == [[7], [7]]
        seeds += [asked for _, _, asked in sampler.asked]
    assert len(set(seeds)) == 4


def test_a_later_turn_is_asked_with_the_words_of_the_target() -> None:
    tokenizer = chat_tokenizer()
    said = tokenizer("so it is<eos>")["input_ids"]
    sampler = Scripted(said)  # type: ignore[arg-type]
    first, second = writer([DrawnPrompt(0, "d", "train", messages=ASKED)], sampler).write(0, 1)
    texts = [str(tokenizer.decode(prompts[0])) for prompts, _, _ in sampler.asked]
    assert texts == ["[user]Hi[assistant]", "[user]Hi[assistant]so it is[user]Go on[assistant]"]
    assert str(tokenizer.decode(first.ids)) == "[user]Hi[assistant]so it is<eos>"
    assert [one.meta["turn"] for one in (first, second)] == [0, 1]
    for one, (prompts, _, _) in zip((first, second), sampler.asked, strict=True):
        learned = [False] * len(prompts[0]) + [True] * len(said)
        assert one.loss_mask.tolist() == learned  # data.learn_prompt, which is true here, is for plain text
        assert one.meta["prompt_end"] == len(prompts[0])


@pytest.mark.parametrize(("learn_prompt", "first"), [(True, 1), (False, 3)])
def test_the_prompt_of_plain_text_is_learned_if_asked(learn_prompt: bool, first: int) -> None:
    data = DataConfig(learn_prompt=learn_prompt)
    prompt = DrawnPrompt(0, "d", "train", ids=[5, 6, 7])
    (record,) = writer([prompt], Scripted([40, 41]), data=data).write(0, 1)
    assert record.ids.tolist() == [5, 6, 7, 40, 41]
    assert record.loss_mask.tolist() == [place >= first for place in range(5)]
    whole = DrawnPrompt(0, "d", "train", ids=[5, 6, 7, 8, 9])
    (record,) = writer([whole], None, data=data, responses="corpus").write(0, 1)
    assert record.loss_mask.tolist() == [place >= first for place in range(5)]
    assert record.meta["prompt_end"] == 3


def test_a_turn_is_written_if_its_response_just_fits() -> None:
    prompt = DrawnPrompt(0, "d", "train", messages=ASKED)
    sampler = Scripted([40, 41, 42, 43])
    writer([prompt], sampler).write(0, 1)
    first, second = (len(prompts[0]) for prompts, _, _ in sampler.asked)
    for positions, written, dropped in (
        (second + 4, 2, 0),
        (second + 3, 1, 1),
        (first + 4, 1, 1),
        (first + 3, 0, 2),
    ):
        one = writer([prompt], Scripted([40, 41, 42, 43]), positions)
        assert len(one.write(0, 1)) == written
        assert one.dropped_turns == dropped


def test_a_conversation_ends_where_the_template_refuses_what_the_target_has_said() -> None:
    """Mistral's refuse an empty answer, and the run ended with it, again after each start."""
    prompts = [DrawnPrompt(0, "d", "train", messages=ASKED), DrawnPrompt(1, "e", "train", messages=ASKED[:1])]
    one = writer(prompts, Scripted([tiny_tokenizer().eos_token_id]))  # type: ignore[list-item]
    one.tokenizer.chat_template = (
        "{% for m in messages if not m.content %}{{ raise_exception('empty') }}{% endfor %}" + CHAT
    )
    assert [(record.meta["prompt"], record.meta["turn"]) for record in one.write(0, 2)] == [(0, 0), (1, 0)]
    assert one.dropped_turns == 1


def test_text_of_the_corpus_is_cut_to_the_context() -> None:
    tokenizer = chat_tokenizer()
    messages = ASKED[:2]
    answer = len(tokenizer("[user]Hi[assistant]")["input_ids"])  # type: ignore[arg-type]
    for positions, learned in ((1000, len(tokenizer("gone")["input_ids"])), (answer + 1, 1), (answer, 0)):  # type: ignore[arg-type]
        one = writer([DrawnPrompt(0, "d", "train", messages=messages)], None, positions, responses="corpus")
        records = one.write(0, 1)
        assert [(int(found.loss_mask.sum()), found.meta["prompt_end"]) for found in records] == (
            [(learned, answer)] if learned else []
        )
        assert one.dropped_turns == (0 if learned else 1)
        assert [found.meta["finish_reason"] for found in records] == [
            "corpus" if positions == 1000 else "length"
        ] * bool(learned)
    plain = DrawnPrompt(0, "d", "train", ids=[1, 2, 3, 4, 5])
    (record,) = writer([plain], None, 4, responses="corpus").write(0, 1)
    assert record.ids.tolist() == [1, 2, 3, 4]
    assert record.meta["finish_reason"] == "length"


def test_records_are_in_the_order_of_prompts_and_turns() -> None:
    """They are sampled by length, turn by turn."""
    long = [{"role": "user", "content": json.dumps(ASKED)}]
    prompts = [DrawnPrompt(0, "d", "train", messages=long), DrawnPrompt(1, "e", "train", messages=ASKED)]
    records = writer(prompts, Scripted([40])).write(0, 2)
    assert [(one.meta["prompt"], one.meta["turn"]) for one in records] == [(0, 0), (1, 0), (1, 1)]
    assert [one.meta["document"] for one in records] == ["d", "e", "e"]
