"""Names, paths and categories that hold markup stay names: every writer of Markdown and both pages."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from decode.common.compose import CONF
from decode.common.typed_config import build
from eval.modes import certificate as certificate_page
from eval.modes.certificate import Certificate
from eval.modes.compare import page as compare
from eval.modes.families import page as families
from eval.modes.profile import page as profile_page
from eval.publish import PAGES
from eval.render.report_page import page_of, render_block
from eval.results.schema import read_results
from tests.eval.compare.test_page import results as ways_to_draft
from tests.eval.test_report import Page
from tests.train.toy import tiny_settings
from train.config import TrainConfig
from train.export.model_card import model_card

HOSTILE = "<script>alert(1)</script> a|b\nc `d` *e* [f](http://g) <!-- results:end --> $\\x$"
SHOWN = r"&lt;script&gt;alert(1)&lt;/script&gt; a\|b c \`d\` \*e\* [f]\(http://g) &lt;!-- results:end --&gt; $\\x$"
DECODERS_NAMES = ("distilled", "chain4", "ours, chain4", "code", "prose")
RESULTS = CONF.parent / "docs/results"


def of_suite(name: str, *names: str) -> dict:
    """A published suite; `names`, its suite and its target, with markup in them wherever they stand."""
    text = json.dumps(read_results(RESULTS / f"{name}.json"))
    published = json.loads(text)
    for one in (name, published["target"]["path"], *names):
        text = text.replace(json.dumps(one), json.dumps(f"{one}{HOSTILE}"))
    return json.loads(text) | {"mode": published["mode"]}


def report() -> dict:
    results = of_suite("toy", "distilled", "runs/quickstart/draft/model", "held-out split of python_stdlib")
    results["rows"].append(results["rows"][0] | {"category": HOSTILE})
    results["peers_left_out"] = HOSTILE
    results["environment"]["command"] += HOSTILE
    return results


def drafters_found() -> dict:
    text = json.dumps(ways_to_draft())
    for one in ("mine", "edit", "runs/target", "k=12", "it would not run", "held-out split of x"):
        text = text.replace(json.dumps(one), json.dumps(f"{one}{HOSTILE}"))
    return json.loads(text)


ENVIRONMENT = {"packages": {}, "python": "3", "cpu": HOSTILE, "cores": 2, "threads": 1, "seed": 0, "command": HOSTILE}
ENVIRONMENT |= {"git": {"revision": "r"}, "cuda_device": None}
MODEL = {"path": HOSTILE, "num_parameters": 10, "fingerprint": "f", "dtype": "float32"}


def certificate() -> Certificate:
    divergence = {"prompt": HOSTILE, "row": 0, "position": 3, "target_token": 1, "speculative_token": 2}
    divergence |= {"top2_margin": 0.5, "gap": None}
    part = {"dtype": "float32", "temperature": 0.0, "is_judged": True, "tokens": 9, "wanted_tokens": 9, "sequences": 1}
    part |= {"mismatches": 0, "near_ties": 0, "divergences": [divergence], "divergences_per_token": 0.1}
    part |= {"uncached_mismatches": 0, "uncached_near_ties": 0, "uncached_flips": 0, "uncached_tokens_checked": 9}
    part |= {"uncached_flips_per_token": 0.0, "seconds": 1.0}
    prompts = {"prompts": 1, "source": HOSTILE, "new_tokens": 9, "batch_size": 1}
    found = {"failures": [], "parts": [part], "prompts": prompts, "padding": None, "environment": ENVIRONMENT}
    found |= {"target": MODEL, "draft": MODEL | {"name": HOSTILE}, "decode": {"strict": False, "banned": HOSTILE}}
    return Certificate.model_validate({"schema": 1, **found})


def profile() -> dict:
    level = dict.fromkeys(profile_page.LEVELS, 1.0)
    arm = {"name": HOSTILE, "ms_per_round": level, "floor_ms_per_round": level, "operators_ms_per_round": {}}
    arm |= {"calls": 1, "tokens_per_round": 1.0, "tokens_per_s": 1.0, "prefill_ms_per_call": 1.0}
    arm |= {"outside_passes_ms": 1.0, "outside_passes_ms_ci95": [0.5, 1.5]}
    found = {"arms": [arm], "environment": ENVIRONMENT, "target": MODEL, "drafts": {HOSTILE: HOSTILE}, "prompts": 1}
    return found | {"schema": 2, "decode": {}, "new_tokens": 1, "batch_size": 1, "temperature": 1.0}


def card() -> str:
    cfg = build(TrainConfig, tiny_settings(Path("out"), None, records=HOSTILE) | {"target": {"path": HOSTILE}})
    facts = {"loss": 1.0, "alpha": 0.5, "tau": 2.0, "step": 1, "rule": "the best", "validation_tokens": 1}
    return model_card(cfg, {**facts, "num_parameters": 10, "tokens": 1, "train_tokens": 1}, 3)


MARKDOWN = {
    "report": lambda: page_of(report()).markdown(),
    "readme": lambda: render_block(report()),
    "decoders": lambda: compare.page_of(of_suite("decoders", *DECODERS_NAMES)).markdown(),
    "drafters": lambda: compare.page_of(drafters_found()).markdown(),
    "families": lambda: families.page_of(of_suite("families", "lm", "bf16", "chain", "deep")).markdown(),
    "certificate": lambda: certificate_page.render_certificate(certificate()),
    "profile": lambda: profile_page.page_of(profile()).markdown(),
    "card": card,
}


@pytest.mark.parametrize("writer", MARKDOWN)
def test_no_markdown_holds_markup_from_a_name(writer):
    text = outside_of_code(MARKDOWN[writer]())
    for markup in ("<script", "<!-- results", "](http", " *e", " `d"):
        assert markup not in text
    assert SHOWN in text


@pytest.mark.parametrize("writer", MARKDOWN)
def test_no_name_breaks_a_table_or_a_line(writer):
    text = outside_of_code(MARKDOWN[writer]())
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert tables or writer == "card"
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table
    assert not re.search(r"^c \\?`d", text, flags=re.MULTILINE), "a name begins a line of its own"


def outside_of_code(text: str) -> str:
    return re.sub(r"^(`{3,}|---\n)\w*\n?.*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)


def test_a_card_stays_yaml_and_code():
    text = card()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head)["base_model"] == HOSTILE
    (python, shell) = re.findall(r"^(?:`{3,})(?:python|bash)\n(.*?)^`{3,}$", body, flags=re.MULTILINE | re.DOTALL)
    compile(python, "card", "exec")
    assert json.dumps(HOSTILE) in python
    assert HOSTILE in shlex.split(shell, comments=True)


@pytest.mark.parametrize(
    ("made_of", "results"),
    [
        (page_of, report),
        (compare.page_of, lambda: of_suite("decoders", *DECODERS_NAMES)),
        (compare.page_of, drafters_found),
        (families.page_of, lambda: of_suite("families", "lm", "bf16", "chain", "deep")),
        (profile_page.page_of, profile),
    ],
)
def test_no_page_holds_an_element_from_a_name(made_of, results):
    page = Page()
    page.feed(made_of(results()).html())
    assert "script" not in page.tags


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_published_results_are_read_and_rendered_as_they_stand(name):
    """Fields that came later are missing in them."""
    results = read_results(RESULTS / f"{name}.json")
    page = PAGES[results["mode"]](results).markdown(is_published=True)
    assert page == (RESULTS / f"{name}.md").read_text()
