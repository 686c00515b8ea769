"""Chat templates: the mask marks what the assistant said, whatever the template, or the run stops; a run keeps its
template and its day until it is finished."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, InputError
from decode.config import ChatConfig, ModelConfig
from decode.models.chat_template import settled
from decode.models.describe import describe_model
from distill.config import PromptConfig, ResponseSampling
from distill.corpora.bad_rows import BadRow
from distill.corpora.config import DataConfig
from distill.prompts.chat import check_words, encode_chat, encode_prompt
from distill.records.record_folder import RecordFolder
from distill.runtimes import transformers_runtime
from distill.stage import run
from tests.distill.chats import CHATML, DATED, WITHOUT_SYSTEM, chat_config, chats_of, on_day, set_template, write_chats
from tests.distill.runs import shard_files
from tests.distill.test_responses import Stopped, stop_at
from tests.tiny import starting_tokenizer, tiny_tokenizer

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}U: {{ m.content }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)
TRIMMED = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
LAST_ONLY = (  # like templates that drop the thoughts of earlier turns
    "{% for m in messages %}[{{ m.role }}] {% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
DROPS_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
)
REWRITES = "{% for m in messages %}[{{ m.role }}] {{ m.content | upper }}<eos>{% endfor %}"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße, 你好?"},
    {"role": "assistant", "content": "Grüße ✓ "},
    {"role": "user", "content": "Grüße ✓"},
    {"role": "assistant", "content": "def f():\n    return 1"},
]


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def learned(template: str, messages: list[dict]) -> str:
    tokenizer = tokenizer_with(template)
    ids, mask = encode_chat(tokenizer, messages)
    assert len(ids) == len(mask)
    return str(tokenizer.decode([token for token, marked in zip(ids, mask, strict=True) if marked]))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURNS, "Grüße ✓ <eos>def f():\n    return 1<eos>"),
        (MARKED, "Grüße ✓ <eos>def f():\n    return 1<eos>"),
        (TRIMMED, "Grüße ✓def f():\n    return 1"),
        (LAST_ONLY, "Grüße ✓ <eos><think></think>def f():\n    return 1<eos>"),
    ],
)
def test_the_mask_holds_the_assistant_s_words_and_turn_ends(template: str, expected: str) -> None:
    assert learned(template, MESSAGES) == expected


def merging(*pairs: tuple[str, str]) -> PreTrainedTokenizerFast:
    """One token a byte, and one for each of these pairs, wherever they meet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*alphabet, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(pairs)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("end", [".", ""])
def test_a_token_on_the_edge_of_a_turn_is_learned(end: str) -> None:
    """The tokens "]H" and ".\n" hold the turn's first letter, and its last one or the mark that ends it."""
    tokenizer = merging(("]", "H"), (".", "Ċ"))
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}MARK\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ).replace("MARK", "" if end else ".")
    messages = [{"role": role, "content": f"Hello{end}"} for role in ("user", "assistant", "user", "assistant")]
    ids, mask = encode_chat(tokenizer, messages)
    said = "[assistant]Hello.\n"
    assert tokenizer.decode(ids) == f"[user]Hello.\n{said}" * 2
    unlearned = len("[user]Hello.\n") - 2 + len("[assistant")
    assert mask == ([False] * unlearned + [True] * len(("]H", *"ello", ".\n"))) * 2


def test_the_first_token_is_not_learned_for_nothing_predicts_it() -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}<eos>{% endgeneration %}{% endfor %}"
    ids, mask = encode_chat(tokenizer_with(template), [{"role": "assistant", "content": "Hello"}])
    assert mask == [False] + [True] * (len(ids) - 1)


def test_a_template_s_own_start_token_stands_once() -> None:
    tokenizer = starting_tokenizer()
    tokenizer.chat_template = "<bos>" + TURNS
    ids, mask = encode_chat(tokenizer, MESSAGES)
    assert len(mask) == len(ids)
    for written in (ids, encode_prompt(tokenizer, MESSAGES[:2])):
        assert [token == tokenizer.bos_token_id for token in written] == [True] + [False] * (len(written) - 1)


