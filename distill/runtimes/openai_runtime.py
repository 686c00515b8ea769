"""The target in a server that speaks OpenAI's protocol, which writes the responses, with its likeliest tokens where
they are to be kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from decode.common.errors import RunError
from decode.common.progress import get_logger
from decode.common.typed_config import require
from decode.models.describe import ModelDescription
from decode.sampling.stopping import own_eos_ids
from distill.config import DistillConfig
from distill.corpora.corpus import unit_hash
from distill.records.distribution_stores import SparseStore
from distill.records.record_manifest import RecordedRuntime, RecordedServer
from distill.responses import OnResponse, Response, Sampler, ignored
from distill.runtimes.kept_responses import KeptResponses
from distill.runtimes.openai_answers import Position, ended
from distill.runtimes.openai_checks import Needs, Told, check_server
from distill.runtimes.openai_server import OpenAiServer
from distill.runtimes.probe import probe_ids
from distill.runtimes.runtime import Runtime

log = get_logger("distill")


class OpenAiRuntime(Runtime):
    """Everything is checked by `prepare`, before anything of the run is asked."""

    gives_p = True

    def __init__(self, config: DistillConfig, target: ModelDescription) -> None:
        """Raises ConfigError under a launcher of several processes."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        require(
            ranks == 1,
            f"target.runtime=openai and {ranks} processes, where one keeps a server busy: batch_size is how many "
            "requests it has at once. Start one by `python -m distill`",
        )
        self.config, self.target, self.folder = config, target, Path(config.output_dir)
        kept = config.records
        self.store = (
            SparseStore("topk", min(kept.topk, target.vocab_size), 0, target.vocab_size) if kept.store else None
        )
        """How its likeliest tokens are kept; None keeps the text alone."""
        self.eos = own_eos_ids(target.generation_config, target.vocab_size)
        self.probe: list[int] = []
        """The fixed text by which the server's weights are known."""

    def prepare(self, longest: int) -> None:
        self.longest, asked = longest, self.config
        assert self.target.tokenizer is not None
        self.tokenizer = self.target.tokenizer
        self.server = OpenAiServer.connect(asked.target)
        self.probe = probe_ids(self.tokenizer, max(1, longest - 1))
        likeliest = None if self.store is None else self.store.head
        needs = Needs(asked.target, self.tokenizer, asked.sampling, longest, self.probe, likeliest)
        self._note(check_server(self.server, needs))
        log.info("%s at %s serves %s", self.server.software, self.server.url, self.server.model)

    def sampler(self) -> Sampler:
        kept = KeptResponses(self.folder / "responses", {} if self.store is None else self.store.shapes)

        def sample(
            prompts: list[list[int]], rows: list[int], seed: int, on_response: OnResponse = ignored
        ) -> list[Response]:
            found = [kept.get([prompt], [row], seed) for prompt, row in zip(prompts, rows, strict=True)]
            left = {
                place: (prompts[place], int(unit_hash("row", seed, rows[place]) * 2**31))
                for place, one in enumerate(found)
                if one is None
            }
            for place, one in enumerate(found):
                if one is not None:
                    on_response(place, one[0], None)
            for place, response in self._written(left):
                kept.put([prompts[place]], [rows[place]], seed, [response])
                found[place] = [response]
                on_response(place, response, None)
            return [response for one in found if one is not None for response in one]

        return sample

    def passes(self, layers: Sequence[int]) -> NoReturn:
        raise AssertionError(f"a server gives no states of {layers}; its settings were checked")

    def _note(self, told: Told) -> None:
        """What records are bound to, once it is known how the server tells tokens."""
        if told.source == "of the text":
            log.warning(
                "the server at %s does not say which tokens it wrote: its text is cut into tokens again, which may be "
                "others in rare places. vLLM and llama.cpp say them",
                self.server.url,
            )
        if told.log_p is None:
            log.warning(
                "the server at %s tells no log-probabilities: weights that change while it runs, under the same name, "
                "would not be noticed",
                self.server.url,
            )
        self.told, server = told, RecordedServer(url=self.server.url, model=self.server.model, token_ids=told.source)
        self.note = RecordedRuntime(
            name="openai", version=self.server.software, dtype="unknown", log_p=told.log_p, server=server
        )

    def _written(self, asked: dict[int, tuple[list[int], int]]) -> Iterator[tuple[int, Response]]:
        """Each response once the server was seen to be the same behind it, `batch_size` requests at a time."""
        waiting: list[tuple[int, Response]] = []
        with ThreadPoolExecutor(self.config.batch_size) as pool:
            try:
                places = {pool.submit(self._response, *pair): place for place, pair in asked.items()}
                for one in as_completed(places):
                    waiting.append((places[one], one.result()))
                    if len(waiting) >= self.config.batch_size:
                        self.server.check_same(self.probe, self.told.log_p)
                        yield from waiting
                        waiting = []
                if waiting:
                    self.server.check_same(self.probe, self.told.log_p)
                    yield from waiting
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _response(self, prompt: list[int], seed: int) -> Response:
        most = self.config.sampling.max_new_tokens
        settings = {"seed": seed, **self.server.drawing(self.config.sampling)}
        if self.server.beyond:
            settings["stop_token_ids"] = self.eos
        if self.store is not None or self.told.source == "of logprobs":
            settings["logprobs"] = 1 if self.store is None else self.store.head
        answer = self.server.complete(prompt, most, **settings)
        source = (
            "of the text"
            if self.told.source == "of logprobs" and answer.lacks_positions(self.eos)
            else self.told.source
        )
        ids = answer.ids(source, self.tokenizer)
        stray = next((token for token in ids if not 0 <= token < self.target.vocab_size), None)
        if stray is not None:
            raise RunError(
                f"the server at {self.server.url} wrote token {stray}, and target.path={self.target.path} has "
                f"{self.target.vocab_size}: it serves another model now"
            )
        response = ended(answer, ids, source, self.eos, most, self.server.url)
        if self.store is None:
            return response
        return self._with_p(response, [] if source == "of the text" else answer.positions, self.store)

    def _with_p(self, response: Response, positions: list[Position], store: SparseStore) -> Response:
        """With p of the tokens that it is told of: not of an end that the server leaves out."""
        told = [one.likeliest[: store.head] for one in positions[: len(response.ids)]]
        known = [len(row) == store.head and all(token is not None for token, _ in row) for row in told]
        has_p = np.array(known + [False] * (len(response.ids) - len(known)), dtype=bool)
        rows = [row for row, is_known in zip(told, known, strict=True) if is_known]
        tokens = torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.long).view(-1, store.head)
        log_p = torch.tensor([[value for _, value in row] for row in rows]).view(-1, store.head)
        return replace(response, has_p=has_p, payload=store.of_likeliest(tokens, log_p))
