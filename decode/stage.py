"""`python -m decode`: one completion on the terminal, draft tokens coloured by their fate, tokens per target pass at
the end."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.api import Output, generate
from decode.common.checked_json import write_json
from decode.common.environment import resolve_device
from decode.common.errors import InputError
from decode.common.progress import get_logger
from decode.common.run_folder import RunFolder, open_run
from decode.config import DecodeConfig, DrafterConfig
from decode.drafters.base import Drafter
from decode.drafters.beside.refusals import check_device, check_foresees, check_overlap
from decode.drafters.saved_draft import describe_draft, load_drafter
from decode.models.chat_template import REFUSALS, settled
from decode.models.compatibility import load_tokenizer
from decode.models.describe import describe_model
from decode.models.load import load_model
from decode.rehearsal import warm_up
from decode.requests import Event, check_fits
from decode.sampling.own_settings import RESTING, say_others
from decode.sampling.penalties import asked_processors
from decode.sampling.stopping import own_eos_ids
from decode.stats import Stats

log = get_logger("decode")


def run(config: DecodeConfig) -> None:
    """Check, load, decode, print."""
    target = describe_model(config.target)
    if config.draft.path is not None:
        draft = describe_draft(config.draft.path, target, settings=config.draft.loading)
        family = draft.family
        check_foresees(draft.foresees, config.decode.confidence, "decode.confidence")
        check_overlap(family, config.decode.overlap, "decode.overlap")
        check_device(family, config.draft.device, "draft.device")
    if config.draft.device is not None:
        resolve_device(config.draft.device, "draft.device")
    tokenizer = settled(load_tokenizer(config.target), config.data)
    asked_processors(target.vocab_size, tokenizer, config.decode, own_eos_ids(target.config, target.vocab_size))
    used, written = vars(config.decode), {name: f"decode.{name}={{}}" for name in RESTING}
    say_others(target.generation_config, used, target.path, written, of_run=True)
    ids = encode_prompt(config, tokenizer)
    check_fits(len(ids), config.decode.max_new_tokens, target.max_positions, "decode.max_new_tokens")
    if config.plan:
        log.info(
            "plan: %d prompt tokens, up to %d new; target %s (%d parameters), draft %s",
            len(ids), config.decode.max_new_tokens, target.path, target.num_parameters, config.draft.path,
        )  # fmt: skip
        return
    if config.output_dir is None:
        _decode(config, tokenizer, ids)
        return
    with open_run(config.output_dir, "decode", config, config.resume) as folder:
        if not folder.is_finished:
            _keep(folder, _decode(config, tokenizer, ids), tokenizer, len(ids))


def encode_prompt(config: DecodeConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the prompt, from prompt=, a file or standard input; raises InputError where there is nothing to
    read."""
    text = config.prompt if config.prompt is not None else _read(config.prompt_file or "")
    if config.chat:
        if not tokenizer.chat_template:
            raise InputError(
                f"chat=true, but the tokenizer of {config.target.path} has no chat template; drop chat=true"
            )
        turns = [{"role": "user", "content": text}]
        try:
            rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        except REFUSALS as error:
            raise InputError(
                f"the chat template of {config.target.path} refuses the prompt as what a user says ({error}); drop "
                "chat=true, and give the prompt as the template would write it"
            ) from error
        ids = rendered["input_ids"]  # type: ignore[index]
    else:
        ids = tokenizer(text)["input_ids"]
    if not ids:
        raise InputError("the prompt is empty; give at least one token of text in prompt= or prompt_file=")
    return list(ids)  # type: ignore[arg-type]


def _read(name: str) -> str:
    if name != "-" and not Path(name).is_file():
        raise InputError(f"prompt_file={name} does not exist; give a text file, or - for standard input")
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"prompt_file={name} is not UTF-8 text: {error}. Convert it first") from error


