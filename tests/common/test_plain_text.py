"""Text on the command line of every stage, taken as it stands wherever a setting is plain text."""

import os
import random
import subprocess
import sys
from functools import reduce
from typing import Any

import pytest

from decode.common.compose import split_arguments
from decode.common.errors import ConfigError
from decode.common.plain_text import as_argument
from decode.common.sweep import plan_sweep
from tests.commands import MINIMUM, ROOT, built, config_class
from tests.tiers import by_default

TEXTS = [
    "介绍一下你。",
    "What's 2+2, and why?",
    "C# or F#",
    "my data (v2)",
    "模型",
    "",
    " both ends ",
    "\ttab\n\nand lines\n",
    "a=b",
    "a: b",
    "key=[1,2]",
    "[a, b]",
    "[a",
    "{a: b}",
    "}{",
    "a,b",
    ",",
    "choice(a,b)",
    "range(1,3)",
    "glob(*)",
    'she said "no"',
    '"no" she said',
    "'a' and 'b'",
    "'",
    '"',
    "\\",
    "ends in \\",
    "C:\\dir\\new",
    r"\(x\) \[y\] \, \\",
    r"\'quoted\'",
    "$5",
    "$",
    "${",
    "${}",
    "${x",
    "${HOME} and ${nowhere.at.all}",
    "a ${no such thing} b",
    "\\${HOME} \\\\${HOME}",
    "${seed} and ${HOME}",
    "${nothing:registered}",
    "007",
    "1e3",
    "1_000",
    "true",
    "nan",
    "-",
    "--help",
    "@file",
    "~x",
    "!",
    "#",
    "`ls` | wc > x; %s & ^",
    "🎉 null",
    "<|im_end|>",
]
TEXT_FIELDS = {
    "decode": "target.path",
    "distill": "data.subset",
    "datastore": "target.path",
    "train": "target.path",
    "eval": "drafts.one",
    "export": "draft.path",
    "check": "draft.path",
}


def value_of(config: object, path: str) -> Any:
    return reduce(lambda at, name: at[name] if isinstance(at, dict) else getattr(at, name), path.split("."), config)


def table_of(arguments: list[str]) -> list[str]:
    """What the entries 0, 1, 2 ... of a table of texts came to be."""
    drafts = value_of(built("eval", ["target.path=t", "output_dir=o", *arguments]), "drafts")
    return [drafts[f"t{number}"] for number in range(len(drafts))]


def test_text_is_taken_as_it_stands() -> None:
    assert table_of([f"drafts.t{number}={text}" for number, text in enumerate(TEXTS)]) == TEXTS
    assert table_of([as_argument(f"drafts.t{number}", text) for number, text in enumerate(TEXTS)]) == TEXTS
    for text in TEXTS[:4]:
        assert value_of(built("decode", ["target.path=some/target", f"prompt={text}"]), "prompt") == text


@pytest.mark.parametrize("stage", by_default(3, TEXT_FIELDS))
def test_so_it_is_in_every_stage(stage: str) -> None:
    field = TEXT_FIELDS[stage]
    given = [one for one in MINIMUM[stage] if not one.startswith(f"{field}=")]
    for text in ("my data (v2)", "模型", "What's 2+2, and why?", "007", "a=b,c", "it's ${HOME}"):
        assert value_of(built(stage, [*given, f"{field}={text}"]), field) == text
        assert value_of(built(stage, [*given, f"++{field}={text}"]), field) == text


def test_random_text_is_taken_as_it_stands() -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choice("ab \\\\'\"$${}}[](),=:#x1") for _ in range(rng.randrange(12))) for _ in range(300)]
    assert table_of([as_argument(f"drafts.t{number}", text) for number, text in enumerate(texts)]) == texts
    plain = [text for text in texts if text.strip()[:1] not in ("'", '"')]  # else perhaps in Hydra's quotes
    assert table_of([f"drafts.t{number}={text}" for number, text in enumerate(plain)]) == plain


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("'\"a, b\"'", '"a, b"'),
        ('"a, b"', "a, b"),
        ("'it\\'s'", "it's"),
        ("''", ""),
        ("null", None),
        ('"null"', "null"),
    ],
)
def test_quotes_and_null_are_still_hydra_s(given: str, text: str | None) -> None:
    assert value_of(built("decode", ["prompt_file=-", f"draft.path={given}"]), "draft.path") == text


def test_null_is_text_where_nothing_cannot_be_said() -> None:
    given = ["target.path=t", "data=jsonl", "data.path=d", "data.text_field=null", "data.id_field=null"]
    data = value_of(built("distill", given), "data")
    assert (value_of(data, "text_field"), value_of(data, "id_field")) == ("null", None)


