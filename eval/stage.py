"""The stage: hands the configuration to what it asks for, each a module of its own with a `run`."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from transformers.utils import logging as transformers_logging

from decode.common.extras import extra, require_installed
from decode.models.load import describe_model
from distill.prompts.run_chats import with_day
from eval.config import EvalConfig
from eval.prompts.chats import has_chats
from eval.prompts.own_data import with_own_data
from eval.render.tracking import check_tracking

MODES = {
    "report": "eval.modes.report",
    "certificate": "eval.modes.certificate",
    "profile": "eval.modes.profile.mode",
    "decoders": "eval.modes.decoders.mode",
    "families": "eval.modes.families.mode",
    "served": "eval.modes.served.mode",
    "drafters": "eval.modes.drafters.mode",
    "exits": "eval.modes.exits.mode",
}
"""EvalConfig.mode -> module; imported when it is wanted."""


def run(cfg: EvalConfig) -> None:
    """Measure what cfg.mode names and write it to cfg.output_dir.

    Raises ConfigError and InputError before any weight is loaded, and RunError where a measurement fails its claim.
    """
    transformers_logging.set_verbosity_error()  # its advice on generate() is about calls that it makes itself
    transformers_logging.disable_progress_bar()
    check_tracking(cfg)
    for package in ("matplotlib", "markupsafe"):
        require_installed(package, "a report", f"Install it, {extra('eval')}")
    import_module(MODES[cfg.mode]).run(_with_day(with_own_data(cfg)))


def _with_day(cfg: EvalConfig) -> EvalConfig:
    """With the day that chats are of, where the prompts may be chats and no draft's corpus names one."""
    if not has_chats(cfg):
        return cfg
    tokenizer = describe_model(cfg.target).tokenizer
    return replace(cfg, data=with_day(cfg.data, tokenizer, cfg.output_dir, has_chats=True))
