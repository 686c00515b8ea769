"""Scores of LiLiCorr's lattice as vLLM's own class gives them; run by the interpreter of .venv-vllm.

    lilicorr_worker.py FOLDER INPUTS OUTPUTS

FOLDER is an export; INPUTS holds what the lattice is given, by the names of its `score`; OUTPUTS gets the scores
`first` (B, k) of the first slot and `pairs` (B, N - 1, k, k) of the others.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.distributed import (  # pyright: ignore[reportMissingImports]
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import set_forward_context  # pyright: ignore[reportMissingImports]


@torch.no_grad()
def made(folder: Path, given: dict[str, torch.Tensor], config: VllmConfig) -> dict[str, torch.Tensor]:
    """Of the folder's lattice, whose every parameter was filled."""
    from vllm.model_executor.models.lilicorr import LiLiCorrHead  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models.utils import AutoWeightsLoader  # pyright: ignore[reportMissingImports]

    told = json.loads((folder / "config.json").read_text())
    head = LiLiCorrHead(
        vllm_config=config, model_hidden_size=told["hidden_size"], block_size=told["block_size"],
        rms_norm_eps=told["rms_norm_eps"], config=told["dflash_config"],
    )  # fmt: skip
    weights = load_file(next(folder.glob("*.safetensors")))
    own = {name.removeprefix("lilicorr."): one for name, one in weights.items() if name.startswith("lilicorr.")}
    filled = AutoWeightsLoader(head).load_weights(own.items())
    assert {*filled} == {*own} == {name for name, _ in head.named_parameters()}
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    for one in head.modules():
        if getattr(one, "quant_method", None) is not None:
            one.quant_method.process_weights_after_loading(one)
    given["anchor_valid"] = given["anchor_valid"].bool()
    with set_forward_context(None, config):
        first, pairs = head.score(**given)
    scale = told["dflash_config"]["lilicorr_logit_scale"]
    return {"first": scale * first, "pairs": scale * pairs}


def main() -> None:
    """One folder."""
    folder, inputs, outputs = sys.argv[1:]
    config = VllmConfig(compilation_config=CompilationConfig(mode=0))
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{outputs}.group", 0, "gloo")
        initialize_model_parallel(1, 1)
        save_file(made(Path(folder), load_file(inputs), config), outputs)


if __name__ == "__main__":
    main()
