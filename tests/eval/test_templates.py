"""What templates show is escaped in both formats, what is missing is an error, and the wheel brings them along."""

import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from jinja2 import UndefinedError

from decode.common.compose import CONF
from eval.render.formatting import Column, Table, column, duration, estimate, guess
from eval.render.page import Page, render_markdown
from eval.results.document import command

ROOT = CONF.parent
ENVIRONMENT = {"cpu": "*y*`", "cores": 2, "threads": 1, "python": "3", "seed": 0, "command": "x *y*"}
ROW = SimpleNamespace(x="1\n2", y=1.0, y_ci95=[0.5, 1.5])
RESULTS = {
    "environment": ENVIRONMENT,
    "target": {"path": "p", "num_parameters": 10, "dtype": "float32"},
    "drafts": {"a": "b"},
    **{"prompts": 1, "new_tokens": 1, "batch_size": 1, "temperature": 1.0},
    "definitions": {"alpha": "in `lossless.dtype` of p_v <b>"},
}
PAGE = Page(
    "a|b",
    RESULTS,
    "profile_method.j2",
    every_table=[
        Table(
            "With rows", [column("x"), estimate("y", digits=1)], [SimpleNamespace(x="1\n2", y=1.0, y_ci95=[0.5, 1.5])]
        ),
        Table("Nothing to show", [column("x")], [], "a note about rows"),
        Table("Left out", [column("x")], [], "a note about rows", reason="because <i>"),
    ],
    lead="<i>",
    headline=["*one*"],
)


def test_markdown_shows_names_as_they_are_and_commands_as_code():
    text = PAGE.markdown()
    assert "# a\\|b\n" in text
    assert "\n\n&lt;i&gt;\n\n- \\*one\\*\n\n" in text
    assert "- Machine: \\*y\\*\\`, 2 cores, 1 threads\n- Software: " in text
    assert "- Command: `x *y*`\n" in text
    assert "- **alpha**: in lossless.dtype of p_v &lt;b&gt;\n" in text
    assert "| x | y |\n| --- | --- |\n| 1 2 | 1.0 [0.5, 1.5] |\n" in text
    assert "\n\n\n" not in text


def test_html_does_too():
    text = PAGE.html()
    assert "<dt>Command</dt><dd><code>x *y*</code></dd>" in text
    assert "<dd>*y*`, 2 cores, 1 threads</dd>" in text
    assert '<p class="lead">&lt;i&gt;</p>' in text
    assert "<dd>in lossless.dtype of p_v &lt;b&gt;</dd>" in text
    assert "<td>1.0 [0.5, 1.5]</td>" in text


@pytest.mark.parametrize("render", [Page.html, Page.markdown])
def test_a_table_without_rows_says_why_or_is_left_out(render):
    text = render(PAGE)
    assert "because &lt;i&gt;" in text
    assert "Nothing to show" not in text
    assert "a note about rows" not in text


def test_what_a_template_shows_and_nobody_gave_is_an_error():
    with pytest.raises(UndefinedError, match="found"):
        render_markdown("certificate.md.j2")


def test_a_column_writes_the_field_of_its_name_unless_told_otherwise():
    row = SimpleNamespace(x=1, y=0.25)
    columns = [
        column("x"),
        column("y again", "y", "{:.1%}".format),
        Column("sum", lambda one: str(one.x + one.y)),
    ]
    assert Table("t", columns, [row]).cells == [["1", "25.0%", "1.25"]]


def test_a_time_is_never_no_time_at_all():
    """A plan once said "about 0 min" of 2 min 43 s."""
    assert [duration(seconds) for seconds in (0, 0.2, 45, 99, 100, 163, 5400, 36_000)] == [
        *("1 s", "1 s", "45 s", "99 s", "2 min", "3 min", "90 min", "10.0 h"),
    ]
    assert guess(90) == "30 s to 4 min, by sizes alone"


def test_the_wheel_holds_every_template(tmp_path: Path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "eval", tmp_path / "eval", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    templates = {f"eval/render/templates/{path.name}" for path in (ROOT / "eval/render/templates").iterdir()}
    assert templates <= set(zipfile.ZipFile(wheel).namelist())
    assert {"eval/render/templates/page.html.j2", "eval/render/templates/style.css"} <= templates


def test_a_command_is_written_as_a_shell_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["mode=families", '+families.arms.x=["draft=lm","optimizer=adamw"]', "name=two words"]
    monkeypatch.setattr("sys.argv", ["eval", *given])
    assert shlex.split(command()) == ["python", "-m", "eval", *given]