def test_a_prompt_ends_where_the_assistant_begins() -> None:
    tokenizer = tokenizer_with(TURNS)
    ids = encode_prompt(tokenizer, MESSAGES[:2])
    assert str(tokenizer.decode(ids)).endswith("你好?<eos>\n<|im_start|>assistant\n")
    whole, mask = encode_chat(tokenizer, MESSAGES[:3])
    assert whole[: len(ids)] == ids
    assert mask.index(True) == len(ids)


@pytest.mark.parametrize(
    ("template", "told"),
    [(None, "has none"), (DROPS_SYSTEM, "no system here"), (REWRITES, "rewrites earlier turns")],
)
def test_a_template_that_cannot_be_used_is_refused_by_name(template: str | None, told: str) -> None:
    with pytest.raises(InputError, match=f"example 7.*{told}"):
        encode_chat(tokenizer_with(template), MESSAGES, where="example 7")


CALLING = (  # knows tools, calls, results and thoughts, of the last turn alone
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKING = CALLING.replace("m.reasoning_content", "m.thinking")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = [
    {"role": "user", "content": "Is it raining in Oslo?", "tools": TOOLS},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "Heavy rain"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it raining in Oslo? Heavy rain."},
]


@pytest.mark.parametrize("template", [CALLING, THINKING])
def test_tools_calls_and_thoughts_reach_the_template_and_are_learned(template: str) -> None:
    whole = str(tokenizer_with(template).decode(encode_chat(tokenizer_with(template), CALLED)[0]))
    assert whole.startswith("<tool>")
    call = '<call>{"name": "weather", "arguments": {"city": "Oslo"}}</call>'
    thought = "<think>Is it raining in Oslo? Heavy rain.</think>"
    assert learned(template, CALLED) == f"{call}<eos>{thought}Yes.<eos>"
    check_words(tokenizer_with(template), CALLED, "here")
    again = [*CALLED, {"role": "user", "content": "Thank you very much"}, {"role": "assistant", "content": "Well"}]
    assert learned(template, again) == f"{call}<eos>Yes.<eos>Well<eos>"  # templates drop earlier thoughts
    key = "thinking" if template == THINKING else "reasoning_content"
    telling = [*CALLED[:-1], CALLED[-1] | {key: "It says Yes. so do I"}, *again[len(CALLED) :]]
    assert learned(template, telling) == f"{call}<eos>Yes.<eos>Well<eos>"


def test_a_template_that_joins_a_call_s_arguments_as_text_is_given_text() -> None:
    joining = CALLING.replace("call.function | tojson", "call.function.name + call.function.arguments")
    assert learned(joining, CALLED[:2]) == '<call>weather{"city": "Oslo"}</call><eos>'


def test_a_call_is_found_where_the_template_drops_an_empty_thought_before_it() -> None:
    template = CALLING.replace(
        "[{{ m.role }}]", "[{{ m.role }}]{{ '<think></think>' if loop.last and m.role == 'assistant' }}", 1
    )
    assert learned(template, CALLED).startswith('<call>{"name": "weather", "arguments": {"city": "Oslo"}}</call><eos>')


@pytest.mark.parametrize(
    ("without", "told"),
    [
        (("tools or []", "[]"), "the tools"),
        (("m.tool_calls or []", "[]"), "tool_calls"),
        (("loop.last and m.reasoning_content", "false"), "reasoning_content"),
        (("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), "what the tool says"),
        (("{{ m.content }}", "{{ m.content if m.role != 'user' }}"), "what the user says"),
    ],
)
def test_words_that_a_template_leaves_out_are_told(without: tuple[str, str], told: str) -> None:
    with pytest.raises(BadRow, match=f"row 3: the chat template leaves out {told}, and the words would be lost"):
        check_words(tokenizer_with(CALLING.replace(*without)), CALLED, "row 3")


def test_words_that_a_template_writes_otherwise_are_not_lost() -> None:
    shouted = CALLING.replace("{{ m.content }}", "{{ m.content if m.role == 'assistant' else m.content | upper }}")
    assert "Yes." in learned(shouted, CALLED)
    check_words(tokenizer_with(shouted), CALLED, "here")
    quoted = CALLING.replace("{{ m.content }}", "{{ m.content if m.role == 'assistant' else m.content | tojson }}")
    asked = [{"role": "user", "content": 'Say "a"\n'}, {"role": "assistant", "content": "a"}]
    check_words(tokenizer_with(quoted), asked, "here")


def test_a_call_that_a_template_rewrites_is_refused() -> None:
    template = CALLING.replace("m.tool_calls or []", "((m.tool_calls or []) if loop.last else [])")
    with pytest.raises(BadRow, match=r"rewrites earlier turns.*\(message 2\)"):
        encode_chat(tokenizer_with(template), CALLED)


@pytest.mark.parametrize("fault", ["raise_exception('no')", "1 / 0", "messages[0].said.so", "messages[9].content + 1"])
def test_a_template_that_fails_on_a_conversation_is_a_bad_row(fault: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = f"{{{{ {fault} }}}}"
    with pytest.raises(BadRow, match="row 3: the chat template refuses these messages"):
        encode_prompt(tokenizer, MESSAGES, "row 3")


def test_a_conversation_in_which_nothing_is_learned_is_a_bad_row() -> None:
    with pytest.raises(BadRow, match="row 3: the assistant says nothing"):
        encode_chat(tokenizer_with(TURNS), MESSAGES[:2], "row 3")


def test_generation_marks_around_what_others_said_are_found_by_decoding() -> None:
    wide = "{% generation %}{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}{% endgeneration %}"
    with pytest.raises(InputError, match="hold message 1, 'Be brief.', which the system said"):
        encode_chat(tokenizer_with(wide), MESSAGES)


def test_generation_marks_in_the_wrong_place_are_found_by_decoding() -> None:
    wrong = "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}: {{ m.content }}<eos>{% endfor %}"
    with pytest.raises(InputError, match="lacks the assistant's message 3"):
        encode_chat(tokenizer_with(wrong), MESSAGES)


EMPTY = "<think>\n\n</think>\n\n"
THINKS = (  # a prompt ends by an empty thought where none is wanted, and so does the last answer begin; as Qwen3's
    "{% for m in messages %}<|{{ m.role }}|>OPEN{% if loop.last and m.role == 'assistant' %}EMPTY{% endif %}"
    "{{ m.content }}<eos>CLOSE{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if not enable_thinking | default(true) %}EMPTY{% endif %}{% endif %}"
).replace("EMPTY", EMPTY)
IN_PROMPTS_ALONE = THINKS.replace("loop.last and", "false and")
UNMARKED = {"OPEN": "", "CLOSE": ""}
MARKS = {  # around the thought too
    "OPEN": "{% if m.role == 'assistant' %}{% generation %}",
    "CLOSE": "{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}",
}


@pytest.mark.parametrize(
    ("template", "marks"),
    [(THINKS, UNMARKED), (THINKS, MARKS), (IN_PROMPTS_ALONE, UNMARKED), (IN_PROMPTS_ALONE, MARKS)],
)
def test_what_a_prompt_ends_by_is_no_lesson(template: str, marks: dict[str, str]) -> None:
    for name, text in marks.items():
        template = template.replace(name, text)
    tokenizer = settled(tokenizer_with(template), ChatConfig(template={"enable_thinking": False}))
    assert str(tokenizer.decode(encode_prompt(tokenizer, MESSAGES[:2]))).endswith(f"<|assistant|>{EMPTY}")
    ids, mask = encode_chat(tokenizer, MESSAGES)
    said = tokenizer.decode([token for token, marked in zip(ids, mask, strict=True) if marked])
    assert said == "Grüße ✓ <eos>def f():\n    return 1<eos>"


def stopped(monkeypatch: pytest.MonkeyPatch, folder: Path, *given: object, **fields: object) -> None:
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(Stopped):
            run(chat_config(folder, *given, **fields))  # type: ignore[arg-type]


def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers_runtime, "load_model", load)


def prompts_in(folder: Path) -> set[str]:
    """The texts of all records up to where the answer begins."""
    records, tokenizer = RecordFolder.open(folder), AutoTokenizer.from_pretrained(folder.parent / "target")
    found = [records.read(index) for index in range(len(records))]
    return {str(tokenizer.decode(one.ids[: one.meta["prompt_end"]])) for one in found}


def test_a_run_does_not_go_on_with_another_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are the same, and the prompts would be others."""
    stopped(monkeypatch, tmp_path)
    before = describe_model(ModelConfig(path=str(tmp_path / "target"))).chat_template_hash
    set_template(tmp_path / "target", CHATML + "!")
    after = describe_model(ModelConfig(path=str(tmp_path / "target"))).chat_template_hash
    loads_nothing(monkeypatch)
    with pytest.raises(ConfigError, match=f"begun with chat_template_hash {before}, and it is {after} now"):
        run(chat_config(tmp_path, resume="auto"))


def test_a_run_does_not_go_on_with_a_tokenizer_that_cuts_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is the same, and what is done before it is not."""
    stopped(monkeypatch, tmp_path)
    file = tmp_path / "target" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    loads_nothing(monkeypatch)
    with pytest.raises(ConfigError, match="begun with tokenizer_hash"):
        run(chat_config(tmp_path, resume="auto"))


def test_a_run_does_not_go_on_with_other_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = chats_of(tmp_path, template={"think": False})
    stopped(monkeypatch, tmp_path, data=data)
    with pytest.raises(ConfigError, match="data.template.think: False there, True now"):
        run(chat_config(tmp_path, data=chats_of(tmp_path, template={"think": True}), resume="auto"))
    run(chat_config(tmp_path, data=data, resume="auto"))
    assert all(prompt.endswith("<|assistant|><think></think>") for prompt in prompts_in(tmp_path / "records"))
    assert read_json(tmp_path / "records" / "manifest.json")["config"]["data"]["template"] == {"think": False}


@pytest.mark.parametrize("responses", ["target", "corpus"])
def test_a_run_that_goes_on_the_next_day_speaks_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, responses: str
) -> None:
    on_day("2026-07-31", monkeypatch)
    stopped(monkeypatch, tmp_path, DATED, responses=responses)
    on_day("2026-08-01", monkeypatch)
    caplog.clear()
    run(chat_config(tmp_path, responses=responses, resume="auto"))
    told = "the chat template writes the date: all chats of this run are of 2026-07-31 (data.date names another)"
    assert [one.getMessage() for one in caplog.records].count(told) == 1
    prompts = prompts_in(tmp_path / "records")
    assert len(prompts) == 13
    assert all(prompt.startswith("31 Jul 2026\n") for prompt in prompts)
    assert read_json(tmp_path / "records" / "manifest.json")["config"]["data"]["date"] == "2026-07-31"
    whole = chats_of(tmp_path, date="2026-07-31")
    run(chat_config(tmp_path, data=whole, responses=responses, output_dir=str(tmp_path / "whole")))
    assert shard_files(tmp_path / "records") == shard_files(tmp_path / "whole")


def test_texts_that_are_scored_again_keep_their_day_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_day("2026-07-31", monkeypatch)
    run(chat_config(tmp_path, DATED, chats_of(tmp_path, template={"think": False})))
    on_day("2026-08-01", monkeypatch)
    again = {"responses": "records", "from_records": str(tmp_path / "records"), "output_dir": str(tmp_path / "again")}
    own = {"data": DataConfig(), "prompts": PromptConfig(), "sampling": ResponseSampling()}
    run(chat_config(tmp_path, **own | again))  # type: ignore[arg-type]
    data = read_json(tmp_path / "again" / "manifest.json")["config"]["data"]
    assert (data["date"], data["template"]) == ("2026-07-31", {"think": False})


def test_a_template_that_refuses_the_system_s_messages_has_two_ways(tmp_path: Path) -> None:
    write_chats(tmp_path, system="Be brief.")
    with pytest.raises(InputError, match=r"no system\. It takes them without .*data.system=drop .*data.system=merge"):
        run(chat_config(tmp_path, WITHOUT_SYSTEM))
    for system, expected in (("drop", "<|user|>def f"), ("merge", "<|user|>Be brief.\n\ndef f")):
        run(chat_config(tmp_path, data=chats_of(tmp_path, system=system), output_dir=str(tmp_path / system)))
        prompts = prompts_in(tmp_path / system)
        assert all(prompt.startswith(expected) for prompt in prompts)
        assert read_json(tmp_path / system / "manifest.json")["config"]["data"]["system"] == system
