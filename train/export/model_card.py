"""README.md of an exported folder: what it is, what was measured, and how to serve it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from decode.common.markdown import code, fenced, plain, table
from decode.forward.window import Window
from train.config import TrainConfig
from train.export.engines import sglang, vllm
from train.export.engines.base import Launch
from train.settled import rates

IMPORTS = ["from transformers import AutoModelForCausalLM", "", "from decode import generate, load_drafter", ""]
FOR_GGUF = [
    "from decode import generate, load_drafter",
    "from decode.config import ModelConfig",
    "from decode.models.load import load_model",
]
"""What loads a target in a GGUF file as it was read in training; transformers reads some of its metadata alone."""


def model_card(
    cfg: TrainConfig,
    facts: dict[str, Any],
    num_draft_tokens: int,
    window: Window | None = None,
    made_from: str | None = None,
    few: int | None = None,
) -> str:
    """The card of a finished run; `facts` are the measured numbers, see `train.run_result.facts`, and `made_from` and
    `few` (drafts_few) are the blueprint's."""
    use = _launch(cfg, num_draft_tokens, alone=window is not None or few is not None)
    unheeded = (_attention(window), _vocabulary(few))
    parts = [
        _head(cfg),
        _measured(cfg, facts, num_draft_tokens),
        _pruning(facts, made_from),
        _origin(cfg, facts),
        *unheeded,
        use,
    ]
    return "\n".join(line for part in parts if part for line in [*part, ""])


def _head(cfg: TrainConfig) -> list[str]:
    library = [] if cfg.draft.is_head else ["library_name: transformers"]
    tags = ["---", *library, "tags: [speculative-decoding, draftsmith]"]
    if cfg.target.path is None:
        return [*tags, "---", "", "# Language model", "", "A small causal language model trained from scratch on text."]
    kind = f"{cfg.draft.family} head" if cfg.draft.is_head else "draft model"
    article = "An" if kind[0] in "aeiou" else "A"
    about = f"{article} {kind} for {code(cfg.target.path)}: it proposes tokens, and that target, verifying them, "
    about += "writes as before."
    if cfg.draft.is_head:
        about += " It reads that target's hidden states and works between its embedding and output head, which are "
        about += "not in this folder; another target's would mean something else."
    return [*tags, _yaml({"base_model": cfg.target.path}), "---", "", f"# {kind[0].upper()}{kind[1:]}", "", about]


def _yaml(fields: dict[str, str]) -> str:
    return yaml.safe_dump(fields, allow_unicode=True, width=10**6).strip()


def _measured(cfg: TrainConfig, facts: dict[str, Any], k: int) -> list[str]:
    is_warm = cfg.objective.warm_up is None or facts["step"] > facts.get("switched_at", cfg.steps)
    minimised = cfg.objective.name if is_warm else cfg.objective.warm_up
    kept = f"kept: step {facts['step']} ({facts['rule']})."
    head = f"Teacher-forced on {facts['validation_tokens']} validation tokens; {kept}"
    return measured(head, facts, k, [("loss per token", facts["loss"], f"{minimised}, nats")])


def measured(head: str, found: Mapping[str, Any], k: int, first: Sequence[tuple[str, Any, str]] = ()) -> list[str]:
    """The section of what was measured, where anything was; `first` are rows before those of acceptance."""
    rows = [
        *first,
        ("alpha", found.get("alpha"), "mean of sum_v min(p_v, q_v) at temperature 1"),
        ("tau estimate", found.get("tau"), f"tokens per target pass with {k} draft tokens, bonus token included"),
    ]
    cells = [(name, f"{value:.4f}", what) for name, value, what in rows if value is not None]
    return ["## Measured", "", plain(head), "", table(("quantity", "value", ""), cells)] if cells else []


