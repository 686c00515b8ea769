"""What goes wrong between a trained draft and an engine, done once to a folder that was exported rightly.

Heads are those of a reduced vocabulary, EAGLE-3 with the norms of EAGLE-3.1; nothing here imports an engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Fields = dict[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """One of them."""

    name: str
    family: str
    damage: Callable[[Path], None]
    """Of an exported folder, in place."""
    in_vllm: Literal["counters", "refuses", "unseen"]
    """counters: vLLM says nothing, and accepts other numbers of tokens; refuses: it does not start, or breaks; unseen:
    it drafts as before, and another engine, or another text, would not."""


def edit_config(change: Callable[[Fields], object], folder: Path) -> None:
    """Change the fields of config.json, and those of the layer in it where it nests them."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    change(fields)
    if "transformer_layer_config" in fields:
        change(fields["transformer_layer_config"])
    path.write_text(json.dumps(fields))


def edit_tensors(change: Callable[[Tensors], object], folder: Path) -> None:
    """Change the weights."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, path, metadata={"format": "pt"})


def config(change: Callable[[Fields], object]) -> Callable[[Path], None]:
    return partial(edit_config, change)


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    return partial(edit_tensors, change)


def setting(**values: Any) -> Callable[[Path], None]:
    """config.json says this."""
    return config(lambda fields: fields.update(values))


def unset(*names: str) -> Callable[[Path], None]:
    """config.json does not say these."""
    return config(lambda fields: [fields.pop(name, None) for name in names])


def left_out(pattern: str) -> Callable[[Path], None]:
    """No tensor has a name in which this is found."""

    def change(found: Tensors) -> None:
        names = [name for name in found if re.search(pattern, name)]
        assert names, pattern
        for name in names:
            del found[name]

    return tensors(change)


def replaced(pattern: str, new: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Tensors in whose names this is found are others."""

    def change(found: Tensors) -> None:
        names = [name for name in found if re.search(pattern, name)]
        assert names, pattern
        found.update({name: new(found[name]) for name in names})

    return tensors(change)


def renamed(pattern: str, replacement: Callable[[re.Match[str]], str]) -> Callable[[Path], None]:
    """Tensors are called otherwise."""

    def change(found: Tensors) -> None:
        both = {re.sub(pattern, replacement, name, count=1): one for name, one in found.items()}
        assert both.keys() != found.keys() or any(both[name] is not one for name, one in found.items()), pattern
        found.clear()
        found.update(both)

    return tensors(change)


def another_rope(fields: Fields) -> None:
    """In both places."""
    fields["rope_theta"] = 1e6
    fields["rope_parameters"] = {**(fields.get("rope_parameters") or {}), "rope_theta": 1e6}


def random(found: Tensor) -> Tensor:
    """As a freshly built model has it."""
    return torch.randn(found.shape, generator=torch.Generator().manual_seed(0)).to(found.dtype) * 0.05


def halves_swapped(found: Tensor) -> Tensor:
    """Columns of the second half first."""
    return torch.cat(found.chunk(2, -1)[::-1], -1)


def states_backwards(found: Tensor) -> Tensor:
    """Columns of three hidden states, the last one's first."""
    return torch.cat(found.chunk(3, -1)[::-1], -1)


def absolute_ids(found: Tensor) -> Tensor:
    """Ids in place of what is to be added to a draft id."""
    return found + torch.arange(len(found))


def rolled(found: Tensor) -> Tensor:
    """Rows of the token before."""
    return found.roll(1, 0)


def broken(found: Tensor) -> Tensor:
    """One number is none."""
    damaged = found.clone()
    damaged.view(-1)[0] = torch.nan
    return damaged


def moved_taps(by: int, fields: Fields) -> None:
    """The hidden states of layers further on, in every list."""
    for where in (fields, fields.get("eagle_config"), fields.get("dflash_config")):
        for name in ("eagle_aux_hidden_state_layer_ids", "target_layer_ids"):
            if where and name in where:
                where[name] = [layer + by for layer in where[name]]


def without_taps(fields: Fields) -> None:
    """No list says which hidden states are read."""
    fields.pop("eagle_aux_hidden_state_layer_ids", None)
    fields.get("eagle_config", {}).pop("eagle_aux_hidden_state_layer_ids", None)


def same_taps(fields: Fields) -> None:
    """SGLang's list, to which it adds one, holds what the others read as it stands."""
    if "eagle_config" in fields:
        own = fields["eagle_aux_hidden_state_layer_ids"]
        fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(own)


def without_end(folder: Path) -> None:
    """The draft vocabulary lacks its first token, the end of text."""

    def change(found: Tensors) -> None:
        ids = absolute_ids(found["d2t"])[1:]
        found["t2d"][found["d2t"][0]] = False
        found["d2t"] = ids - torch.arange(len(ids))
        found["lm_head.weight"] = found["lm_head.weight"][1:]

    edit_tensors(change, folder)
    edit_config(
        lambda fields: "draft_vocab_size" in fields and fields.update(draft_vocab_size=fields["draft_vocab_size"] - 1),
        folder,
    )


