"""Run folders: who made this, from what, on what; written so that a killed run is never taken for a finished one."""

import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from decode.common.checked_json import Amount, Content, JsonFile, Text, shown
from decode.common.environment import environment, git_state, package_versions
from decode.common.errors import ConfigError, UserError
from decode.common.progress import get_logger, is_main_process
from decode.common.run_lock import LOCK_FILE, check_unlocked, run_lock

RUN_SCHEMA = 1
log = get_logger("run")
SLOWEST_RANK = timedelta(days=7)
"""That ranks wait for the last one: while rank 0 counts, fits or exports, and for whoever finishes last. Process groups
are told so: by themselves they give ten minutes (NCCL) or thirty (gloo). Where a rank dies, the launcher ends all."""
_NOT_COMPARED = ("resume", "plan", "output_dir", "data.bad_rows")  # which decide nothing of what is written
T = TypeVar("T")
Hashes = Mapping[str, str | None]
NOTHING: Hashes = {}


class RunStart(Content):
    """run.json, as far as it is read back."""

    version: int = Field(alias="schema")
    stage: Text
    config: dict[str, Any]
    started: Text
    bound_to: dict[str, Text | None] = {}
    """Hashes of what lies outside the configuration and decides what is written, by name; older runs have none."""


class RunEnd(Content):
    """What the manifest.json of every stage begins with."""

    version: int = Field(alias="schema")
    stage: Text
    finished: Text
    seconds: Amount | None = None
    """That the process which finished the run held the folder; None in manifests of version 0.1."""
    resumed: bool = False
    """Whether earlier processes had begun it, whose time is in no manifest."""


_REMEDY = "Copy the folder again from where it was written, or delete it and run the stage again"
RUN = JsonFile(RunStart, "the run could not be told from one of another configuration", f"{_REMEDY}.")
MANIFEST = JsonFile(RunEnd, "an unfinished run could be taken for a finished one", f"{_REMEDY}.")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of one run of one stage: `run.json` from the start, `manifest.json` once it is finished."""

    path: Path
    stage: str
    is_finished: bool = False
    is_main: bool = True
    is_resumed: bool = False
    began_s: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def started(self) -> str:
        """When the run began, in ISO format; what goes on with it later keeps that."""
        return RUN.read(self.path / "run.json").started

    def file(self, name: str) -> Path:
        """The path of `name` in this folder; its parent folder is made."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, result: dict, file: JsonFile | None = None) -> None:
        """Write `manifest.json` (what RunEnd says, and `result`), last and atomically; rank 0 only.

        RunError where `file`, by default MANIFEST, could not be read back.
        """
        if self.is_main:
            head = {"schema": RUN_SCHEMA, "stage": self.stage, "finished": _now()}
            head |= {"seconds": round(time.perf_counter() - self.began_s, 1), "resumed": self.is_resumed}
            (file or MANIFEST).write(self.path / "manifest.json", {**head, **result})


def check_run(output_dir: str, stage: str, config: Any, resume: str = "never", bound_to: Hashes = NOTHING) -> bool:
    """Whether the run at `output_dir` is finished already; raises whatever `open_run` would. Writes nothing: what is
    checked after this, and fails, leaves no folder behind."""
    path = Path(output_dir)
    if not (_continues(path, resume) and is_finished(path)):
        check_unlocked(path)
    return _check_state(path, stage, config, resume, bound_to)


@contextmanager
def open_run(
    output_dir: str,
    stage: str,
    config: Any,
    resume: str = "never",
    is_main: bool | None = None,
    bound_to: Hashes = NOTHING,
) -> Iterator[RunFolder]:
    """The run folder at `output_dir` for the dataclass `config`, held for this process alone until the block ends;
    nothing that exists is overwritten.

    resume="never": the folder must be new or empty. "auto": continue an unfinished run of an equal config, and report a
    finished one by `is_finished`. A path: start from that checkpoint, in a new folder or in the one that holds it.
    `bound_to` are hashes of files that must not change between (a tokenizer's, say), by name. Raises ConfigError with
    the remedy otherwise, or where another process is in the folder. Only rank 0 (`is_main`,
    from the RANK variable by default) locks and writes; all ranks of a process group come here together, and learn of
    a refusal.
    """
    is_main = is_main_process() if is_main is None else is_main
    path, began_s = Path(output_dir), time.perf_counter()
    is_resumed = (path / "run.json").exists()
    with ExitStack() as held:
        is_done = on_main(is_main, lambda: _enter(held, path, stage, config, resume, bound_to))
        yield RunFolder(path, stage, is_done, is_main, is_resumed, began_s)


def is_finished(path: Path) -> bool:
    """Whether the run in `path` wrote its manifest, which is the last thing a run writes; InputError where that is
    damaged."""
    file = path / "manifest.json"
    if not file.exists():
        return False
    MANIFEST.read(file)
    return True