def _pruning(facts: dict[str, Any], made_from: str | None) -> list[str]:
    if made_from is None:
        return []
    found = facts.get("start", {})
    start = {name: found[name] for name in ("alpha", "tau") if found.get(name) is not None}
    before = ", ".join(f"{name} {value:.4f}" for name, value in start.items())
    lines = [plain(f"Made from {made_from}."), *([plain(f"Before training: {before}.")] if before else [])]
    if "zero_share" in facts:
        lines.append(
            f"Of the weights in its layers' matrices {facts['zero_share']:.1%} are zero. They are stored like all "
            "others, and a matrix product that does not look for them is no faster. Further training fills them unless "
            "it sets draft.pruning.sparsity again."
        )
    return ["## Pruning", "", " ".join(lines)]


def _origin(cfg: TrainConfig, facts: dict[str, Any]) -> list[str]:
    source = f"records {code(cfg.records)}" if cfg.records else f"text {code(cfg.data.name if cfg.data else '')}"
    made_by = {"records": "records", "live": "the live target", "served": "servers of the target"}
    p = "" if cfg.target.path is None else f", p from {made_by[cfg.target_source]}"
    return [
        "## Training",
        "",
        f"{facts['num_parameters']:,} parameters; {cfg.steps} steps over the {facts['train_tokens']:,} tokens of the "
        f"training split of {source}, read {facts['tokens'] / facts['train_tokens']:.2g} times{p}; "
        f"objective {cfg.objective.name}, credit {cfg.objective.credit}; {rates(cfg)} at the peak; "
        f"engine {cfg.engine.name}; seed {cfg.seed}. All settings: draftsmith.json.",
    ]


def _attention(window: Window | None) -> list[str]:
    if window is None:
        return []
    return [
        "## Attention",
        "",
        f"It attends to the first {window.sinks} and the last {window.size} positions (draft_window and draft_sinks in "
        "config.json). Engines and transformers do not heed these fields, and would accept less of what it drafts "
        "there: draft with draftsmith, or ask `python -m train.export` for a form that an engine does heed.",
    ]


def _vocabulary(few: int | None) -> list[str]:
    if few is None:
        return []
    return [
        "## Vocabulary",
        "",
        f"It drafts {few:,} of its tokens (draft_vocab in config.json), and learned no others. Engines and "
        "transformers do not heed this field, and would draft the others too: draft with draftsmith.",
    ]


def _launch(cfg: TrainConfig, k: int, alone: bool) -> list[str]:
    """`alone`: by draftsmith, and nothing else."""
    if cfg.target.path is None:
        return ["## Use", "", fenced("python", ['AutoModelForCausalLM.from_pretrained("THIS_FOLDER")'])]
    named, is_gguf = json.dumps(cfg.target.path, ensure_ascii=False), Path(cfg.target.path).is_file()
    ours = [
        "# draftsmith",
        *(FOR_GGUF if is_gguf else IMPORTS),
        f"target = load_model(ModelConfig({named}))"
        if is_gguf
        else f"target = AutoModelForCausalLM.from_pretrained({named})",
        'drafter = load_drafter("THIS_FOLDER", target=target)',
        f"generate(target, drafter, input_ids, num_draft_tokens={k})",
    ]
    if cfg.draft.is_head:
        export = "python -m train.export draft.path=THIS_FOLDER format=all output_dir=FOLDER"
        engines = ["Engines load other forms of it, which this writes:", "", fenced("bash", [export])]
        return ["## Use", "", fenced("python", ours), "", *engines]
    if alone:
        return ["## Use", "", fenced("python", ours)]
    theirs = [
        "# transformers",
        'target.generate(input_ids, assistant_model=AutoModelForCausalLM.from_pretrained("THIS_FOLDER"))',
    ]
    how = Launch(cfg.target.path, Path("THIS_FOLDER"), k, is_parallel=cfg.draft.parallel.tokens > 0)
    engines = [] if is_gguf else ["", fenced("bash", _engines(how))]
    return ["## Use", "", fenced("python", [*ours, *theirs]), *engines]


def _engines(how: Launch) -> list[str]:
    return ["# vLLM", vllm.launch_lm(how), "# SGLang", sglang.launch("STANDALONE")(how)]
