"""Faults of reading published heads, and the small test that notices each."""

from __future__ import annotations

from functools import partial

from tests.decode.formats import test_bad_input as bad
from tests.decode.formats import test_published as published
from tests.faults import Fault, noticed_by


def logits(who: str) -> partial[None]:
    """Its logits against its authors' method."""
    return partial(published.test_its_logits_are_those_of_its_authors_method, who=who)


def refused(name: str) -> partial[None]:
    """A bad folder."""
    return partial(bad.test_a_bad_folder_is_refused_by_its_description, name=name)


DRAFTED = partial(published.test_a_published_head_drafts_what_its_target_writes, who="yuhuili")
FAULTS: list[Fault] = [
    *noticed_by(
        logits("RedHatAI"),
        ("decode.formats.eagle3:read_config", 'fields.get("norm_before_residual")', "False"),
        ("decode.formats.vocabulary:drafted_ids", "offsets + torch.arange(len(offsets))", "offsets"),
    ),
    *noticed_by(
        logits("speculators-qwen3"),
        ("decode.formats.eagle3:read_config", '"self_attn.q_norm.weight" in names', "False"),
    ),
    *noticed_by(
        logits("SpecForge"),
        ("decode.formats.rope:older_rope_of", '(fields.get("rope_scaling") or {})', "{}"),
    ),
    *noticed_by(
        logits("yuhuili"),
        ("decode.formats.eagle3:read_config", "own_head=OUTPUT in names", "own_head=False"),
    ),
    *noticed_by(DRAFTED, ("decode.formats.eagle3:default_taps", "num_layers - 3", "num_layers - 2")),
    *noticed_by(
        logits("FasterDecoding"),
        ("decode.formats.medusa:read_config", "_shared(folder) is None and any(map(_OUTPUT.match, names))", "False"),
    ),
    *noticed_by(
        logits("z-lab"),
        ("decode.formats.blocks:read_dflash", "slots if is_anchor else slots - 1", "slots"),
    ),
    *noticed_by(
        logits("deepseek-ai"),
        ("decode.formats.dspark:read_config", "not folder.is_speculators if anchor is None else", "False or"),
    ),
    *noticed_by(
        refused("a head cut off"), ("decode.formats.medusa:read_config", "told is not None and told > depth", "False")
    ),
    *noticed_by(
        refused("another target's embedding"),
        ("decode.formats.target_rows:_differing", "> TINY + slack", "> 1e9 + slack"),
    ),
    *noticed_by(refused("lists that differ"), ("decode.formats.states:taps_of", "> 1", "> 9")),
    *noticed_by(refused("draft ids outside"), ("decode.formats.vocabulary:vocabulary_of", "len(outside) or", "")),
    *noticed_by(refused("a program"), ("decode.formats.weights:read_pickle", "weights_only=True", "weights_only=0")),
    *noticed_by(refused("two forms"), ("decode.formats.form:_form_of", "len(found) > 1", "False")),
    *noticed_by(
        bad.test_one_row_of_another_target_is_found_when_the_target_is_loaded,
        ("decode.formats.target_rows:check_against_model", "differing += ", "differing = 0 * "),
    ),
    *noticed_by(
        published.test_a_quantised_language_model_is_none_either,
        ("decode.formats.form:published_form", '"fc.weight" not in names', "False"),
    ),
]
