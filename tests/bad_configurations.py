"""Command lines with a single thing wrong, drawn from a seed, and the good ones that they start from."""

import dataclasses
import random
import string
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from tests.commands import config_class, groups
from tests.tiny import save_tiny_target
from tests.train.export.saved_heads import save_head

# Texts that no key of ours accepts, by the kind of the field; Hydra reads each as the type that its look suggests.
_WRONG = {
    int: ["abc", "1.5", "true", "[1]", "{a: 1}", "'3'"],
    float: ["abc", "true", "[0.1]", "{a: 1}", "nan", "inf", "'x'"],
    bool: ["3", "maybe", "[true]", "1.0"],
    str: [],  # whatever is said is a text
    list: ["abc", "3", "{a: 1}"],
    tuple: ["abc", "3", "[1]", "{a: 1}"],
    dict: ["abc", "3", "[a]"],
}
_GARBAGE = [
    "=",
    "a",
    "=3",
    "seed=[",
    "seed={a",
    "seed='x",
    "seed=${",
    "seed=${nowhere}",
    "seed=1,2",
    "--no-such",
    "~nothing",
]
_MISSING_FILES = {
    "datastore": ["target.path={}", "data=jsonl data.path={}"],
    "distill": [
        "target.path={}",
        "data=jsonl data.path={}",
        "data=text data.path={}",
        "data=parquet data.path={}",
        "data=tasks data.path={}",
        "sampling.draft.path={}",
    ],
    "train": ["target.path={}", "records={}", "resume={}", "draft.init_from={}"],
    "decode": [
        "target.path={}",
        "draft.path={}",
        "~prompt prompt_file={}",
        "draft.path=foreign draft.settings={{draft:{}}}",
    ],
    "eval": ["target.path={}", "drafts.one={}", "prompts.file={}"],
    "export": ["target.path={}", "draft.path={}"],
    "check": ["target.path={}", "draft.path={}"],
}
_OUT_OF_RANGE = {
    "datastore": ["tokens=0", "resume=maybe", "data.heldout_share=1.5"],
    "distill": [
        "batch_size=0",
        "show=-1",
        "sampling.top_p=2",
        "records.head=0",
        "data.heldout_share=1.5",
        "data.bad_rows=1.5",
        "prompts.tokens=0",
        "target.runtime=vllm target.dtype=float64",
        "target.runtime=vllm target.vllm_python=nowhere/bin/python",
        "sampling.draft.num_draft_tokens=0",
        "sampling.draft.settings={memory:1}",
        "sampling.draft.verifier=rejection",
        "sampling.draft.path=ngram responses=corpus",
        "sampling.draft.path=ngram sampling.draft.adaptive=true target.runtime=vllm",
        "target.runtime=vllm target.tensor_parallel_size=0",
        "target.runtime=vllm target.url=host:8000 target.states_folder=states",
        "target.runtime=vllm target.url=http://127.0.0.1:9/v1",
        "target.runtime=vllm target.states_folder=states",
        "sampling.draft.path=ngram target.runtime=vllm target.url=http://127.0.0.1:9/v1 target.states_folder=states",
        "target.tensor_parallel_size=2",
        "target.runtime=openai",
        "target.runtime=openai target.url=http://127.0.0.1:9/v1",
        "target.runtime=openai target.url=http://127.0.0.1:9/v1 records.store=[full]",
        "target.runtime=openai target.url=http://127.0.0.1:9/v1 records.store=[] target.key_variable=sk-a-key",
        "target.runtime=openai target.url=http://127.0.0.1:9/v1 records.store=[] target.key_variable=NO_SUCH_VARIABLE",
        "target.runtime=openai target.url=http://127.0.0.1:9/v1 records.store=[] target.dtype=float16",
        "target.served_name=some",
        "target.quantization=fp8",
        "target.quantization=int8 target.dtype=float64",
        "target.quantization=int8 target.runtime=openai target.url=http://127.0.0.1:9/v1",
        "target.runtime=vllm target.gpu_memory_utilization=1.5",
    ],
    "train": [
        "steps=0",
        "lr=0",
        "clip=-1",
        "warmup=2",
        "batch_size=-3",
        "draft.width=0",
        "draft.heads=7",
        "draft.pruning.layers=1",
        "draft.init_from=some/draft draft.pruning.layers=0",
        "draft.init_from=some/draft draft.pruning.sparsity=1",
        "draft.init_from=some/draft draft.pruning.pattern=2:4",
        "draft.init_from=some/draft draft.pruning.sparsity=0.5 draft.lora.rank=4",
        "draft=medusa +draft.pruning.layers=1",
        "draft.window=0",
        "draft.window=64 draft.sinks=-1",
        "draft.sinks=0",
        "draft.window=64 draft.max_positions=32",
        "draft.window=1000000",
        "draft=medusa +draft.window=64",
        "draft=exit_adapter",
        "draft=exit_adapter draft.head.taps=[0]",
        "draft=exit_adapter draft.head.taps=[1] +draft.head.depth=3",
        "betas=[2,0]",
    ],
    "decode": [
        "target.quantization=int3",
        "target.quantization=int8 target.dtype=float64",
        "draft.path=ngram draft.quantization=int8",
        "decode.temperature=-1",
        "decode.top_p=0",
        "decode.num_draft_tokens=0",
        "decode.min_p=2",
        "decode.top_k=-1",
        "decode.temperature=1e-40",
        "decode.tree_nodes=0",
        "decode.tree=3x0",
        "decode.tree=auto",
        "decode.tree=99x99x99",
        "decode.adaptive=true decode.num_draft_tokens=0",
        "decode.confidence=true",
        "decode.adaptive=true decode.confidence=true decode.tree=2x2",
        "decode.strict=true decode.tree=2x2",
        "draft.path=null decode.overlap=true",
        "draft.path=ngram decode.overlap=true",
        "decode.overlap=true decode.tree=2x2",
        "decode.overlap=true decode.adaptive=true",
        "draft.path=null draft.device=cpu",
        "draft.path=ngram draft.device=cpu",
        "draft.device=nowhere",
        "draft.device=cuda:99",
        "decode.repetition_penalty=0",
        "decode.presence_penalty=3",
        "decode.frequency_penalty=-2.5",
        "decode.logit_bias={100000:1}",
        "decode.banned_words=['']",
        "decode.banned_words=[-1]",
        "decode.grammar=no/such/schema.json",
        "decode.grammar=README.md",
        "draft.path=foreign",
        "draft.path=foreign draft.settings={draft:ngram}",
        "draft.path=foreign draft.settings={draft:some/draft,by:text}",
        "draft.path=jacobi draft.settings={window:0}",
        "draft.path=jacobi draft.settings={window:600}",
        "draft.path=jacobi draft.settings={ngram:1}",
        "draft.path=jacobi draft.settings={pool:0}",
        "draft.path=jacobi decode.strict=true",
        "draft.path=cascade draft.settings={draft:some/draft,helper:jacobi}",
        "draft.path=early_exit",
        "draft.path=early_exit draft.settings={exit_layer:0}",
        "draft.path=early_exit draft.settings={exit_layer:1} decode.tree=2x2",
    ],
    "eval": [
        "temperatures=[]",
        "temperatures=[1,1]",
        "temperatures=[1e-30]",
        "timing.rounds=0",
        "timing.watts=0",
        "decode.max_new_tokens=0",
        "decode.presence_penalty=3",
        "decode.repetition_penalty=1.2",
        "decode.banned_words=[nonsense]",
        "decode.grammar=no/such/schema.json",
        "prompts.tokens=0",
        "mode=drafters drafters.texts=[]",
        "mode=drafters drafters.texts=[own]",
        "mode=drafters drafters.draft_lengths=[0]",
        "mode=drafters +drafters.arms.one={draft:ngram,settings:{memory:-1}}",
        "mode=drafters +drafters.arms.one={draft:no/such/draft}",
        "mode=drafters +drafters.arms.one={num_draft_tokens:3}",
        "mode=drafters drafters.tasks_target=no/such/target",
    ],
    "export": ["num_draft_tokens=0", "num_draft_tokens=9", "format=tgi dtype=float8"],
    "check": ["tokens=-1", "prompts=0"],
}


