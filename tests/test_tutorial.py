"""docs/tutorial.md, run to the letter in an empty folder: what it shows is printed, and its drafts are worth it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"
NEXT = "\x1e"  # ASCII's record separator: between the outputs of two blocks
LONGEST_S = 900


@dataclass(frozen=True)
class Block:
    """A fenced block of the page."""

    language: str
    text: str

    @property
    def file(self) -> str:
        """The name that a Python block is saved under, which its first line says."""
        named = re.match(r"# (\w+\.py)\b", self.text)
        assert named, f"a Python block has to begin with '# NAME.py', and this one does not: {self.text[:80]!r}"
        return named[1]


@dataclass(frozen=True)
class Reader:
    """Somebody who has typed the whole page: the folder they are in, and what each bash block printed."""

    folder: Path
    printed: list[str]


def blocks() -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [Block(*each) for each in found]


def session() -> str:
    """One shell session: bash blocks as they stand, Python blocks saved under their names."""
    lines = []
    for block in blocks():
        if block.language == "bash":
            lines.append(f"{block.text}printf '{NEXT}'")
        elif block.language == "python":
            lines.append(f"cat > {block.file} <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK")
    return "\n".join(lines)


def shown() -> list[tuple[int, str]]:
    """(number of the bash block, line) of everything that the page says is printed."""
    number, lines = -1, []
    for block in blocks():
        number += block.language == "bash"
        if block.language == "text":
            lines += [(number, line) for line in block.text.splitlines() if line.strip(" .")]
    return lines


def pattern(line: str) -> str:
    """A regular expression for a shown line: any number stands for any other, and "..." for anything."""
    escaped = re.escape(re.sub(r"\s+", " ", line.strip())).replace(r"\.\.\.", ".*")
    return re.sub(r"\d(?:[\d,:]|\\\.(?=\d))*", lambda _: r"[\d.,:]+", escaped)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("tutorial")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", session()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (there,) = folder.iterdir()  # the page begins with a folder of its own, and writes nowhere else
    return Reader(there, done.stdout.split(NEXT))


def test_every_block_is_one_that_a_reader_can_use() -> None:
    for block in blocks():
        assert block.language in ("bash", "python", "text", "json")
        if block.language == "bash":
            subprocess.run(["bash", "-n", "-c", block.text], check=True)
        if block.language == "python":
            compile(block.text, block.file, "exec")
    assert any(block.language == "text" for block in blocks())


@pytest.mark.slow
def test_what_the_page_shows_is_what_is_printed(reader: Reader) -> None:
    for number, line in shown():
        printed = re.sub(r"[ \t]+", " ", reader.printed[number])
        assert re.search(pattern(line), printed), f"{line!r} is not in what was printed:\n{reader.printed[number]}"


@pytest.mark.slow
def test_the_report_holds_the_figures_that_the_page_reads(reader: Reader) -> None:
    rows = json.loads((reader.folder / "runs" / "report" / "results.json").read_text())["rows"]
    assert [row["draft"] for row in rows] == ["distilled", "head"]
    for row in rows:
        assert row["mismatches"] == row["uncached_mismatches"] == 0
        assert row["tokens_checked"] > 100
        assert row["tau"] > 1
        assert min(row["speedup"], row["predicted_speedup"], row["tokens_per_s"]) > 0
    assert "alpha" in (reader.folder / "runs" / "report" / "summary.md").read_text()
    assert (reader.folder / "runs" / "report" / "index.html").is_file()


@pytest.mark.slow
def test_the_drafts_have_learned_what_one_without_training_does_not_know(reader: Reader) -> None:
    untrained = acceptance_of_random_weights(reader.folder)
    rows = json.loads((reader.folder / "runs" / "report" / "results.json").read_text())["rows"]
    assert min(row["alpha"] for row in rows) > untrained + 0.2


@torch.inference_mode()
def acceptance_of_random_weights(folder: Path) -> float:
    """alpha of the tutorial's draft as it was before training, on its chats."""
    target = AutoModelForCausalLM.from_pretrained(folder / "stand_in").eval()
    torch.manual_seed(0)
    draft = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "runs" / "draft" / "model")).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "stand_in")
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()[:32]]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    alphas = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        p, q = (model(ids).logits.float().softmax(-1) for model in (target, draft))
        alphas.append(torch.minimum(p, q).sum(-1).mean().item())
    return sum(alphas) / len(alphas)
