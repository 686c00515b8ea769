"""Which check finds which of the faults that vLLM's tests do, and faults that no engine here can be asked about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.engines.faults import Fault, config, left_out, replaced, setting, unset


def at_the_top(**values: Any) -> Callable[[Path], None]:
    """config.json says so where engines read it, and in transformer_layer_config as before; None is not at all."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        fields = json.loads(path.read_text()) | values
        path.write_text(
            json.dumps({name: one for name, one in fields.items() if one is not None or name not in values})
        )

    return damage


MORE: list[tuple[Fault, str]] = [
    (Fault("num_aux_hidden_states left out", "eagle3", unset("num_aux_hidden_states"), "unseen"), "keys"),
    (Fault("one state too few", "eagle3", setting(num_aux_hidden_states=2), "refuses"), "states"),
    (Fault("a shorter context", "eagle3", setting(max_position_embeddings=128), "unseen"), "sizes"),
    (Fault("tied", "eagle3", setting(tie_word_embeddings=True), "unseen"), "keys"),
    (Fault("rope said twice, and differently", "eagle3", setting(rope_theta=5e5), "unseen"), "rope"),
    (Fault("a second layer", "eagle3", setting(num_hidden_layers=2), "counters"), "names"),
    (Fault("biases of attention", "eagle3", setting(attention_bias=True), "counters"), "names"),
    (Fault("biases of the MLP", "eagle3", setting(mlp_bias=True), "counters"), "names"),
    (Fault("Qwen3's layer", "eagle3", setting(architectures=["Eagle3Qwen3ForCausalLM"]), "counters"), "names"),
    (Fault("states not used", "eagle3",
           config(lambda one: one.get("eagle_config", {}).update(use_aux_hidden_state=False)), "counters"), "keys"),
    (Fault("epsilon at the top alone", "eagle3", at_the_top(rms_norm_eps=1e-5), "counters"), "keys"),
    (Fault("no rope at the top", "eagle3", at_the_top(rope_theta=None, rope_parameters=None), "counters"), "keys"),
    (Fault("no sizes at the top", "eagle3", at_the_top(intermediate_size=None), "refuses"), "names"),
    (Fault("a mask of other tokens", "eagle3", replaced("t2d", lambda one: one.roll(1)), "unseen"), "tokens"),
    (Fault("ids in floating point", "eagle3", replaced("d2t", torch.Tensor.float), "unseen"), "types"),
    (Fault("one matrix in half precision", "eagle3", replaced("^fc", torch.Tensor.bfloat16), "unseen"), "types"),
    (Fault("a matrix of zeros", "eagle3", replaced("^fc", torch.zeros_like), "counters"), "values"),
    (Fault("another vocabulary", "eagle3", setting(vocab_size=320), "refuses"), "vocabulary"),
    (Fault("another target's width", "eagle3", setting(target_hidden_size=48), "refuses"), "states"),
    (Fault("another target's vocabulary", "medusa", setting(vocab_size=320), "refuses"), "vocabulary"),
    (Fault("slot 0 drafts", "dflash", config(lambda one: one["dflash_config"].update(sample_from_anchor=True)),
           "counters"), "keys"),
    (Fault("biases of attention", "dflash", setting(attention_bias=True), "counters"), "names"),
    (Fault("states not used", "dflash",
           config(lambda one: one.get("dflash_config", {}).update(use_aux_hidden_state=False)), "counters"), "keys"),
    (Fault("causal in one place", "dflash", setting(is_causal=True), "counters"), "keys"),
    (Fault("a block that drafts nothing", "dflash", setting(block_size=1), "counters"), "keys"),
    (Fault("no mask", "dflash", config(lambda one: [
        one.pop("mask_token_id", None), one["dflash_config"].pop("mask_token_id")]), "refuses"), "mask"),
    (Fault("another mask's token", "dflash",
           config(lambda one: one["dflash_config"].update(mask_token_id=5)), "refuses"), "mask"),
    (Fault("two sizes of blocks", "dflash", setting(block_size=9), "unseen"), "keys"),
    (Fault("another number of layers", "dflash", setting(num_target_layers=9), "unseen"), "keys"),
    (Fault("sample_from_anchor left out", "dspark", unset("sample_from_anchor"), "unseen"), "keys"),
    (Fault("a bias of another rank", "dspark", setting(markov_rank=3), "unseen"), "names"),
    (Fault("no row for the mask", "dspark", setting(mask_token_id=999, dflash_config={}), "unseen"), "mask"),
    (Fault("a bias with gates", "dspark", setting(markov_head_type="gated"), "unseen"), "keys"),
    (Fault("rope said twice, and differently", "lm", setting(rope_theta=5e5), "unseen"), "rope"),
    (Fault("a width of none", "lm", setting(hidden_size=33), "refuses"), "names"),
    (Fault("no bias", "dspark", left_out("markov"), "unseen"), "names"),
]  # fmt: skip
BY: dict[tuple[str, str], str] = {(one.family, one.name): check for one, check in MORE} | {
    ("eagle3", "d2t left out"): "vocabulary",
    ("eagle3", "d2t of absolute ids"): "tokens",
    ("eagle3", "d2t out of order"): "tokens",
    ("eagle3", "a random embedding"): "rows",
    ("eagle3", "norm_before_residual"): "logits",
    ("eagle3", "another rope"): "rope",
    ("eagle3", "hidden states one layer early"): "states",
    ("eagle3", "hidden states not named"): "states",
    ("eagle3", "SGLang's layers as the others'"): "states",
    ("eagle3", "target_hidden_size null"): "keys",
    ("eagle3", "a stray tensor"): "names",
    ("eagle3", "names with a prefix"): "names",
    ("eagle3", "fc left out"): "names",
    ("eagle3", "a projection left out"): "names",
    ("eagle3", "the output head left out"): "head",
    ("eagle3", "the output head's rows moved"): "rows",
    ("eagle3", "states before embeddings"): "logits",
    ("eagle3", "hidden states backwards"): "logits",
    ("eagle3", "norm_output left out"): "logits",
    ("eagle3", "fc_norm left out"): "names",
    ("eagle3", "draft_vocab_size left out"): "keys",
    ("eagle3", "another epsilon"): "sizes",
    ("eagle3", "not a number"): "values",
    ("eagle3", "no end of text"): "tokens",
    ("medusa", "medusa_fc_bias left out"): "keys",
    ("medusa", "token_map left out"): "vocabulary",
    ("medusa", "token_map out of order"): "tokens",
    ("medusa", "heads swapped"): "logits",
    ("medusa", "a head left out"): "names",
    ("medusa", "the output head's rows moved"): "rows",
    ("medusa", "the target's layers counted"): "keys",
    ("medusa", "original_lm_head left out"): "names",
    ("medusa", "a stray tensor"): "names",
    ("dflash", "hidden states one layer late"): "states",
    ("dflash", "the mask left out"): "logits",
    ("dflash", "another rope"): "rope",
    ("dflash", "causal"): "logits",
    ("dflash", "fc left out"): "names",
    ("dflash", "norms of queries left out"): "names",
    ("dflash", "a stray tensor"): "names",
    ("lm", "another vocabulary"): "vocabulary",
    ("lm", "another rope"): "keys",
    ("lm", "untied by mistake"): "keys",
    ("lm", "a projection left out"): "names",
}
"""Family and fault -> the check."""
