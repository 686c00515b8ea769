"""vLLM's connector that writes hidden states to files, on a CPU; vLLM imports it by name, in another environment, so
nothing of ours is imported here.

The connector of vLLM 0.32 copies on a CUDA stream, which a CPU has not; here the states are copied and written at once.
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # pyright: ignore[reportMissingImports]
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.logger import init_logger  # pyright: ignore[reportMissingImports]

logger = init_logger(__name__)


class Written:
    """What a finished copy says in place of a CUDA event."""

    def query(self) -> bool:
        """Whether it is finished."""
        return True


class StatesOnCpu(ExampleHiddenStatesConnector):
    """The same files without a stream."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        first = torch.tensor(pending.block_ids, dtype=torch.long)[:, None] * self._block_size
        slots = (first + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        try:
            write_whole(Path(pending.filename), states.contiguous(), pending.token_ids.clone())
        except (OSError, SafetensorError) as error:
            # as the connector of GPUs: an engine that died of it would take the other texts along
            logger.error("The hidden states of %s were not written: %s", pending.filename, error)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = Written()


def write_whole(file: Path, states: torch.Tensor, ids: torch.Tensor) -> None:
    """A name that stands for a whole file, or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    try:
        save_file({"hidden_states": states, "token_ids": ids}, part)
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)
