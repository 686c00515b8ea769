"""What is trained: the cases, the targets and the untrained drafts that their arms share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LM = ("draft=lm", "target_source=live", "optimizer=adamw", "lr=0.001", "batch_size=2")
EAGLE3 = ("draft=eagle3", "target_source=live", "optimizer=adamw", "lr=0.001", "batch_size=1", "sequence_length=1024")
CHATS = ("data=jsonl", "data.learn_prompt=false", "data.validation_share=0.05")
TOY = ("data=python_stdlib", "data.max_documents=100", "batch_size=2")
CASES = {
    "draft LM, 49,152 tokens": (*LM, "steps=16"),
    "draft LM, 4,096 tokens, toy width": (*LM, *TOY, "steps=40"),
    "draft LM, 151,936 tokens, toy width": (*LM, *TOY, "steps=8"),
    "EAGLE-3, 49,152 tokens": (*EAGLE3, "draft.head.depth=3", "draft.head.vocab=8192", "steps=16"),
}
"""Case -> the settings of its arms."""


def given_to(case: str, target: str, chats: str, output: Path, seed: int) -> list[str]:
    """The settings that all arms of a case share."""
    texts = [*CHATS, f"data.path={chats}"]
    if case.endswith("toy width"):
        target, texts = str(toy_target(int(case.split()[2].replace(",", "")), target, output)), []
    found = [f"target.path={target}", *texts, *CASES[case], f"seed={seed}"]
    if case.startswith("draft LM"):
        found += [f"draft.init_from={untrained(target, output / 'begins' / case.split()[2], seed)}"]
    return found


def by_own_choice(given: list[str]) -> list[str]:
    """Of such settings those that say what is trained: weights to begin with, optimizer and rates are then our own."""
    found = [one for one in given if not one.startswith(("draft.init_from=", "optimizer=", "lr="))]
    return found if "draft=eagle3" in found else [*found, "draft.width=256", "draft.heads=4", "draft.mlp_width=768"]


def toy_target(vocab: int, like: str, output: Path) -> Path:
    """A target of random weights over so many tokens; its tokenizer is that of `like`, or one of 4,096 tokens."""
    from transformers import AutoTokenizer

    from distill.corpora.config import DataConfig
    from distill.corpora.configured import load_corpus
    from distill.prompts.tokenizer import train_bpe

    folder = output / f"target_{vocab}"
    if not folder.is_dir():
        known = AutoTokenizer.from_pretrained(like)
        if len(known) > vocab:
            corpus = load_corpus(DataConfig(name="python_stdlib", max_documents=100))
            known = train_bpe((one.text or "" for one in corpus.documents("train")), vocab)
        model(vocab, 256, 4, seed=0).save_pretrained(folder)
        known.save_pretrained(folder)
    return folder


def untrained(target: str, folder: Path, seed: int) -> Path:
    """A draft LM of one layer and random weights, over the target's tokens."""
    from transformers import AutoConfig, AutoTokenizer

    path = folder.with_name(f"{folder.name}_{seed}")
    config = AutoConfig.from_pretrained(target)
    model(config.vocab_size, config.hidden_size // 2 // 64 * 64, 1, seed).save_pretrained(path)
    AutoTokenizer.from_pretrained(target).save_pretrained(path)
    return path


def model(vocab: int, width: int, layers: int, seed: int) -> Any:
    """A Llama of random weights with heads of 64 channels."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": width // 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, num_hidden_layers=layers, tie_word_embeddings=True, **sizes))
