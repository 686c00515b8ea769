"""The stages as tests see them: their configurations, their YAML files, and the commands that the documents show."""

import re
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module

import yaml

from decode.common.compose import CONF, compose
from decode.common.typed_config import build

ROOT = CONF.parent
STAGES = {
    "distill": "DistillConfig",
    "datastore": "DatastoreConfig",
    "train": "TrainConfig",
    "decode": "DecodeConfig",
    "eval": "EvalConfig",
    "export": "ExportConfig",
    "check": "CheckConfig",
}
MODULES = {stage: stage for stage in STAGES} | {
    "datastore": "distill.datastore",
    "export": "train.export",
    "check": "train.check",
}
"""As `python -m` names them."""
# The least that each stage must be told besides its YAML.
MINIMUM = {
    "distill": ["target.path=some/target"],
    "datastore": ["target.path=some/target"],
    "train": ["target.path=some/target", "records=some/records", "output_dir=some/draft"],
    "decode": ["target.path=some/target", "prompt=text"],
    "eval": ["target.path=some/target", "drafts.one=some/draft", "output_dir=some/report"],
    "export": ["draft.path=some/draft", "format=vllm", "output_dir=some/export"],
    "check": ["draft.path=some/export", "target.path=some/target"],
}
_COMMAND = re.compile(
    r"(?:python3?|accelerate\s+launch|torchrun|deepspeed)\b[^|;&]*?\s-m\s+(distill(?:\.datastore)?|train(?:\.export|\.check)?|decode|eval)"
    r"(?=\s|$)(.*)"
)


def config_class(stage: str) -> type:
    return getattr(import_module(f"{MODULES[stage]}.config"), STAGES[stage])


def main_of(stage: str) -> Callable[[], None]:
    """What `python -m` runs."""
    return import_module(f"{MODULES[stage]}.__main__").main


def built(stage: str, overrides: list[str]) -> object:
    """The stage's dataclass as the command line would build it."""
    container = compose(stage, config_class(stage), overrides)
    assert container is not None
    return build(config_class(stage), container)


def groups(stage: str) -> list[str]:
    """Groups that the stage's defaults list names."""
    defaults = yaml.safe_load((CONF / f"{stage}.yaml").read_text())["defaults"]
    names = [name for entry in defaults if isinstance(entry, dict) for name in entry]
    return [name for name in names if not name.startswith("override")]


def shown_commands() -> Iterator[tuple[str, str, list[str]]]:
    """(file, stage, arguments) of every stage command in documents, scripts and YAML headers."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    scripts = [*ROOT.glob("scripts/*.sh"), *CONF.rglob("*.yaml")]
    for path in sorted([*documents, *scripts]):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in _code_of_markdown(text) if path.suffix == ".md" else text.splitlines():
            found = _COMMAND.search(line)
            if found:
                yield (
                    str(path.relative_to(ROOT)),
                    found[1].removeprefix("train.").removeprefix("distill."),
                    _arguments(found[2], text),
                )


def _code_of_markdown(text: str) -> Iterator[str]:
    for block in re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL):
        yield from block.splitlines()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from (span for span in re.findall(r"`([^`\n]+)`", prose) if "=" in span)


def _arguments(text: str, script: str) -> list[str]:
    """The words of a command up to the first shell operator, variables replaced by what the script sets them to.

    "..." stands for what the reader was told before: it is left to the caller.
    """
    arguments = []
    for word in shlex.split(text, comments=True):
        if word in ("|", ">", "<", "&&", "||", "&", ";") or word.startswith("2>"):
            break
        if word != "$@":
            arguments.append(re.sub(r"\$\{?(\w+)\}?", lambda name: _value_of(name[1], script), word))
    return arguments


def _value_of(name: str, script: str) -> str:
    found = re.search(rf"^\s*{name}=(?:\$\{{\w+:-([^}}]*)\}}|(\S+))", script, flags=re.MULTILINE)
    return (found[1] or found[2]) if found else "1"
