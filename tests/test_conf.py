"""Every shipped YAML composes and builds its stage's dataclass, and every command shown to a reader is accepted."""

from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from decode.common.compose import CONF, wants_sweep
from decode.common.errors import ConfigError
from decode.common.sweep import plan_sweep
from decode.drafters.untrained.config import UNTRAINED
from tests.commands import MINIMUM, STAGES, built, config_class, groups, shown_commands
from tests.tiers import spread

OPTIONS = sorted(str(path.relative_to(CONF).with_suffix("")) for path in CONF.glob("*/*.yaml"))
COMMANDS = [pytest.param(*command, id=f"{command[0]}-{number}") for number, command in enumerate(shown_commands())]


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_composes(stage: str) -> None:
    built(stage, MINIMUM[stage])


def test_no_yaml_stands_outside_the_stages_and_groups() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(STAGES)
    known = {group for stage in STAGES for group in groups(stage)}
    assert {path.name for path in CONF.iterdir() if path.is_dir()} == known
    assert len(list(CONF.rglob("*.yaml"))) == len(OPTIONS) + len(STAGES)


NEEDED = {
    "experiment/smollm2_records": ["data.path=some/prompts.jsonl"],
    "experiment/smollm2_drafters": ["prompts.file=some/questions.jsonl"],
    "experiment/smollm2_report": ["prompts.file=some/questions.jsonl"],
    "experiment/smollm2_atlas": ["prompts.file=some/questions.jsonl"],
    "experiment/smollm2_moved": ["prompts.file=some/questions.jsonl"],
    "experiment/smollm2_domains": ["prompts.file=some/questions.jsonl"],
    "experiment/smollm2_stores": ["prompts.file=some/questions.jsonl"],
    "experiment/smollm2_families": ["prompts.file=some/questions.jsonl"],
    "experiment/smollm2_served": ["prompts.file=some/questions.jsonl"],
    "prompts/spec_bench": ["prompts.file=some/questions.jsonl"],
    "draft/cascade": ["draft.settings.draft=some/draft"],
    "draft/early_exit": ["draft.settings.exit_layer=2"],
    "draft/exit_adapter": ["draft.head.taps=[2]"],
    "draft/foreign": ["draft.settings.draft=some/draft"],
    "draft/mixture": ["draft.settings.members=[ngram]"],
    "draft/retrieval": ["draft.settings.datastore=some/datastore"],
}
"""Option -> what it must be told besides."""


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_named_drafter_s_values_are_those_of_its_class(name: str) -> None:
    shown = OmegaConf.load(CONF / f"draft/{name}.yaml").settings
    defaults = {field.name: field.default for field in fields(UNTRAINED[name]) if field.default is not MISSING}
    assert {one: shown.get(one, value) for one, value in defaults.items()} == defaults


@pytest.mark.parametrize("option", spread(16, OPTIONS))
def test_each_option_builds_in_a_stage_that_has_its_group(option: str) -> None:
    group, name = option.split("/")
    refusals = []
    for stage in (stage for stage in STAGES if group in groups(stage)):
        # An experiment is a complete command; another option may need the stage's minimum and a path of its own.
        minimum = [] if group == "experiment" else MINIMUM[stage]
        own = NEEDED.get(option, [])
        attempts = ([*minimum, f"{group}={name}", *own], [*minimum, f"{group}={name}", f"{group}.path=some/path"])
        for arguments in attempts:
            try:
                built(stage, arguments)
            except ConfigError as error:
                refusals.append(f"{stage} {' '.join(arguments)}: {error}")
            else:
                return
    pytest.fail("\n".join(refusals) or f"no stage has the group {group}")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "stage", "arguments"), COMMANDS)
def test_a_command_shown_to_the_reader_is_accepted(file: str, stage: str, arguments: list[str]) -> None:
    minimum = MINIMUM[stage] if "..." in arguments else []  # abridged: completed by the least needed
    shown = [argument.replace("=...", "=some/path") for argument in arguments if argument != "..."]
    arguments = [*minimum, *shown]
    if wants_sweep(arguments):
        assert plan_sweep(stage, config_class(stage), arguments)
    else:
        built(stage, arguments)


def test_commands_are_found_where_they_are_shown() -> None:
    files = {str(parameters.values[0]) for parameters in COMMANDS}
    assert {"README.md", "scripts/toy.sh", "scripts/sweep.sh"} <= files
    assert Path(CONF).name == "conf"
