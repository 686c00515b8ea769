"""Prompt files in the three benchmark layouts, held-out windows, and what is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from decode.common.errors import ConfigError, InputError
from distill.corpora.config import DataConfig
from distill.corpora.corpus import Document
from eval.config import EvalConfig
from eval.inputs import check_held_out
from eval.prompts.config import PromptsConfig
from eval.prompts.held_out import check_lengths, held_out_prompts, load_prompts
from eval.prompts.prompt import Prompt
from eval.prompts.questions import first_turn, next_turn, read_questions
from tests.tiny import tiny_tokenizer

SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."], "reference": []}
SPEED_BENCH = {
    "question_id": "c3f0",
    "category": "coding",
    "sub_category": "python",
    "turns": ["Write a sort."],
    "source": "x",
    "src_id": "7",
    "difficulty": "easy",
    "multiturn": False,
}
MT_BENCH = {"question_id": 101, "category": "reasoning", "turns": ["Who is first?", "And last?"]}
MESSAGES = {
    "question_id": 5,
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
}


def write(path, *entries):
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries) + "\n")
    return path


def config(**values) -> EvalConfig:
    values.setdefault("lossless", {"prompts": 4, "tokens": 8, "other_prompts": 2, "other_tokens": 4})
    values.setdefault("timing", {"prompts": 2, "screening_prompts": 1, "sweep": []})
    values.setdefault("decode", {"max_new_tokens": 8})
    from decode.common.typed_config import build

    return build(EvalConfig, {"output_dir": "out", "target": {"path": "t"}, "drafts": {"d": "d"}, **values})


def test_the_three_layouts_and_chat_messages_are_read(tmp_path):
    questions = read_questions(write(tmp_path / "q.jsonl", SPEC_BENCH, SPEED_BENCH, MT_BENCH, MESSAGES))
    assert [q.id for q in questions] == ["81", "c3f0", "101", "5"]
    assert [q.category for q in questions] == ["writing", "coding", "reasoning", None]
    assert [q.turns for q in questions] == [
        ("Compose a post.", "Rewrite it."),
        ("Write a sort.",),
        ("Who is first?", "And last?"),
        ("Hi",),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "not an object"),
        ({"question_id": 1, "category": "x"}, "turns None"),
        ({"turns": []}, r"turns \[\]"),
        ({"turns": ["ok", ""]}, "non-empty"),
        ({"turns": "text"}, "turns 'text'"),
        ({"turns": ["a"], "category": 3}, "category 3"),
        ({"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}, "withheld"),
        ({"messages": ["x"]}, "role and content"),
        ({"question_id": 101, "turns": ["Another."]}, "question_id 101 is that of line 1, too"),
        ({"turns": ["x \ud83d"]}, r"character 3 is \\ud83d"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "q.jsonl", MT_BENCH, line)
    with pytest.raises(InputError, match=message) as error:
        read_questions(path)
    assert "q.jsonl:2" in str(error.value)


def test_a_line_separator_within_a_text_does_not_end_the_line(tmp_path):
    path = write(tmp_path / "q.jsonl", json.dumps({"turns": ["one\u2028two\x85"]}, ensure_ascii=False), MT_BENCH)
    assert [q.turns[0] for q in read_questions(path)] == ["one\u2028two\x85", "Who is first?"]


def test_questions_without_an_id_are_not_taken_as_one(tmp_path):
    """Intervals resample questions by id: with the id None for all of them there was one."""
    path = write(tmp_path / "q.jsonl", *({"question_id": None, "turns": ["a"]}, {"turns": ["a"]}))
    assert [q.id for q in read_questions(path)] == ["1", "2"]


@pytest.mark.parametrize("kinds", [{"talk": []}, {"talk": ["x"], "qa": ["x"]}, {"own": ["x"], "qa": ["y"]}])
def test_kinds_that_would_be_called_what_they_are_not_are_refused(kinds):
    with pytest.raises(ConfigError, match="Name each category once"):
        config(prompts={"file": "q.jsonl", "kinds": kinds})


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no question"):
        read_questions(write(tmp_path / "empty.jsonl", ""))


def test_screening_prompts_are_never_reported_and_prefixes_mix_categories(tmp_path):
    entries = [{"question_id": i, "category": "ab"[i >= 4], "turns": [f"question {i}"]} for i in range(8)]
    cfg = config(prompts={"file": str(write(tmp_path / "q.jsonl", *entries))})
    sets = load_prompts(cfg, tiny_tokenizer(), 256)
    assert len(sets.reported) == 4
    assert len(sets.timed) == 2
    assert not {p.id for p in sets.screening} & {p.id for p in sets.reported}
    assert [p.category for p in sets.timed] in (["a", "b"], ["b", "a"])


def test_a_limit_takes_questions_from_the_whole_file(tmp_path):
    entries = [{"question_id": i, "turns": [f"question {i}"]} for i in range(12)]
    cfg = config(prompts={"file": str(write(tmp_path / "q.jsonl", *entries)), "limit": 4})
    sets = load_prompts(cfg, tiny_tokenizer(), 256)
    assert [prompt.id for prompt in [*sets.screening, *sets.reported]] == ["0", "3", "6", "9"]


def test_too_few_questions_are_refused(tmp_path):
    cfg = config(prompts={"file": str(write(tmp_path / "q.jsonl", MT_BENCH))})
    with pytest.raises(ConfigError, match="gives 1 questions, and a report wants 5 at least"):
        load_prompts(cfg, tiny_tokenizer(), 256)


def test_a_prompt_longer_than_the_context_is_refused():
    cfg = config()
    check_lengths([Prompt("fits", None, (1,) * 50)], cfg, 256)
    with pytest.raises(InputError, match="'long' has 250 tokens"):
        check_lengths([Prompt("long", None, (1,) * 250)], cfg, 256)


def test_held_out_windows_do_not_overlap_and_spread_over_documents():
    tokenizer = tiny_tokenizer()
    documents = [Document(f"d{i}", text="def f(x):\n    return x\n" * 40) for i in range(3)]
    prompts = held_out_prompts(documents, tokenizer, PromptsConfig(tokens=16), 9, seed=0)
    assert len(prompts) == 9
    assert all(len(prompt.ids) == 16 for prompt in prompts)
    assert len({prompt.id for prompt in prompts}) == 9
    assert {prompt.id.split("@")[0] for prompt in prompts[:3]} == {"d0", "d1", "d2"}
    assert all(int(prompt.id.split("@")[1]) % 16 == 0 for prompt in prompts)
    assert prompts == held_out_prompts(documents, tokenizer, PromptsConfig(tokens=16), 9, seed=0)
    assert prompts != held_out_prompts(documents, tokenizer, PromptsConfig(tokens=16), 9, seed=1)


def test_held_out_windows_begin_as_records_do():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<pad>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<pad> $A", special_tokens=[("<pad>", 1)])
    (prompt,) = held_out_prompts([Document("d", text="def f(x)")], tokenizer, PromptsConfig(tokens=2), 1, seed=0)
    assert prompt.ids[0] == tokenizer.bos_token_id == 1
    assert len(prompt.ids) == 3


def test_a_template_that_refuses_a_prompt_is_named(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    (question,) = read_questions(write(tmp_path / "q.jsonl", MT_BENCH))
    with pytest.raises(InputError, match="prompt '101': .*no such role"):
        first_turn(question, tokenizer, max_turns=1)


CHAT_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def test_what_the_system_says_stays_before_the_first_turn(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    document = Document("c", messages=[system, user, {"role": "assistant", "content": "Hello"}])
    (held_out,) = held_out_prompts([document], tokenizer, PromptsConfig(), 1, seed=0)
    (question,) = read_questions(write(tmp_path / "q.jsonl", MESSAGES))
    read = first_turn(question, tokenizer, max_turns=1)
    assert tokenizer.decode(list(held_out.ids)) == tokenizer.decode(list(read.ids)) == "[system]Be brief.[user]Hi"
    assert held_out.id == "c"


def test_questions_in_messages_are_read_as_rows_are(tmp_path):
    """Speakers by any name, and what stands beside them; words that the template leaves out are named."""
    row = {"messages": [{"from": "Human", "value": [{"type": "text", "text": "Hi"}]}], "tools": '[{"name": "look"}]'}
    (question,) = read_questions(write(tmp_path / "q.jsonl", row))
    assert question.turns == ("Hi",)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}" + CHAT_TEMPLATE
    asked = first_turn(question, tokenizer, max_turns=1)
    assert tokenizer.decode(list(asked.ids)) == "<look>[user]Hi"
    document = Document("c", messages=[{"role": "user", "content": "Hi", "tools": list(question.tools)}])
    assert held_out_prompts([document], tokenizer, PromptsConfig(), 1, seed=0)[0].ids == asked.ids
    tokenizer.chat_template = CHAT_TEMPLATE
    with pytest.raises(InputError, match="prompt '1': the chat template leaves out the tools"):
        first_turn(question, tokenizer, max_turns=1)


def test_a_chat_document_gives_its_opening_question():
    chat = Document("c", messages=[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}])
    (prompt,) = held_out_prompts([chat], tiny_tokenizer(), PromptsConfig(), 4, seed=0)
    assert tiny_tokenizer().decode(list(prompt.ids)) == "Hello"


def test_later_turns_follow_the_targets_answer_in_the_chat_template(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (question,) = read_questions(write(tmp_path / "q.jsonl", MT_BENCH))
    first = first_turn(question, tokenizer, max_turns=2)
    assert tokenizer.decode(list(first.ids)) == "<user>Who is first?<assistant>"
    second = next_turn(first, "Ann", tokenizer)
    assert tokenizer.decode(list(second.ids)) == "<user>Who is first?<assistant>Ann<user>And last?<assistant>"
    assert (first.id, second.id, second.later) == ("101", "101#2", ())
    assert first_turn(question, tokenizer, max_turns=1).later == ()


def test_a_draft_trained_under_other_shares_is_refused(tmp_path: Path) -> None:
    """A larger held-out share in the report would take in documents that training saw (218 of 292 in one probe)."""
    trained = DataConfig(name="text", path="corpus", heldout_share=0.05)
    (tmp_path / "draftsmith.json").write_text(json.dumps({"family": "lm", "data": asdict(trained)}))
    check_held_out(trained, "distilled", str(tmp_path))
    check_held_out(replace(trained, path="other", heldout_share=0.3), "distilled", str(tmp_path))
    with pytest.raises(InputError, match=r"data.heldout_share=0.05.*data.heldout_share=0.3"):
        check_held_out(replace(trained, heldout_share=0.3), "distilled", str(tmp_path))