def test_interpolations_work_where_they_lead_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_FOLDER", "it's (v2)")
    given = ["prompt_file=-", "target.path=${oc.env:SOME_FOLDER}/model", "draft.path=${target.path}/draft"]
    found = built("decode", [*given, r"output_dir=\${seed}"])
    assert value_of(found, "draft.path") == "it's (v2)/model/draft"
    assert value_of(found, "output_dir") == "${seed}"
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        built("decode", ["prompt=x", "target.path=${oc.env:NO_SUCH_VARIABLE}"])


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("[C#, 模型]", ["C#", "模型"]),
        ("[007,1e3,true,null]", ["007", "1e3", "true", "null"]),
        ("[<|im_end|>, [/INST]]", ["<|im_end|>", "[/INST]"]),
        ("[it's, ${HOME}]", ["it's", "${HOME}"]),
        ("['a, b', \"c\"]", ["a, b", "c"]),
        ("['a, b', 模型]", ["a, b", "模型"]),
        ("[C:\\dir\\]", ["C:\\dir\\"]),
        ("[it's\\]", ["it's\\"]),
        ("[]", []),
    ],
)
def test_lists_of_texts(given: str, texts: list[str]) -> None:
    assert value_of(built("decode", [*MINIMUM["decode"], f"stop_strings={given}"]), "stop_strings") == texts


def test_tables_of_texts_and_what_may_be_text() -> None:
    given = ["target.path=t", "output_dir=o", "drafts={a: my data (v2), b: 模型, c: 007}"]
    assert value_of(built("eval", given), "drafts") == {"a": "my data (v2)", "b": "模型", "c": "007"}
    words = value_of(built("decode", [*MINIMUM["decode"], "decode.banned_words=[13, C#, '14']"]), "decode.banned_words")
    assert words == [13, "C#", "14"]
    settings = ["draft.path=retrieval", "draft.settings.documents=my data (v2), 模型"]
    found = value_of(built("decode", [*MINIMUM["decode"], *settings]), "draft.settings.documents")
    assert found == "my data (v2), 模型"


def test_a_group_or_key_of_any_spelling_is_a_message_of_its_own() -> None:
    with pytest.raises(ConfigError, match="experiment = '模型' must be one of"):
        built("decode", [*MINIMUM["decode"], "experiment=模型"])
    with pytest.raises(ConfigError, match="unknown key 'promt'"):
        built("decode", [*MINIMUM["decode"], "promt=What's that?"])
    with pytest.raises(ConfigError, match="must be one of"):
        built("decode", [*MINIMUM["decode"], "color=模型"])


@pytest.mark.parametrize(
    ("given", "texts"),
    by_default(
        4,
        [
            ("a,b", ["a", "b"]),
            ("模型,C#", ["模型", "C#"]),
            ("007,1e3", ["007", "1e3"]),
            ("'a, b',c", ["a, b", "c"]),
            ("choice('a, b',c)", ["a, b", "c"]),
            ("it's ${HOME},b", ["it's ${HOME}", "b"]),
            ("'it\\'s'", ["it's"]),
            ("What's that? ${HOME}", ["What's that? ${HOME}"]),
        ],
    ),
)
def test_sweeps_still_sweep(given: str, texts: list[str], tmp_path) -> None:
    arguments = ["-m", f"prompt={given}", "target.path=模型 (v2)", "seed=1,2", f"output_dir={tmp_path}"]
    jobs = plan_sweep("decode", config_class("decode"), arguments)
    assert [job.config.prompt for job in jobs] == [text for text in texts for _ in (1, 2)]
    assert [job.swept.get("prompt", texts[0]) for job in jobs] == [job.config.prompt for job in jobs]
    assert {job.config.target.path for job in jobs} == {"模型 (v2)"}
    for job in jobs:  # as the job's own process reads them
        again = built("decode", split_arguments(job.arguments)[1])
        assert value_of(again, "prompt") == job.config.prompt


def test_names_of_swept_folders_stay(tmp_path) -> None:
    arguments = ["-m", *MINIMUM["decode"], "draft.path=one,two", f"output_dir={tmp_path}"]
    assert [job.name for job in plan_sweep("decode", config_class("decode"), arguments)] == [
        "draft.path-one",
        "draft.path-two",
    ]


def test_hydra_s_own_options_show_it() -> None:
    arguments = [sys.executable, "-m", "decode", "target.path=no such, 模型", "prompt=it's ${HOME}", "--cfg", "job"]
    done = subprocess.run(arguments, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no such, 模型" in done.stdout
