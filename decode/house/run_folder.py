"""Run folders: who made this, from what, on what; written so that a killed run is never taken for a finished one."""

import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from decode.house.environment import environment, git_state, package_versions
from decode.house.errors import ConfigError, InputError, UserError
from decode.house.progress import get_logger, is_main_process
from decode.house.run_lock import LOCK_FILE, check_unlocked, run_lock

RUN_SCHEMA = 1
log = get_logger("run")
_NOT_COMPARED = ("resume", "plan", "output_dir")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of one run of one stage: `run.json` from the start, `manifest.json` once it is finished."""

    path: Path
    stage: str
    is_finished: bool = False
    is_main: bool = True

    def file(self, name: str) -> Path:
        """The path of `name` in this folder; its parent folder is made."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, result: dict) -> None:
        """Write `manifest.json` (schema, stage, finished, and `result`), last and atomically; rank 0 only."""
        if self.is_main:
            head = {"schema": RUN_SCHEMA, "stage": self.stage, "finished": _now()}
            write_json(self.path / "manifest.json", {**head, **result})


def check_run(output_dir: str, stage: str, config: Any, resume: str = "never") -> bool:
    """Whether the run at `output_dir` is finished already; raises whatever `open_run` would. Writes nothing: what is
    checked after this, and fails, leaves no folder behind."""
    path = Path(output_dir)
    if not (_continues(path, resume) and is_finished(path)):
        check_unlocked(path)
    return _check_state(path, stage, config, resume)


@contextmanager
def open_run(
    output_dir: str, stage: str, config: Any, resume: str = "never", is_main: bool | None = None
) -> Iterator[RunFolder]:
    """The run folder at `output_dir` for the dataclass `config`, held for this process alone until the block ends;
    nothing that exists is overwritten.

    resume="never": the folder must be new or empty. "auto": continue an unfinished run of an equal config, and report a
    finished one by `is_finished`. A path: start from that checkpoint, in a new folder or in the one that holds it.
    Raises ConfigError with the remedy otherwise, or where another process is in the folder. Only rank 0 (`is_main`,
    from the RANK variable by default) locks and writes; all ranks of a process group come here together, and learn of
    a refusal.
    """
    is_main = is_main_process() if is_main is None else is_main
    path, outcome = Path(output_dir), None
    with ExitStack() as held:
        if is_main:
            try:
                outcome = _enter(held, path, stage, config, resume)
            except UserError as error:
                outcome = error
        outcome = _from_main(outcome)
        if isinstance(outcome, UserError):
            raise outcome
        yield RunFolder(path, stage, bool(outcome), is_main)


def is_finished(path: Path) -> bool:
    """Whether the run in `path` wrote its manifest, which is the last thing a run writes."""
    return (path / "manifest.json").exists()


def check_same_run(path: Path, stage: str, config: Any) -> None:
    """Raise ConfigError unless `path` is a run of `stage` with this `config` (resume, plan and output_dir aside)."""
    run = read_json(path / "run.json")
    if run.get("schema") != RUN_SCHEMA or run.get("stage") != stage:
        raise ConfigError(
            f"{path} holds a run of stage {run.get('stage')!r} (schema {run.get('schema')!r}), and this is stage "
            f"{stage!r} (schema {RUN_SCHEMA}). Use another output_dir."
        )
    old, new = _flat(run["config"]), _flat(_comparable(config))
    changed = [key for key in sorted(old.keys() | new.keys()) if key.split(".")[0] not in _NOT_COMPARED]
    changed = [key for key in changed if old.get(key, "unset") != new.get(key, "unset")]
    if changed:
        pairs = [(key, old.get(key, "unset"), new.get(key, "unset")) for key in changed[:5]]
        shown = "; ".join(f"{key}: {there!r} there, {now!r} now" for key, there, now in pairs)
        raise ConfigError(
            f"{path} holds a run of another configuration ({shown}). Its files would not be those of this command. "
            "Use another output_dir, delete the folder, or give the same values."
        )


def write_json(path: Path | str, content: Any) -> None:
    """Write `content` so that `path` holds either all of it or what it held before, even after a power cut."""
    write_atomically(Path(path), (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` so that `path` appears once all of it is on the disk; a killed writer leaves a hidden file."""
    # process ids are no names: in containers that share a disk they are often the same
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk would not get emptier by what is left
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path | str) -> Any:
    """The content of a JSON file; InputError names the file where it is missing or malformed."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"{path} is no valid JSON ({error}); it was cut short or edited. Write it again.") from error


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


def _enter(held: ExitStack, path: Path, stage: str, config: Any, resume: str) -> bool:
    """Rank 0's part of `open_run`: lock the folder until `held` is closed, and start it; True if it is finished."""
    if check_run(str(path), stage, config, resume):
        return True
    with _written(path):
        path.mkdir(parents=True, exist_ok=True)
        held.enter_context(run_lock(path))
    is_done = _check_state(path, stage, config, resume)  # again: another process may have been there in between
    if not (path / "run.json").exists():
        _start(path, stage, config)
    return is_done


def _check_state(path: Path, stage: str, config: Any, resume: str) -> bool:
    """Whether the run in `path` is finished; ConfigError where it is neither new nor to be continued."""
    continues = _continues(path, resume)
    if not _is_empty(path):
        if not (continues and (path / "run.json").exists()):
            raise ConfigError(_refusal(path, continues))
        check_same_run(path, stage, config)
    is_done = continues and is_finished(path)
    if is_done:
        log.info("%s is already finished", path)
    return is_done


def _from_main(outcome: Any) -> Any:
    """What rank 0 says: a rank that goes on alone would wait for it until the launcher's patience ends."""
    from torch import distributed  # here, so that importing this module costs nothing

    if not (distributed.is_available() and distributed.is_initialized()):
        return outcome
    shared = [outcome]
    distributed.broadcast_object_list(shared, src=0)
    return shared[0]


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


def _start(path: Path, stage: str, config: Any) -> None:
    run = {
        "schema": RUN_SCHEMA,
        "stage": stage,
        "config": _comparable(config),
        "argv": sys.argv,
        "git": git_state(),
        "packages": package_versions(),
        "hardware": environment(),
        "seed": getattr(config, "seed", None),
        "started": _now(),
    }
    with _written(path):
        write_json(path / "run.json", run)


def _is_empty(path: Path) -> bool:
    """Whether `path` may be started in: missing, or holding nothing but what a killed start left behind."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except FileNotFoundError:
        return True
    except (OSError, ValueError) as error:
        raise ConfigError(f"output_dir = {str(path)!r} is no folder that can be used: {error}.") from error
    return all(name.startswith(".run.json.") or name == LOCK_FILE for name in names)


def _refusal(path: Path, continues: bool) -> str:
    if continues:
        return f"{path} is not empty and holds no run.json, so it is no run to continue. Use another output_dir."
    state = "a finished run" if is_finished(path) else "files"
    return (
        f"{path} already holds {state}, and nothing is overwritten. Use resume=auto to continue or reuse it, another "
        "output_dir, or delete the folder."
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
