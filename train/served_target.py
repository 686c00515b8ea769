"""target_source=served: hidden states, and p of them, from vLLM servers that run already, while a draft learns.

Batches are read one step ahead of the training, so that no more than a step's states lie in the shared folder; each
file is removed as it is read. What a server gives is judged as it is for records: its weights, zeros, other layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.common.checked_json import read_json, write_json
from decode.common.errors import UserError
from decode.common.run_folder import on_main
from decode.models.output_head import Ends, ends_of
from decode.models.small import load_ends
from distill.config import DistillConfig
from distill.engines.config import TargetConfig
from distill.objectives.target_distribution import HiddenRows, TargetDistribution
from distill.records.config import FeatureConfig, RecordsConfig
from distill.records.distribution_stores import Head
from distill.records.record_shards import Record
from distill.runtimes.engine_runtime import EnginePasses
from distill.runtimes.probe import check_weights
from distill.runtimes.served_runtime import ServedRuntime
from distill.sequences import Placed, SequenceSource, TrainSequence
from train.config import TrainConfig
from train.training_inputs import Inputs

WEIGHTS = "server.json"
"""What the first server gave of a fixed text, by which its weights are known, in the run's folder."""


class ServedSequences:
    """The texts of another source, with what a server makes of them."""

    def __init__(self, texts: SequenceSource, passes: EnginePasses) -> None:
        self.texts, self.passes, self.lengths = texts, passes, texts.lengths
        self._features: Tensor | None = None
        """Of the batch that p was made of last."""

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> TrainSequence:
        return self.texts[index]

    def collate(
        self, items: Sequence[Placed], shape: tuple[int, int], device: torch.device | str, head: Head | None = None
    ) -> TargetDistribution:
        """p of every token of a batch of `shape` (B, T), by the checkpoint's own norm and head; RunError where the
        server is away for too long, or gives what cannot be this target's."""
        kept: dict[str, Any] = {"dtype": self.passes.head.dtype}
        width, layers = self.passes.runtime.target.hidden_size, len(self.passes.layers)
        hidden = torch.zeros(*shape, width, **kept)
        features = torch.zeros(*shape, layers, width, **kept) if layers else None
        records = {id(one): Record(one.ids, one.loss_mask, {"document": one.document}) for one, _, _ in items}
        places = {id(records[id(one)]): (row, start) for one, row, start in items}
        with _named():
            for part in self.passes.over([*records.values()]):  # texts of similar lengths: no long one pads the others
                for number, record in enumerate(part.records):
                    row, start = places[id(record)]
                    span, length = slice(start, start + len(record.ids)), len(record.ids)
                    hidden[row, span] = part.hidden[number, :length]
                    if features is not None and part.read is not None:
                        features[row, span] = part.read[number, :length]
        self._features = features
        return HiddenRows(hidden.flatten(0, 1), self.passes.head, torch.arange(shape[0] * shape[1], device=device))

    def features(self, items: Sequence[Placed], shape: tuple[int, int], layers: Sequence[int]) -> Tensor | None:
        """(B, T, len(layers), d) hidden states on the CPU, 0 where no token stands, of the batch that `collate` has
        just read; None for no layers."""
        assert tuple(layers) == self.passes.layers, (layers, self.passes.layers)
        found, self._features = self._features, None
        return found


@contextmanager
def served(cfg: TrainConfig, inputs: Inputs, rank: int, device: torch.device) -> Iterator[tuple[Inputs, Ends | None]]:
    """`inputs` whose batches a server completes, and the target's ends on `device`, which it needs for p; as they are
    where no server is asked for. Raises ConfigError for a server that does not answer, or is not one of this target."""
    if cfg.target_source != "served":
        yield inputs, None
        return
    assert inputs.target is not None, "checked by TrainConfig"
    with _named():
        runtime = ServedRuntime(_asked(cfg, inputs, rank), inputs.target, inputs.target.dtype_name)
        runtime.ends = load_ends(replace(cfg.target, device=str(device), device_map=None)).head.model
        runtime.prepare(cfg.sequence_length)
    with runtime:
        layers = inputs.blueprint.layers_read
        passes = runtime.passes(layers)
        train, validation = (
            replace(packed, source=ServedSequences(packed.source, passes), layers=layers)
            for packed in (inputs.train, inputs.validation)
        )
        yield replace(inputs, train=train, validation=validation), ends_of(runtime.ends)


def check_same_server(inputs: Inputs, folder: Path, is_main: bool) -> None:
    """RunError where a server has other weights than the one that the run in `folder` was begun with, or than another
    process's. What an earlier run of this process has left in the shared folder is removed. Every process calls this,
    once the folder is its own."""
    source = inputs.train.source
    if not isinstance(source, ServedSequences):
        return
    runtime, file = source.passes.runtime, folder / WEIGHTS
    assert isinstance(runtime, ServedRuntime)
    runtime.close()

    def first() -> list[float]:
        if not file.exists():
            write_json(file, {"log_p": runtime.note.log_p})
        return read_json(file)["log_p"]

    check_weights(runtime.reader.url, runtime.note.log_p or [], on_main(is_main, first), runtime.dtype)


NAMES = {
    "target.states_folder": "servers.states_folder",
    "target.timeout": "servers.timeout",
    "target.url": "servers.urls",
    "target.runtime=vllm": "target_source=served",
    "target.runtime=transformers": "target_source=live",
    "fewer sampling.max_new_tokens": "a shorter sequence_length",
    "was not recorded": "was not learned",
    "into the records": "into the draft",
}
"""What recording calls settings and results -> what training does."""


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        text = str(error)
        for theirs, ours in NAMES.items():
            text = text.replace(theirs, ours)
        raise type(error)(text) from error


def _asked(cfg: TrainConfig, inputs: Inputs, rank: int) -> DistillConfig:
    """What recording would be told to have these states read by the server of this process."""
    servers = cfg.servers
    target = TargetConfig(
        path=cfg.target.path,
        revision=cfg.target.revision,
        dtype=cfg.target.dtype,
        runtime="vllm",
        url=servers.urls[rank % len(servers.urls)],
        states_folder=servers.states_folder,
        timeout=servers.timeout,
    )
    return DistillConfig(
        target=target,
        responses="corpus",
        records=RecordsConfig(store=["last_hidden"], features=FeatureConfig(layers=[*inputs.blueprint.layers_read])),
        batch_size=servers.at_once,
        output_dir=str(Path(cfg.output_dir) / f"rank_{rank}"),  # names the process's files in the shared folder
    )
