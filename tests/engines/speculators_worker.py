"""Logits of a head as the speculators library computes them; run by the interpreter of .venv-speculators.

    speculators_worker.py STEPS FOLDER INPUTS OUTPUTS [FOLDER INPUTS OUTPUTS ...]

INPUTS holds `ids` (T,) and `states` (T, n * d) of the target before them; OUTPUTS gets `logits` (STEPS, T, V_draft).
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig  # pyright: ignore[reportMissingImports]


@torch.no_grad()
def logits(folder: str, given: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """Of `steps` steps, each with the true tokens."""
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config).eval()
    made: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: made.append(out[0]))
    ids = given["ids"][None]
    model(given["states"][None], ids, torch.zeros_like(ids), ttt_steps=steps)
    return torch.stack(made)


def main() -> None:
    """Every folder in turn."""
    steps, *rest = sys.argv[1:]
    for folder, inputs, outputs in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        save_file({"logits": logits(folder, load_file(inputs), int(steps))}, outputs)


if __name__ == "__main__":
    main()
