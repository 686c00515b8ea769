"""The commands of a card for llama.cpp, with the interpreter and the converter of .venv-llamacpp."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from eval.modes.served.engine.metrics import Counters, read_counters
from tests.engines.toys import NEW_TOKENS, PROMPTS

WORKER = Path(__file__).with_name("llamacpp_worker.py")


class RefusedError(Exception):
    """The converter or the server stopped; what it said."""


@dataclass(frozen=True)
class LlamaCpp:
    """A place for GGUF files, where a target is converted once."""

    python: str
    folder: Path

    def served(self, exported: Path) -> tuple[list[list[int]], Counters]:
        """Texts and counters of the draft in `exported`, converted and served as its card says."""
        target, draft, serve = _commands(exported)
        options = dict(zip(serve[1::2], serve[2::2], strict=True))
        files = [self._convert(target), self._convert(draft)]
        asked = [*files, options["--spec-type"], options["--spec-draft-n-max"], str(NEW_TOKENS)]
        answer = json.loads(self._run([str(WORKER), *asked], json.dumps(PROMPTS)))
        # It counts under vLLM's names.
        return answer["texts"], read_counters(answer["metrics"].replace("llamacpp:", "vllm:"))

    def convert(self, exported: Path, target: Path) -> None:
        """A head for that target."""
        named = ["--target-model-dir", str(target), "--outfile", "draft.gguf"]
        self._convert(["python", "convert_hf_to_gguf.py", str(exported), *named])

    def _convert(self, command: list[str]) -> str:
        _, script, source, *options = command
        file = self.folder / f"{source.strip('/').replace('/', '-')}.gguf"
        if not file.exists():
            place = Path(self.python).parents[1] / "llama.cpp" / script
            # without --outtype weights are written in 16 bits, and ours are counted in 32
            self._run([str(place), source, *options[:-1], str(file), "--outtype", "f32"])
        return str(file)

    def _run(self, words: list[str], given: str = "") -> str:
        apart = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        ended = subprocess.run(
            [self.python, *words], input=given, capture_output=True, text=True, env=apart, cwd=self.folder
        )
        if ended.returncode:
            raise RefusedError(ended.stderr[-2000:])
        return ended.stdout


def _commands(exported: Path) -> list[list[str]]:
    """Conversion of target and draft, and the server."""
    lines = (exported / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith(("python convert_hf_to_gguf.py ", "llama-server "))]
    return [shlex.split(line.replace("THIS_FOLDER", str(exported))) for line in commands]