def leaves(cls: type, where: str = "") -> list[tuple[str, Any]]:
    """(dotted path, annotation) of every field of `cls` that is no dataclass itself."""
    found = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = f"{where}.{field.name}" if where else field.name
        nested = [arm for arm in _arms(hints[field.name]) if dataclasses.is_dataclass(arm)]
        found += leaves(typing.cast(type, nested[0]), path) if nested else [(path, hints[field.name])]
    return found


def tiny_training(folder: Path) -> list[str]:
    """A training run of a second on a few short texts, which are written into `folder`."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"The {number}th of the texts says little, and says it again. " * 20)
    shape = ["draft.width=32", "draft.heads=2", "sequence_length=32", "batch_size=2", "steps=2", "validation_rows=2"]
    source = ["data=text", f"data.path={texts}", "data.validation_share=0.3", "tokenizer.train_entries=270"]
    return [*source, *shape, "objective=cross_entropy", f"output_dir={folder / 'out'}"]


def good_commands(folder: Path) -> dict[str, list[str]]:
    """Overrides for each stage that would run as they are, with the files that they name."""
    training = tiny_training(folder)
    save_tiny_target(folder / "target")
    save_head(folder / "head", folder / "target", "medusa")
    models = [f"target.path={folder / 'target'}", f"output_dir={folder / 'out'}"]
    text = ["data=text", f"data.path={folder / 'texts'}", "data.heldout_share=0.5"]
    return {
        "distill": [*models, *text],
        "datastore": [*models, *text],
        "train": training,
        "decode": [*models, f"draft.path={folder / 'target'}", "prompt=text"],
        "eval": [*models, *text, f"drafts.one={folder / 'target'}"],
        "export": [*models, f"draft.path={folder / 'head'}", "format=vllm"],
        "check": [models[0], f"draft.path={folder / 'target'}", "tokens=0"],
    }


def bad_arguments(stage: str, rng: random.Random, folder: Path) -> list[str]:
    """One mistake of a random kind, to add to a good command; files that it names lie in `folder` or are missing."""
    kinds = (_unknown_key, _wrong_type, _unknown_option, _garbage, _out_of_range, _missing_file, _occupied_folder)
    return rng.choice(kinds)(stage, rng, folder)


def _unknown_key(stage: str, rng: random.Random, folder: Path) -> list[str]:
    path, _ = rng.choice([leaf for leaf in leaves(config_class(stage)) if get_origin(leaf[1]) is not dict])
    extra = rng.choice(string.ascii_lowercase) + rng.choice(string.digits)
    return [f"{rng.choice(['', '+', '++'])}{path}{extra}={rng.choice(['1', 'x', '[1]', 'null'])}"]


def _wrong_type(stage: str, rng: random.Random, folder: Path) -> list[str]:
    path, wrong = rng.choice([(path, wrong) for path, kind in leaves(config_class(stage)) if (wrong := _refused(kind))])
    return [f"{path}={rng.choice(wrong)}"]


def _refused(kind: Any) -> list[str]:
    """Texts that no field of this kind takes."""
    arms = [get_origin(arm) or arm for arm in _arms(kind)]
    if Literal in arms:
        return ["nonsense", "77", "[a]"]
    refused_by_all = sorted(set.intersection(*(set(_WRONG[arm]) for arm in arms if arm is not NoneType)))
    return refused_by_all if NoneType in arms or str in arms else [*refused_by_all, "null"]


def _unknown_option(stage: str, rng: random.Random, folder: Path) -> list[str]:
    return [f"{rng.choice(['', '+'])}{rng.choice(groups(stage))}=no_such_option"]


def _garbage(stage: str, rng: random.Random, folder: Path) -> list[str]:
    return [rng.choice(_GARBAGE)]


def _out_of_range(stage: str, rng: random.Random, folder: Path) -> list[str]:
    return rng.choice(_OUT_OF_RANGE[stage]).split()


def _missing_file(stage: str, rng: random.Random, folder: Path) -> list[str]:
    return rng.choice(_MISSING_FILES[stage]).format(folder / "missing").split()


def _occupied_folder(stage: str, rng: random.Random, folder: Path) -> list[str]:
    taken = folder / "taken"
    taken.mkdir(exist_ok=True)
    (taken / "mine.txt").write_text("somebody's work")
    return [f"output_dir={taken}", *rng.choice([[], ["resume=auto"]])]


def _arms(kind: Any) -> tuple:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
