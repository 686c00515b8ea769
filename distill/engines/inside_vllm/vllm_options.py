"""How vLLM is told to leave hidden states: read in its environment and in ours, so nothing is imported here."""

from typing import Any


def leaving_states(layers: list[int], folder: str, *, on_cpu: bool) -> dict[str, Any]:
    """Options of an engine that writes the states of every request to `folder`; layer i is the output of layer i - 1,
    0 the embeddings, and the last one's is not normed."""
    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if on_cpu:
        connector = {"kv_connector": "StatesOnCpu", "kv_connector_module_path": "vllm_states"}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": connector
        | {"kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": folder}},
    }
