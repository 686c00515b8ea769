"""Logits of a DFlash or DSpark head as the speculators library computes them; run by the interpreter of
.venv-speculators.

    block_speculators_worker.py FOLDER INPUTS OUTPUTS [FOLDER INPUTS OUTPUTS ...]

INPUTS holds `ids` (T,) and `states` (T, n * d) of the target at these tokens; OUTPUTS gets, of 8 blocks of S slots, the
places `anchors` (8,) of their first token, `logits` (8, S, V_draft), and of heads that predict them `chances` (8, S).
"""

import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the library compiles its masks, for minutes
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig  # pyright: ignore[reportMissingImports]

BLOCKS = 8


@torch.no_grad()
def made(folder: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the library makes of a folder, with the true tokens before each slot."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    ids, states = given["ids"][None], given["states"][None]
    last = torch.zeros(1, ids.shape[1], config.transformer_layer_config.hidden_size)  # of the target, for its p alone
    hidden, logits, _, _, places = model._backbone_forward(
        states, ids, torch.ones(ids.shape), last, torch.zeros_like(ids), max_anchors=BLOCKS
    )
    hidden, logits = (one[0].unflatten(0, (BLOCKS, -1)) for one in (hidden, logits))
    tokens = ids[0, places].unflatten(0, (BLOCKS, -1))
    found = {"anchors": places.unflatten(0, (BLOCKS, -1))[:, 0].contiguous(), "logits": logits}
    if getattr(model, "markov_head", None) is not None:
        before = tokens if config.sample_from_anchor else torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
        found["logits"] = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        if model.confidence_head is not None:
            known = model.markov_head.prev_embeddings(before)
            read = torch.cat([hidden, known], -1) if config.confidence_head_with_markov else hidden
            found["chances"] = model.confidence_head(read)
    return {name: one.contiguous() for name, one in found.items()}


def main() -> None:
    """Every folder in turn."""
    rest = sys.argv[1:]
    for folder, inputs, outputs in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        save_file(made(folder, load_file(inputs)), outputs)


if __name__ == "__main__":
    main()
