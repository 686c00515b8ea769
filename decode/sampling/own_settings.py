"""What a model's own generation_config asks of sampling and is not done here: said once in a process, as neither is an
error. transformers and engines go by that file unless they are told otherwise; here every setting is one of the user's.
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import GenerationConfig

from decode.common.progress import get_logger, is_main_process

RESTING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that both know, and the values by which they change nothing."""
FILTERS = ("top_k", "top_p", "min_p")
_told: set[tuple] = set()
log = get_logger("decode")


def asked_by(generation: GenerationConfig | None) -> dict[str, float]:
    """The settings that it names; temperature 0 where it says that nothing is drawn."""
    named = {name: getattr(generation, name, None) for name in RESTING}
    if getattr(generation, "do_sample", None) is False:
        named |= {"temperature": 0.0} | dict.fromkeys(FILTERS)
    return {name: value for name, value in named.items() if value is not None}


def say_others(
    generation: GenerationConfig | None,
    used: Mapping[str, float],
    path: str,
    written: Mapping[str, str],
    of_run: bool = False,
) -> None:
    """One line where `used` differs from what it asks for, unless there was one on such settings in this process.

    `written` says how each setting is given, with {} for its value; without those that cannot be. `of_run` are the
    settings of a whole stage, which calls within it do not answer for again.
    """
    asked = asked_by(generation)
    drawn = used["temperature"] != 0  # else filters choose among tokens of which the likeliest is taken
    others = [name for name in asked if asked[name] != used.get(name, RESTING[name]) and (drawn or name not in FILTERS)]
    key = tuple(asked.items())
    is_told = key in _told
    if others or of_run:
        _told.add(key)
    if not others or is_told or not is_main_process():
        return
    here = ", ".join(f"{name}={used.get(name, RESTING[name]):g}" for name in others)
    ways = " ".join(written[name].format(f"{asked[name]:g}") for name in others if name in written)
    lacking = [name for name in others if name not in written]
    log.warning(
        "the generation_config of %s asks for %s, and texts are drawn here with %s, so they follow another "
        "distribution than by its own settings.%s%s",
        path,
        ", ".join(f"{name}={asked[name]:g}" for name in others),
        here,
        f" To go by them: {ways}" if ways else "",
        f" ({' and '.join(lacking)} cannot be set here)" if lacking else "",
    )
