"""Documents point at files that exist, quote messages that are printed, and show what the code and its results say."""

import ast
import hashlib
import json
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eval.publish import _link
from eval.results.schema import ComponentTimes, Gaps, ResultsFile, Row
from tests.tiny import save_tiny_target

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
PACKAGES = ("decode", "distill", "train", "eval")


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", read(document))
    assert not [link for link in links if "://" not in link and not ((ROOT / document).parent / link).exists()]


@cache
def texts_of_the_source() -> list[str]:
    """Every literal text, f-strings without their values: what a message consists of, however it is wrapped."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("\0".join(str(one.value) for one in node.values if isinstance(one, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


MESSAGES = re.findall(r"```text\n(.*?)\n```", read("docs/reference/troubleshooting.md"), flags=re.DOTALL)


@pytest.mark.parametrize("message", MESSAGES, ids=[message[:40] for message in MESSAGES])
def test_a_quoted_message_is_one_that_is_printed(message: str) -> None:
    parts = [part.strip() for part in message.split("...")]  # "..." stands for values
    assert any(len(part) > 10 for part in parts)
    pattern = re.compile(".*".join(map(re.escape, parts)), flags=re.DOTALL)
    assert any(pattern.search(text) for text in texts_of_the_source())


@pytest.mark.parametrize("name", ["settings_reference", "engines_reference", "faults_reference"])
def test_pages_that_are_written_from_the_code_are_those_of_the_code(name: str) -> None:
    script = runpy.run_path(str(ROOT / f"scripts/{name}.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), f"python scripts/{name}.py"


def test_the_readmes_table_of_engines_is_that_of_the_code() -> None:
    script = runpy.run_path(str(ROOT / "scripts/engines_reference.py"))
    assert read("README.md") == script["readme"](), "python scripts/engines_reference.py"


def test_every_engine_that_is_served_has_a_page() -> None:
    script = runpy.run_path(str(ROOT / "scripts/engines_reference.py"))
    pages = {path.stem for path in (ROOT / "docs/how-to/serving").glob("*.md")}
    assert pages == {"export", *script["SERVING"]}


@pytest.mark.parametrize("name", ["smollm2", "smollm2_peers"])
def test_a_chart_is_drawn_from_the_published_figures(tmp_path: Path, name: str) -> None:
    """Other versions of matplotlib place things otherwise, so bytes are compared within one alone."""
    script = runpy.run_path(str(ROOT / "scripts/kinds_chart.py"))
    chart = read(f"docs/results/{name}.svg")
    figures = (ROOT / f"docs/results/{name}.json").read_bytes()
    assert hashlib.sha256(figures).hexdigest() in chart, "python scripts/kinds_chart.py"
    script["draw"](name, tmp_path / "once.svg")
    script["draw"](name, tmp_path / "twice.svg")
    drawn = (tmp_path / "once.svg").read_bytes()
    assert drawn == (tmp_path / "twice.svg").read_bytes()
    shown = r"<text[^>]*>(.*?)</text>"
    assert sorted(re.findall(shown, drawn.decode())) == sorted(re.findall(shown, chart))
    assert f"](docs/results/{name}.svg)" in read("README.md")


@pytest.mark.parametrize(
    ("script", "figures", "page"),
    [
        ("recording_page", "recording/runs.json", "recording.md"),
        ("tokens_page", "smollm2/tokens.json", "smollm2_tokens.md"),
        ("attention_page", "attention/runs.json", "attention.md"),
        ("training_peers/page", "training_peers/runs.json", "training_peers.md"),
        ("rates_page", "rates/runs.json", "rates.md"),
    ],
)
def test_a_page_of_runs_is_rendered_from_its_figures(script: str, figures: str, page: str) -> None:
    written = runpy.run_path(str(ROOT / f"scripts/{script}.py"))["page_of"]
    assert written(json.loads(read(f"docs/results/{figures}"))) == read(f"docs/results/{page}")


def test_the_chart_of_tokens_is_drawn_from_its_figures() -> None:
    figures = (ROOT / "docs/results/smollm2/tokens.json").read_bytes()
    assert hashlib.sha256(figures).hexdigest() in read("docs/results/smollm2_tokens.svg"), "scripts/tokens_page.py"


def test_every_field_of_results_json_is_explained() -> None:
    page = read("docs/reference/results_json.md")
    names = {field.alias or name for name, field in ResultsFile.model_fields.items()}
    for part in (Row, ComponentTimes, Gaps):
        names |= part.model_fields.keys()
    assert not [name for name in sorted(names) if f"`{name}`" not in page]


def test_a_published_block_links_to_its_page_from_any_folder() -> None:
    page = ROOT / "docs/results/full_logits"
    assert _link(page, ROOT / "docs/theory/estimators.md") == "../results/full_logits.md"
    assert _link(page, ROOT / "README.md") == "docs/results/full_logits.md"


def test_the_navigation_names_every_page() -> None:
    pages = {str(Path(document).relative_to("docs")) for document in DOCUMENTS if document.startswith("docs/")}
    named = re.findall(r"[\w/-]+\.md", read(".mkdocs.yml").split("nav:")[1])
    assert sorted(named) == sorted(pages)


def test_the_readmes_python_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On tiny models in place of the published pair."""
    code = re.search(r"```python\n(.*?)```", read("README.md"), flags=re.DOTALL)
    assert code is not None
    program = code[1]
    for role, name in {"target": "Qwen/Qwen3-8B", "draft": "Qwen/Qwen3-0.6B"}.items():
        folder = save_tiny_target(tmp_path / role, max_position_embeddings=512)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        tokenizer.save_pretrained(folder)
        assert name in program
        program = program.replace(name, str(folder))
    program = program.replace('device_map="auto"', 'device_map="cpu"').replace("=256", "=4").replace("=32", "=2")
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "1.00 tokens per target pass" in printed
    assert printed.count("tokens per target pass") == 2
    assert "acceptance by position: [" in printed


def test_the_site_is_built_strictly() -> None:
    """Not --quiet: warnings that are not shown are not counted, and the build always passes."""
    assert re.search(r"mkdocs build -f \.mkdocs\.yml --strict$", read("scripts/test.sh"), flags=re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) < 150


def test_what_contributing_names_is_there() -> None:
    """The page once sent people to a table of objectives that was no longer called so."""
    named = re.findall(r"`([^`\s]+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    paths = [one for one in named if re.fullmatch(r"[a-z_/]+/[a-z_0-9]+\.(py|yaml)", one)]
    tables = [one for one in named if re.fullmatch("[A-Z]{2,}(_[A-Z]+)*", one)]
    code = "".join(path.read_text(encoding="utf-8") for top in PACKAGES for path in (ROOT / top).rglob("*.py"))
    assert len(paths) > 10
    assert not [one for one in paths if not (ROOT / one).is_file()]
    assert "TERMS" in tables
    assert not [one for one in tables if not re.search(rf"^{one}\b", code, re.MULTILINE)]
