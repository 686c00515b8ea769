"""Train one draft by another tool, for `scripts/training_peers`. In the tool's own environment:

    python scripts/training_peers/peer.py TOOL key=value ...    # the settings of `python -m train`

The texts, their cut to `sequence_length`, the target, the weights that a draft LM begins with, AdamW, its rates and
bf16 by autocast are those of the settings. Ours packs texts into rows; a batch here holds as many texts as those rows
do, padded as the tools do it. `output_dir` gets the draft (draft/) and speed.json: tokens of texts, and their seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import kl_div, log_softmax
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run from anywhere, as a script

from decode.common.compose import compose  # noqa: E402
from decode.common.environment import keep_freed_memory  # noqa: E402
from decode.common.typed_config import build  # noqa: E402
from decode.models.load import load_model  # noqa: E402
from train.config import TrainConfig  # noqa: E402
from train.optimizers import Schedule  # noqa: E402
from train.training_inputs import Inputs, open_inputs  # noqa: E402

WARM = 2
"""Steps before the clock starts."""
IGNORED = -100


class Clock(TrainerCallback):
    """Tokens of the texts and seconds, from the end of step WARM on."""

    def __init__(self) -> None:
        self.tokens, self.began, self.seconds = 0, 0.0, 0.0
        self.counts = False

    def read(self, tokens: int) -> None:
        """A batch holds so many, padding aside."""
        self.tokens += tokens * self.counts

    def step(self, number: int) -> None:
        """Step `number`, from 1, is done."""
        if number == WARM:
            self.counts, self.began = True, time.perf_counter()
        self.seconds = time.perf_counter() - self.began

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step(state.global_step)


def texts_of(inputs: Inputs) -> list[dict[str, Any]]:
    """The training split's texts, with labels that are IGNORED where nothing is learned."""
    source = inputs.train.source
    found = [source[index] for index in range(len(source.lengths))]
    return [{"input_ids": one.ids, "labels": np.where(one.loss_mask, one.ids, IGNORED)} for one in found]


def padded(texts: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as a collator of transformers makes it: padded to the longest."""
    longest = max(len(one["input_ids"]) for one in texts)
    shape = (len(texts), longest)
    batch = {"input_ids": torch.zeros(shape, dtype=torch.long), "attention_mask": torch.zeros(shape, dtype=torch.long)}
    batch["labels"] = torch.full(shape, IGNORED)
    for row, one in enumerate(texts):
        length = len(one["input_ids"])
        batch["input_ids"][row, :length] = torch.as_tensor(one["input_ids"])
        batch["labels"][row, :length] = torch.as_tensor(one["labels"])
        batch["attention_mask"][row, :length] = 1
    return batch


class Counted:
    """A Trainer that tells of the batches that it trains on; its loader is a batch ahead."""

    clock: Clock

    def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
        self.clock.read(int(inputs["attention_mask"].sum()))
        return super().training_step(model, inputs, *others)  # type: ignore[misc]


class PlainTrainer(Counted, Trainer):
    """Forward KL from the target's logits in `compute_loss`: the twenty lines that one writes first."""

    target: Any

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over learned tokens."""
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            wanted = self.target(**given).logits[:, :-1]
        learned = inputs["labels"][:, 1:] != IGNORED
        q = log_softmax(model(**given).logits[:, :-1][learned].float(), -1)
        p = log_softmax(wanted[learned].float(), -1)
        return kl_div(q, p, reduction="batchmean", log_target=True)


def by_trainer(tool: str, cfg: TrainConfig, inputs: Inputs, clock: Clock) -> Any:
    """A draft LM, by transformers' Trainer or by TRL's GKDTrainer (lmbda = beta = 0: forward KL on the texts given)."""
    texts = texts_of(inputs)
    assert cfg.draft.init_from is not None
    assert cfg.lr is not None
    settings: dict[str, Any] = {
        "output_dir": f"{cfg.output_dir}/run",
        "per_device_train_batch_size": max(1, round(len(texts) / len(inputs.train.rows) * cfg.batch_size)),
        "max_steps": cfg.steps,
        "max_grad_norm": cfg.clip,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "seed": cfg.seed,
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,
    }
    draft = AutoModelForCausalLM.from_pretrained(cfg.draft.init_from, dtype=torch.float32)
    target = load_model(cfg.target)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=cfg.lr, betas=cfg.betas, weight_decay=cfg.weight_decay)
    rates = LambdaLR(optimizer, Schedule([optimizer], cfg).factor)
    given: dict[str, Any] = {"optimizers": (optimizer, rates), "data_collator": padded, "callbacks": [clock]}
    if tool == "trl":
        from datasets import Dataset
        from trl.experimental.gkd import GKDConfig, GKDTrainer  # pyright: ignore[reportMissingImports]

        rows = Dataset.from_list([{k: list(map(int, v)) for k, v in one.items()} for one in texts])
        args = GKDConfig(lmbda=0.0, beta=0.0, temperature=1.0, gradient_checkpointing=False, **settings)
        kind: Any = type("CountedGKD", (Counted, GKDTrainer), {})
        trainer = kind(draft, target, args, processing_class=inputs.tokenizer, train_dataset=rows, **given)
    else:
        given["train_dataset"] = texts
        trainer = PlainTrainer(draft, TrainingArguments(**settings), **given)
        trainer.target = target
    trainer.clock = clock
    trainer.train()
    return draft


def main(tool: str, overrides: list[str]) -> None:
    """Train, and write the draft and its speed."""
    composed = compose("train", TrainConfig, overrides)
    assert composed is not None
    cfg = build(TrainConfig, composed)
    torch.manual_seed(cfg.seed)
    keep_freed_memory()
    inputs, clock, folder = open_inputs(cfg), Clock(), Path(cfg.output_dir)
    if tool == "speculators":
        from eagle3 import by_speculators

        draft = by_speculators(cfg, inputs, clock)
    else:
        draft = by_trainer(tool, cfg, inputs, clock)
    draft.save_pretrained(folder / "draft")
    inputs.tokenizer.save_pretrained(folder / "draft")
    (folder / "speed.json").write_text(json.dumps({"tokens": clock.tokens, "seconds": clock.seconds}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
