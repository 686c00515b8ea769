"""What a user sets about models, drafters and the terminal stage; imports nothing heavy, so bad values fail at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from decode.common.typed_config import require
from decode.drafters.beside.refusals import check_device, check_overlap, presumed_family
from decode.drafters.untrained.config import UNTRAINED, check_strict, check_tree, settings_of
from decode.sampling.config import SamplingConfig

Precision = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Scheme = Literal["int8", "int4", "int8_dynamic"]
"""How torchao quantises a model's linear layers as it is loaded (`decode.models.quantisation.torchao_schemes`)."""


def require_scheme(scheme: object, where: str, instead: str) -> None:
    """Raise ConfigError for a word that is no scheme."""
    schemes = get_args(Scheme)
    require(scheme in schemes, f"{where}={scheme!r} is no scheme; use one of {', '.join(schemes)}, or {instead}")


def model_folder(path: str) -> str:
    """`path`; or what it holds in place of a config.json: `model/`, where it is the folder of a training run, or a GGUF
    file, if there is one alone."""
    folder = Path(path)
    if (folder / "config.json").is_file():
        return path
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    files = [*folder.glob("*.gguf")]
    return str(files[0]) if len(files) == 1 else path


@dataclass
class ModelConfig:
    """Where a causal language model lies and how it is loaded."""

    path: str | None = None
    """Folder in transformers format, that of the run that trained the model, GGUF file, or hub id."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); None is the default branch."""
    dtype: Precision = "auto"
    """Precision of the weights; auto is what the checkpoint was saved in."""
    quantization: Scheme | None = None
    """Quantises the linear layers as they are loaded: int8 and int4 the weights alone, int8_dynamic weights and
    activations, with a scale for each token; None leaves them as they are. A checkpoint that is quantised already needs
    no word."""
    device: str = "auto"
    """torch device; auto is CUDA where there is one, else the CPU."""
    device_map: str | None = None
    """accelerate's device map ("auto" spreads a model that one card cannot hold)."""
    attn_implementation: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention kernel: auto is sdpa where the model has it; flash attention takes no masks and is refused."""
    trust_remote_code: bool = False
    """Run code that a hub repository ships; off unless asked for."""
    allow_missing: bool = False
    """Load a checkpoint whose tensors are not those of config.json: missing ones are random, extra ones dropped."""

    def __post_init__(self) -> None:
        self.path = None if self.path is None else model_folder(self.path)


@dataclass
class DrafterConfig:
    """Which drafter proposes tokens (group `draft` of the decode stage)."""

    path: str | None = None
    """Folder of a saved draft, or the name of a drafter without training (ngram, edit, retrieval, jacobi,
    early_exit, cascade, mixture, foreign); None decodes without one."""
    dtype: Precision = "auto"
    """Precision of the draft's weights; auto is the target's."""
    device: str | None = None
    """torch device of a draft language model; None is the target's."""
    quantization: Scheme | None = None
    """Quantises the linear layers of a saved draft as it is loaded: int8, int4 or int8_dynamic, as target.quantization;
    None leaves them as they are."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of a drafter that is named; see its file in conf/draft."""

    def __post_init__(self) -> None:
        settings_of(self.path, self.settings)
        require(
            self.quantization is None or self.path not in (None, *UNTRAINED),
            f"draft.quantization={self.quantization} rounds the weights of a saved draft, and draft.path={self.path} "
            "has none. Leave it out",
        )

    @property
    def loading(self) -> dict[str, Any]:
        """Keywords of `load_drafter` besides path, target and dtype."""
        return self.settings if self.quantization is None else {"quantization": self.quantization}


@dataclass(kw_only=True)
class ChatConfig:
    """How the target's chat template writes chats (group `data`)."""

    template: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template: {enable_thinking: false}; one that it never reads is refused."""
    date: str | None = None
    """Day that a chat template which writes the date is told, as 2026-08-01; None is the day on which the run began,
    in decode today."""

    def __post_init__(self) -> None:
        require(
            self.date is None or _is_day(self.date),
            f"data.date={self.date} is not a day; write it as 2026-08-01",
        )


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass
class DecodeConfig:
    """`python -m decode`: stream one completion, draft tokens coloured by their fate."""

    target: ModelConfig = field(default_factory=ModelConfig)
    """The model whose output must not change."""
    draft: DrafterConfig = field(default_factory=DrafterConfig)
    """What proposes tokens."""
    decode: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling and verification."""
    prompt: str | None = None
    """The prompt itself, for short plain text."""
    prompt_file: str | None = None
    """File holding the prompt; `-` reads standard input."""
    chat: bool = False
    """Wrap the prompt as one user turn in the tokenizer's chat template."""
    data: ChatConfig = field(default_factory=ChatConfig)
    """chat=true only: what the chat template is told, in the words of the stages that read a corpus."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end the completion once they appear."""
    color: Literal["auto", "always", "never"] = "auto"
    """Colours on the terminal; auto looks whether standard output is one."""
    output_dir: str | None = None
    """Where to keep the completion and its statistics; None prints only."""
    resume: str = "never"
    """never: refuse an existing output_dir; auto: return when it is finished."""
    seed: int = 0
    """Seed of the noise."""
    plan: bool = False
    """Print what would run, and exit."""

    def __post_init__(self) -> None:
        require(
            (self.prompt is None) != (self.prompt_file is None),
            f"give exactly one of prompt= and prompt_file=; got prompt={self.prompt!r}, "
            f"prompt_file={self.prompt_file!r}. "
            "Use prompt_file=- to read standard input",
        )
        require(
            self.chat or self.data == ChatConfig(),
            f"data.template={self.data.template} and data.date={self.data.date} are for the chat template, and "
            "chat=false; set chat=true, or leave them out",
        )
        check_overlap(presumed_family(self.draft.path), self.decode.overlap, "decode.overlap")
        check_device(presumed_family(self.draft.path), self.draft.device, "draft.device")
        check_tree(self.draft.path, self.decode.tree, "decode.tree")
        check_strict(self.draft.path, self.draft.settings, self.decode.strict, "decode.strict")
        require("" not in self.stop_strings, f"stop_strings={self.stop_strings} holds an empty text, found everywhere")
