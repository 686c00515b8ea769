"""What a terminal or a page shows: progress in plain lines of rank 0, and Markdown that shows any text as it stands."""

import time

import pytest

from decode.common.markdown import code, fenced, plain, table
from decode.common.progress import get_logger, progress


def test_progress_is_written_as_lines_with_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(total=4, unit="tokens", label="record") as bar:
        for _ in range(4):
            bar.update(1, loss=0.5)
    lines = capsys.readouterr().err.splitlines()
    assert "record: 100%" in lines[-1]
    assert "4/4" in lines[-1]
    assert "loss=0.5" in lines[-1]
    assert len(lines) == 1


def test_the_last_state_is_shown_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.common.progress._LINE_INTERVAL_S", 0.0)
    with progress(total=None, unit="steps", label="train") as bar:
        time.sleep(0.01)
        bar.update(1)
        bar.update(1)
    assert [line.count("steps/s") for line in capsys.readouterr().err.splitlines()] == [1, 1]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with progress(total=2, unit="steps", label="train") as bar:
        bar.update(2, loss=1)
    assert capsys.readouterr().err == ""


def test_log_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("test").info("hello %d", 3)
    shown = capsys.readouterr()
    assert shown.err.rstrip().endswith("] hello 3")
    assert shown.out == ""


@pytest.mark.parametrize(
    "words",
    [
        "held-out split of python_stdlib: 12 timed (128 tokens on average)",
        "2.32 [2.03, 2.43]",
        "T=1, k=4; runs/toy/draft/model",
        "t_target(k+1) - 50% #3 'a' \"b\" {x: 1}",
    ],
)
def test_usual_words_stay_as_they_are(words):
    assert plain(words) == words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>x</script>", "&lt;script&gt;x&lt;/script&gt;"),
        ("R&D &lt;", "R&amp;D &amp;lt;"),
        ("a|b", r"a\|b"),
        ("two\nlines\r\nand\u2028more\x0b", "two lines and more"),
        ("  # title", "# title"),
        ("*bold* _so_ __init__ a_b_", r"\*bold\* \_so\_ \_\_init\_\_ a_b\_"),
        ("`code` ~~no~~", r"\`code\` \~\~no\~\~"),
        (r"C:\temp", r"C:\\temp"),
        ("[click](http://x) [a][b]", r"[click]\(http://x) [a]\[b]"),
    ],
)
def test_markup_is_shown_not_followed(text, shown):
    assert plain(text) == shown


def test_code_is_a_span_where_that_is_safe():
    assert code("python -m eval drafts.x=a_b[1]") == "`python -m eval drafts.x=a_b[1]`"
    assert code("a `b`\nc") == r"<code>a \`b\` c</code>"
    assert code("<x> | y") == r"<code>&lt;x&gt; \| y</code>"
    assert code("") == "<code></code>"


def test_tables_hold_plain_text():
    assert table(("a|b", "c"), [("1\n2", "<i>")]) == "| a\\|b | c |\n| --- | --- |\n| 1 2 | &lt;i&gt; |"


def test_a_fence_is_longer_than_those_inside():
    assert fenced("bash", ["ls"]) == "```bash\nls\n```"
    assert fenced("python", ["'''", "````"]) == "`````python\n'''\n````\n`````"
