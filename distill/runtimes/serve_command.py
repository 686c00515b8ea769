"""The command that starts a vLLM server which gives the hidden states that a run needs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.runtimes.served_runtime import ServedRuntime


def serve_command(runtime: ServedRuntime, layers: Sequence[int]) -> str:
    """On GPUs; a CPU's names another connector (docs/how-to/record_a_target.md)."""
    longest = runtime.longest + 1  # a token behind each text
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(runtime.states_folder)},
    }
    words = ["vllm", "serve", runtime.target.path, "--dtype", runtime.dtype, "--max-model-len", str(longest)]
    words += ["--no-enable-prefix-caching", "--generation-config", "vllm"]
    words += ["--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)]
    is_over = longest > runtime.target.max_positions
    return ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 " if is_over else "") + shlex.join(words)