def _decode(config: DecodeConfig, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Output:
    log.info("loading %s%s", config.target.path, "" if config.draft.path is None else f" and {config.draft.path}")
    model = load_model(config.target)
    drafter = _drafter(config.draft, model)
    prompt = torch.tensor([ids], device=model.device)
    complete = partial(
        generate,
        model,
        drafter,
        prompt,
        torch.ones_like(prompt),  # a pad token that stands in the text is text
        **vars(config.decode),
        stop_strings=config.stop_strings,
        tokenizer=tokenizer,
        seed=config.seed,
    )
    _warm_up(model, drafter, prompt, config, tokenizer)
    painter = Painter(tokenizer, sys.stdout, config.color)
    painter.prompt(ids)
    output = complete(observer=painter.event)
    painter.end(output.stats)
    return output


def _drafter(draft: DrafterConfig, model: PreTrainedModel) -> Drafter | None:
    if draft.path is None:
        return None
    return load_drafter(draft.path, model, draft.dtype, device=draft.device, **draft.loading)


def _warm_up(
    model: PreTrainedModel,
    drafter: Drafter | None,
    prompt: Tensor,
    config: DecodeConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Of the call to come: captures took more time than the whole completion of the toy."""
    log.info("warming up: rounds are captured before the completion, whose speed is timed without that")
    settings = {name: value for name, value in vars(config.decode).items() if name != "max_new_tokens"}
    seconds = warm_up(model, drafter, prompt, config.decode.max_new_tokens, tokenizer=tokenizer, **settings)
    log.info("warmed up in %.1f s", seconds)


def _keep(folder: RunFolder, output: Output, tokenizer: PreTrainedTokenizerBase, prompt_length: int) -> None:
    tokens = output.sequences[0].tolist()
    completion = tokenizer.decode(tokens[prompt_length:])
    write_json(folder.file("completion.json"), {"tokens": tokens, "prompt_length": prompt_length, "text": completion})
    stats = output.stats
    figures = {"tau": stats.tau, "tokens": stats.num_tokens, "passes": stats.num_target_passes}
    folder.finish(figures if stats.distance is None else figures | {"distance": stats.distance})


DIM, GREEN, RED, CYAN, RESET = "\x1b[2m", "\x1b[32m", "\x1b[31m", "\x1b[36m", "\x1b[0m"
LEGEND = (("accepted", GREEN), ("correction", RED), ("bonus", CYAN))


class Painter:
    """Writes tokens to a stream, coloured where it is a terminal (or where `color` says so).

    A byte-level token may hold part of a character: text is written once it is whole, in the colour of its last token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stream: TextIO, color: str = "auto") -> None:
        self.tokenizer, self.stream = tokenizer, stream
        self.paints = color == "always" or (color == "auto" and stream.isatty())
        self._waiting: list[int] = []
        self._before: list[int] = []

    def prompt(self, ids: list[int]) -> None:
        """The legend, then the prompt, dimmed."""
        if self.paints:
            names = "  ".join(f"{paint}{name}{RESET}" for name, paint in LEGEND)
            self.stream.write(f"{DIM}prompt{RESET}  {names}\n\n")
        self._write(str(self.tokenizer.decode(ids)), DIM)
        self._before = ids[-1:]

    def event(self, event: Event) -> None:
        """The tokens of one round: the accepted ones, then a correction, or a bonus where nothing was refused."""
        for i, token in enumerate(event.tokens):
            last = CYAN if event.accepted == event.drafted else RED
            self._token(token, GREEN if i < event.accepted else last)
        self.stream.flush()

    def end(self, stats: Stats) -> None:
        """What still waits for the rest of a character, and the figures of the run."""
        self._write(self._text(), "")
        self.stream.write(
            f"\n\n{stats.num_tokens} tokens in {stats.num_target_passes} target passes: "
            f"{stats.tau:.2f} tokens per pass, {stats.tokens_per_s:.0f} tokens/s\n"
        )
        if stats.ahead_share is not None:
            self.stream.write(f"{stats.ahead_share:.0%} of the rounds with drafts began with those made ahead\n")
        if stats.distance is not None:
            self.stream.write(f"lossy: mean TV distance from the target's distribution {stats.distance:.3f}\n")
        self.stream.flush()

    def _token(self, token: int, paint: str) -> None:
        self._waiting.append(token)
        text = self._text()
        if not text.endswith("�"):
            self._write(text, paint)
            self._before, self._waiting = [token], []

    def _text(self) -> str:
        """The waiting tokens as text, read after the one before them: some decoders drop the space that text begins
        with."""
        before = str(self.tokenizer.decode(self._before))
        return str(self.tokenizer.decode(self._before + self._waiting))[len(before) :]

    def _write(self, text: str, paint: str) -> None:
        self.stream.write(f"{paint}{text}{RESET}" if self.paints else text)
