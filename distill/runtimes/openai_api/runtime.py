"""The target in a server that speaks OpenAI's protocol, which writes the responses, with its likeliest tokens where
they are to be kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from decode.common.errors import RunError
from decode.common.progress import get_logger
from decode.common.typed_config import require
from decode.models.load import ModelDescription
from decode.sampling.stopping import own_eos_ids
from distill.config import DistillConfig
from distill.corpora.corpus import unit_hash
from distill.records.distribution_stores import SparseStore
from distill.records.record_manifest import RecordedRuntime, RecordedServer
from distill.responses import Heard, Response, Sampler, unheard
from distill.runtimes.kept_responses import KeptResponses
from distill.runtimes.openai_api.answers import Position, TokenIds
from distill.runtimes.openai_api.checks import check_server
from distill.runtimes.openai_api.endings import ended
from distill.runtimes.openai_api.probe import check_same
from distill.runtimes.openai_api.server import OpenAiServer
from distill.runtimes.runtime import Runtime
from distill.runtimes.vllm_probe import probe_ids

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
        self.log_p: list[float] | None = None
        """What it says of that; None where it tells no log-probabilities."""

    def prepare(self, longest: int) -> None:
        self.longest = longest
        assert self.target.tokenizer is not None
        self.tokenizer = self.target.tokenizer
        self.server = OpenAiServer.connect(self.config.target)
        self.probe = probe_ids(self.tokenizer, max(1, longest - 1))
        check_server(self)
        log.info("%s at %s serves %s", self.server.software, self.server.url, self.server.model)

    def note_server(self, source: TokenIds) -> None:
        """What records are bound to, once it is known how the server tells tokens."""
        if source == "of the text":
            log.warning(
                "the server at %s does not say which tokens it wrote: its text is cut into tokens again, which may be "
                "others in rare places. vLLM and llama.cpp say them",
                self.server.url,
            )
        if self.log_p is None:
            log.warning(
                "the server at %s tells no log-probabilities: weights that change while it runs, under the same name, "
                "would not be noticed",
                self.server.url,
            )
        self.source: TokenIds = source
        told = RecordedServer(url=self.server.url, model=self.server.model, token_ids=source)
        self.note = RecordedRuntime(
            name="openai", version=self.server.software, dtype="unknown", log_p=self.log_p, server=told
        )

    def sampling(self) -> dict[str, Any]:
        """How responses are drawn, in the protocol's words."""
        asked = self.config.sampling
        further = {"top_k": asked.top_k or -1, "min_p": asked.min_p} if self.server.beyond else {}
        return {"temperature": asked.temperature, "top_p": asked.top_p, **further}

    def sampler(self) -> Sampler:
        kept = KeptResponses(self.folder / "responses", {} if self.store is None else self.store.shapes)

        def sample(prompts: list[list[int]], rows: list[int], seed: int, heard: Heard = unheard) -> list[Response]:
            found = [kept.get([prompt], [row], seed) for prompt, row in zip(prompts, rows, strict=True)]
            left = {
                place: (prompts[place], int(unit_hash("row", seed, rows[place]) * 2**31))
                for place, one in enumerate(found)
                if one is None
            }
            for place, one in enumerate(found):
                if one is not None:
                    heard(place, one[0], None)
            for place, response in self._written(left):
                kept.put([prompts[place]], [rows[place]], seed, [response])
                found[place] = [response]
                heard(place, response, None)
            return [response for one in found if one is not None for response in one]

        return sample

    def passes(self, layers: Sequence[int]) -> NoReturn:
        raise AssertionError(f"a server gives no states of {layers}; its settings were checked")

    def weights(self) -> None:
        """They are in another process."""

    def _written(self, asked: dict[int, tuple[list[int], int]]) -> Iterator[tuple[int, Response]]:
        """Each response once the server was seen to be the same behind it, `batch_size` requests at a time."""
        waiting: list[tuple[int, Response]] = []
        with ThreadPoolExecutor(self.config.batch_size) as pool:
            try:
                places = {pool.submit(self._response, *pair): place for place, pair in asked.items()}
                for one in as_completed(places):
                    waiting.append((places[one], one.result()))
                    if len(waiting) >= self.config.batch_size:
                        check_same(self.server, self.probe, self.log_p)
                        yield from waiting
                        waiting = []
                if waiting:
                    check_same(self.server, self.probe, self.log_p)
                    yield from waiting
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _response(self, prompt: list[int], seed: int) -> Response:
        most = self.config.sampling.max_new_tokens
        settings = {"seed": seed, **self.sampling()}
        if self.server.beyond:
            settings["stop_token_ids"] = self.eos
        if self.store is not None or self.source == "of logprobs":
            settings["logprobs"] = 1 if self.store is None else self.store.head
        answer = self.server.complete(prompt, most, **settings)
        source = "of the text" if self.source == "of logprobs" and answer.lacks_positions(self.eos) else self.source
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
