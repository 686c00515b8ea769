"""vLLM's connector that writes hidden states to files, on a CPU; vLLM imports it by name, in another environment, so
nothing of ours is imported here.

The connector of vLLM 0.32 copies on a CUDA stream, which a CPU has not; here the states are copied and written at once.
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # pyright: ignore[reportMissingImports]
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


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
        file = Path(pending.filename)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")  # a name that stands for a whole file
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}, part)
        part.rename(file)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = Written()