def without_mask(folder: Path) -> None:
    """The file of the learned mask is not there."""
    (folder / "mask_embedding.pt").unlink()


def causal(fields: Fields) -> None:
    """Slots of a block see those before them alone."""
    if "dflash_config" in fields:
        fields["dflash_config"]["causal"] = fields["is_causal"] = True


def heads_swapped(match: re.Match[str]) -> str:
    """The first head and the second."""
    return match[1] + {"0": "1", "1": "0"}.get(match[2], match[2]) + "."


def stray(found: Tensors) -> None:
    """A tensor of the target's."""
    found["verifier_norm.weight"] = torch.ones(64)


FAULTS = [
    Fault("d2t left out", "eagle3", left_out("d2t"), "counters"),
    Fault("d2t of absolute ids", "eagle3", replaced("d2t", absolute_ids), "refuses"),
    Fault("d2t out of order", "eagle3", replaced("d2t", lambda found: found.flip(0)), "counters"),
    Fault("a random embedding", "eagle3", replaced("embed_tokens", random), "counters"),
    Fault("norm_before_residual", "eagle3", setting(norm_before_residual=True), "counters"),
    Fault("another rope", "eagle3", config(another_rope), "counters"),
    Fault("hidden states one layer early", "eagle3", config(partial(moved_taps, -1)), "counters"),
    Fault("hidden states not named", "eagle3", config(without_taps), "counters"),
    Fault("SGLang's layers as the others'", "eagle3", config(same_taps), "unseen"),
    Fault("target_hidden_size null", "eagle3", setting(target_hidden_size=None), "refuses"),
    Fault("a stray tensor", "eagle3", tensors(stray), "refuses"),
    Fault("names with a prefix", "eagle3", renamed("^(layers|fc|norm)", lambda match: f"model.{match[0]}"), "refuses"),
    Fault("fc left out", "eagle3", left_out("^fc.weight"), "counters"),
    Fault("a projection left out", "eagle3", left_out("down_proj"), "counters"),
    Fault("the output head left out", "eagle3", left_out("lm_head"), "counters"),
    Fault("the output head's rows moved", "eagle3", replaced("lm_head", rolled), "counters"),
    Fault("states before embeddings", "eagle3", replaced("[qkv]_proj", halves_swapped), "counters"),
    Fault("hidden states backwards", "eagle3", replaced("^fc.weight", states_backwards), "counters"),
    Fault("norm_output left out", "eagle3", unset("norm_output"), "counters"),
    Fault("fc_norm left out", "eagle3", unset("fc_norm"), "refuses"),
    Fault("draft_vocab_size left out", "eagle3", unset("draft_vocab_size"), "refuses"),
    Fault("another epsilon", "eagle3", setting(rms_norm_eps=0.3), "counters"),
    Fault("not a number", "eagle3", replaced("^fc.weight", broken), "counters"),
    Fault("no end of text", "eagle3", without_end, "unseen"),
    Fault("medusa_fc_bias left out", "medusa", unset("medusa_fc_bias"), "counters"),
    Fault("token_map left out", "medusa", left_out("token_map"), "refuses"),
    Fault("token_map out of order", "medusa", replaced("token_map", lambda found: found.flip(0)), "counters"),
    Fault("heads swapped", "medusa", renamed(r"^(blocks\.|)(\d+)\.", heads_swapped), "counters"),
    Fault("a head left out", "medusa", left_out(r"^(blocks\.)?1\."), "counters"),
    Fault("the output head's rows moved", "medusa", replaced("lm_head", rolled), "counters"),
    Fault("the target's layers counted", "medusa", setting(num_target_layers=8), "counters"),
    Fault("original_lm_head left out", "medusa", unset("original_lm_head"), "refuses"),
    Fault("a stray tensor", "medusa", tensors(stray), "unseen"),
    Fault("hidden states one layer late", "dflash", config(partial(moved_taps, 1)), "counters"),
    Fault("the mask left out", "dflash", without_mask, "counters"),
    Fault("another rope", "dflash", config(another_rope), "counters"),
    Fault("causal", "dflash", config(causal), "counters"),
    Fault("fc left out", "dflash", left_out("^fc.weight"), "counters"),
    Fault("norms of queries left out", "dflash", left_out("q_norm"), "counters"),
    Fault("a stray tensor", "dflash", tensors(stray), "refuses"),
    Fault("another vocabulary", "lm", setting(vocab_size=320), "refuses"),
    Fault("another rope", "lm", config(another_rope), "counters"),
    Fault("untied by mistake", "lm", setting(tie_word_embeddings=False), "counters"),
    Fault("a projection left out", "lm", left_out("down_proj"), "counters"),
]