def check_same_run(path: Path, stage: str, config: Any, bound_to: Hashes = NOTHING) -> None:
    """Raise ConfigError unless `path` is a run of `stage` with this `config` (resume, plan, output_dir, data.bad_rows
    and the config's own NOT_COMPARED aside), begun with the same files."""
    run = RUN.read(path / "run.json")
    if run.version != RUN_SCHEMA or run.stage != stage:
        raise ConfigError(
            f"{path} holds a run of stage {run.stage!r} (schema {run.version}), and this is stage {stage!r} "
            f"(schema {RUN_SCHEMA}). Use another output_dir."
        )
    old, new = _flat(run.config), _flat(_comparable(config))
    aside = tuple(f"{name}." for name in (*_NOT_COMPARED, *getattr(config, "NOT_COMPARED", ())))
    changed = [key for key in sorted(old.keys() | new.keys()) if not f"{key}.".startswith(aside)]
    changed = [key for key in changed if old.get(key, "unset") != new.get(key, "unset")]
    if changed:
        pairs = [(key, old.get(key, "unset"), new.get(key, "unset")) for key in changed[:5]]
        told = "; ".join(f"{key}: {shown(there)} there, {shown(now)} now" for key, there, now in pairs)
        raise ConfigError(
            f"{path} holds a run of another configuration ({told}). Its files would not be those of this command. "
            "Use another output_dir, delete the folder, or give the same values."
        )
    for name, now in bound_to.items():
        there = run.bound_to.get(name, now)
        if there != now:
            raise ConfigError(
                f"the run in {path} was begun with {name} {there}, and it is {now} now: the files under their path "
                "changed. Put the first ones back, use another output_dir, or delete the folder."
            )


def on_main(is_main: bool, do: Callable[[], T]) -> T:
    """What `do` gives on rank 0, on all ranks, which come here together. What it refuses, all refuse: a rank that goes
    on alone would wait for the others until the launcher's patience ends."""
    from torch import distributed  # here, so that importing this module costs nothing

    outcome: Any = None
    if is_main:
        try:
            outcome = do()
        except UserError as error:
            outcome = error
    if distributed.is_available() and distributed.is_initialized():
        shared = [outcome]
        distributed.broadcast_object_list(shared, src=0)
        outcome = shared[0]
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


def sha256_file(path: Path | str) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_disk_check(path: Path | str, bytes_needed: int) -> None:
    """Raise ConfigError where the disk of `path` (which need not exist yet) cannot take `bytes_needed` bytes."""
    existing = next(parent for parent in (Path(path).absolute(), *Path(path).absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < bytes_needed:
        raise ConfigError(
            f"{path} needs {bytes_needed / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB free; the run would "
            "die on its way. Use an output_dir on another disk, or ask for less."
        )


def _enter(held: ExitStack, path: Path, stage: str, config: Any, resume: str, bound_to: Hashes) -> bool:
    """Rank 0's part of `open_run`: lock the folder until `held` is closed, and start it; True if it is finished."""
    if check_run(str(path), stage, config, resume, bound_to):
        return True
    with _written(path):
        path.mkdir(parents=True, exist_ok=True)
        held.enter_context(run_lock(path))
    # again: another process may have been there in between
    is_done = _check_state(path, stage, config, resume, bound_to)
    if not (path / "run.json").exists():
        _start(path, stage, config, bound_to)
    return is_done


def _check_state(path: Path, stage: str, config: Any, resume: str, bound_to: Hashes) -> bool:
    """Whether the run in `path` is finished; ConfigError where it is neither new nor to be continued."""
    continues = _continues(path, resume)
    if not _is_empty(path):
        is_run = (path / "run.json").exists()
        if is_run:  # what another configuration wrote is not to be continued either
            check_same_run(path, stage, config, bound_to)
        if not (continues and is_run):
            raise ConfigError(_refusal(path, is_run))
    is_done = continues and is_finished(path)
    if is_done:
        log.info("%s is already finished", path)
    return is_done


def _continues(path: Path, resume: str) -> bool:
    """Whether what `path` holds may be gone on with."""
    if resume in ("never", "auto"):
        return resume == "auto"
    if not Path(resume).exists():
        raise ConfigError(f"resume = {resume!r} is neither never nor auto nor an existing path.")
    return path.resolve() in Path(resume).resolve().parents


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the run folder {str(path)!r}: {error}. Use another output_dir.") from error


def _start(path: Path, stage: str, config: Any, bound_to: Hashes) -> None:
    run = {
        "schema": RUN_SCHEMA,
        "stage": stage,
        "config": _comparable(config),
        "bound_to": dict(bound_to),
        "argv": sys.argv,
        "git": git_state(),
        "packages": package_versions(),
        "hardware": environment(),
        "seed": getattr(config, "seed", None),
        "started": _now(),
    }
    with _written(path):
        RUN.write(path / "run.json", run)


def _is_empty(path: Path) -> bool:
    """Whether `path` may be started in: missing, or holding nothing but what a killed start left behind."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except FileNotFoundError:
        return True
    except (OSError, ValueError) as error:
        raise ConfigError(f"output_dir = {str(path)!r} is not a folder that can be used: {error}.") from error
    return all(name.startswith(".run.json.") or name == LOCK_FILE for name in names)


def _refusal(path: Path, is_run: bool) -> str:
    if not is_run:
        return (
            f"{path} is not empty and holds no run.json, so it is not a run to continue, and nothing is overwritten. "
            "Use another output_dir, or delete the folder."
        )
    if (path / "manifest.json").exists():
        return (
            f"{path} already holds a finished run, and nothing is overwritten. Use resume=auto to reuse it, another "
            "output_dir, or delete the folder."
        )
    return (
        f"{path} already holds this run, begun {RUN.read(path / 'run.json').started} and not finished, and nothing is "
        "overwritten. Use resume=auto to go on with it; to begin anew, use another output_dir, or delete the folder."
    )


def _comparable(config: Any) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _flat(content: Any, where: str = "") -> dict[str, Any]:
    if not isinstance(content, dict) or not content:
        return {where: content}
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{where}.{key}" if where else str(key))
    return flat


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
