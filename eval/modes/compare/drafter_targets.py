"""The targets of `mode=drafters`: what each writes, and which ways to draft fit it."""

from __future__ import annotations

from dataclasses import replace

from decode.common.errors import InputError
from decode.config import ModelConfig, model_folder
from decode.drafters.beside.refusals import check_foresees
from decode.drafters.saved_draft import DraftDescription, describe_draft
from decode.models.describe import ModelDescription, describe_model
from eval.config import EvalConfig
from eval.inputs import check_datastore, check_held_out, say_sampling
from eval.modes.compare.arm_set import Target
from eval.modes.compare.drafters_config import TASKS
from eval.prompts.chats import check_chats_of_draft


def describe_targets(cfg: EvalConfig) -> list[Target]:
    """The targets that some text is written by; InputError where one has no files, where an arm that was asked for fits
    none of them, and where a draft or a datastore saw the held-out text."""
    texts = cfg.drafters.texts_with(cfg.prompts.file_kinds)
    tasks = [text for text in texts if text in TASKS and cfg.drafters.tasks_target is not None]
    sides = {
        "target": (cfg.target, [text for text in texts if text not in tasks]),
        "drafters.tasks_target": (replace(cfg.target, path=cfg.drafters.tasks_target, revision=None), tasks),
    }
    found = [_describe(cfg, key, source, tuple(of)) for key, (source, of) in sides.items() if of]
    for one in found:
        say_sampling(cfg, one.description)
    for way in cfg.drafters.ways(cfg.drafts):
        refusals = [target.refused[way.name] for target in found if way.name in target.refused]
        if way.is_asked and len(refusals) == len(found):
            raise InputError(refusals[0])
    for way in cfg.drafters.ways(cfg.drafts):
        for path in way.folders:
            check_held_out(cfg.data, f"drafts.{way.name}", model_folder(path))
        for one in found:
            for path in way.folders if one.key == "target" else ():
                check_chats_of_draft(cfg, f"drafts.{way.name}", model_folder(path), one.description)
            for path in way.datastores:
                check_datastore(cfg, way.name, path, one.description)
    return found


def _describe(cfg: EvalConfig, key: str, source: ModelConfig, texts: tuple[str, ...]) -> Target:
    description, fits, refused = _described(key, source), dict[str, DraftDescription](), dict[str, str]()
    for way in cfg.drafters.ways(cfg.drafts):
        if way.is_of_draft and key != "target":
            refused[way.name] = "drafts are of `target`, and another model writes this; its own go into drafters.arms"
            continue
        try:
            draft = describe_draft(way.draft, description, f"the draft of arm {way.name}", way.settings)
            asked = way.changes.get("confidence", cfg.decode.confidence)
            check_foresees(draft.foresees, asked, f"drafters.arms.{way.name}.confidence")
            fits[way.name] = draft
        except InputError as error:
            refused[way.name] = str(error)
    families = {name: draft.family for name, draft in fits.items()}
    positions = min([description.max_positions, *(draft.max_positions for draft in fits.values())])
    return Target(key, source, description, texts, families, positions, refused)


def _described(key: str, source: ModelConfig) -> ModelDescription:
    try:
        return describe_model(source)
    except InputError as error:
        if key == "target":
            raise
        raise InputError(
            f"{key}={source.path} is to write {', '.join(TASKS)}, and is no model: {error}. Train one (data=tasks), "
            "name one that follows instructions, give null where `target` is one, or drop these from drafters.texts"
        ) from error
