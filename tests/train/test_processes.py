"""Training in several processes: killed and resumed, two on one folder, ranks that wait for the slowest, and engines
that share and shard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.multiprocessing.spawn import spawn

from decode.common.run_folder import SLOWEST_RANK
from distill.records.record_folder import RecordFolder
from tests.train.kills import Kill, differences, finish, random_kills, run_with_kills
from tests.train.toy import (
    ROOT,
    command,
    data_settings,
    head_config,
    head_settings,
    metrics,
    save_target,
    tiny_config,
    tiny_settings,
)
from train.checkpoints import run_checkpoints
from train.engine import _free_port, build_accelerator
from train.stage import run

RANKS = 2
LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS))


def launch(arguments: list[str], dies_at: int | None = None) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {} if dies_at is None else {"DIE_AT": str(dies_at)}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (dies_at is None), done.stderr[-4000:]


def on_two_ranks(folder: Path, target: Path, records: Path, engine: str, **changes: Any) -> dict[str, Any]:
    """Settings of a run of 2 ranks whose steps read what one rank with twice the rows reads."""
    return tiny_settings(folder, target, records=str(records), engine={"name": engine}, batch_size=1, **changes)


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"])
def test_two_ranks_train_as_one_would(tmp_path: Path, target: Path, records: Path, engine: str) -> None:
    run(tiny_config(tmp_path / "one", target, records=str(records), batch_size=2))
    settings = on_two_ranks(tmp_path / "two", target, records, engine)
    launch(command(settings, LAUNCHER, "tests.train.probe"))
    for ours, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["tokens"] == theirs["tokens"]
        for name in ("loss", "alpha", "tau"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), (engine, name)
    _check_shares(tmp_path / "two", engine)
    _check_same_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_two_ranks_train_a_head_as_one_would(tmp_path: Path, target: Path, feature_records: Path, engine: str) -> None:
    """To tolerance: each rank takes the mean over its own slots, of which the ends of documents have fewer."""
    head = {"objective": {"credit": "decay"}, "head": {"vocab": 250}, "lr": 3e-3}  # at 1e-2 six steps part by 1.5 %
    source: dict[str, Any] = {"records": str(feature_records)} | head
    run(head_config(tmp_path / "one", target, **source, batch_size=2))
    changes: dict[str, Any] = source | {"engine": {"name": engine}, "batch_size": 1}
    launch(command(head_settings(tmp_path / "two", target, **changes), LAUNCHER, "tests.train.probe"))
    for ours, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name in ("loss", "alpha", "tau"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-2), (engine, name)
    _check_shares(tmp_path / "two", engine)


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["deepspeed_zero2", "deepspeed_zero3"])
def test_deepspeed_resumes_its_sharded_state(tmp_path: Path, target: Path, records: Path, engine: str) -> None:
    settings = on_two_ranks(tmp_path / "whole", target, records, engine, keep_checkpoints=9)
    launch(command(settings, LAUNCHER))
    middle = tmp_path / "whole" / "checkpoints" / "step_00000003"
    settings |= {"output_dir": str(tmp_path / "rest"), "resume": str(middle)}
    launch(command(settings, LAUNCHER))
    ours, theirs = metrics(tmp_path / "whole"), metrics(tmp_path / "rest")
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_other_numbers_of_processes_go_on_after_a_kill(
    tmp_path: Path, target: Path, records: Path, engine: str
) -> None:
    """Two, then one, then two again: the steps of one process that nothing has stopped."""
    changes: dict[str, Any] = {"steps": 7, "checkpoint_every": 3, "validate_every": 2, "log_every": 1}
    run(tiny_config(tmp_path / "whole", target, records=str(records), batch_size=2, **changes))
    settings = on_two_ranks(tmp_path / "parts", target, records, engine, resume="auto", **changes)
    launch(command(settings, LAUNCHER, "tests.train.probe"), dies_at=4)
    alone = (sys.executable,) if engine == "ddp" else (*LAUNCHER[:-1], "1")  # where nothing wraps the draft
    launch(command(settings | {"gradient_accumulation": 2}, alone, "tests.train.probe"), dies_at=6)
    launch(command(settings, LAUNCHER, "tests.train.probe"))
    ours, theirs = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [(line["kind"], line["step"]) for line in ours] == [(line["kind"], line["step"]) for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    _check_same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.engines
def test_a_spread_target_calibrates_a_head_that_foresees(tmp_path: Path, target: Path, corpus: Path) -> None:
    """Rank 0 judges the kept weights, and every rank has a part of the target that it does so by."""
    changes: dict[str, Any] = {"data": data_settings(corpus), "batch_size": 1, "validation_rows": 24, "steps": 3}
    run(head_config(tmp_path / "one", target, "dspark", **changes | {"batch_size": 2}))
    settings = head_settings(tmp_path / "two", target, "dspark", engine={"name": "fsdp2"}, **changes)
    launch(command(settings, LAUNCHER))
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert 0 < two["confidence_rounds"] < one["confidence_rounds"]  # of its own rows
    assert one["alpha"] == pytest.approx(two["alpha"], rel=1e-2)
    of_target = [
        json.loads((tmp_path / name / "model/draftsmith.json").read_text())["target"] for name in ("one", "two")
    ]
    assert of_target[0]["weights"] == of_target[1]["weights"] is not None


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["deepspeed_zero3", "fsdp2"])
def test_mixed_precision_and_a_live_target_work_where_weights_are_sharded(
    tmp_path: Path, target: Path, records: Path, engine: str
) -> None:
    settings = on_two_ranks(tmp_path / "out", target, records, engine, target_source="live")
    settings["engine"]["precision"] = "bf16"
    settings["objective"]["name"] = "jsd"
    launch(command(settings, LAUNCHER))
    assert metrics(tmp_path / "out", "validation")[-1]["alpha"] > 0.5


@pytest.mark.engines
def test_two_nodes_train_as_one_would(tmp_path: Path, target: Path, records: Path) -> None:
    """Each with a launcher of its own."""
    run(tiny_config(tmp_path / "one", target, records=str(records), batch_size=2))
    settings = on_two_ranks(tmp_path / "two", target, records, "ddp")
    meeting = ("--master_addr", "127.0.0.1", "--master_port", str(_free_port()))
    launchers = [(*LAUNCHER[:-1], "1", "--nnodes", "2", "--node_rank", str(node), *meeting) for node in range(2)]
    nodes = [start(command(settings, launcher)) for launcher in launchers]
    for node in nodes:
        said = node.communicate(timeout=PATIENCE_S)[1]
        assert node.returncode == 0, said
    for ours, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def _check_shares(folder: Path, engine: str) -> None:
    """What the probe wrote down on each rank."""
    seen = [json.loads((folder / f"probe_{rank}.json").read_text()) for rank in range(RANKS)]
    assert seen[0]["rows"]
    assert len(seen[0]["rows"]) == len(seen[1]["rows"])
    for ours, theirs in zip(seen[0]["rows"], seen[1]["rows"], strict=True):
        assert not set(ours) & set(theirs), "two ranks read the same row in one step"
    weights = seen[0]["num_parameters"]
    state = [one["optimizer_elements"] for one in seen]
    if engine == "ddp":
        assert state == [2 * weights, 2 * weights]
    else:
        assert max(state) < 1.2 * weights, f"{engine} keeps {state} elements for {weights} weights: it did not shard"
        assert sum(state) >= 2 * weights


def _check_same_weights(one: Path, two: Path) -> None:
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, two))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).abs().max() < 1e-3, name


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")


def test_killed_in_a_write_and_resumed_equals_uninterrupted(tmp_path: Path, target: Path, records: Path) -> None:
    """In a process that is forked: nothing is imported again."""
    changes: dict[str, Any] = {"steps": 12, "checkpoint_every": 4, "validate_every": 6, "log_every": 5}
    run(tiny_config(tmp_path / "whole", target, records=str(records), **changes))
    again = tiny_config(tmp_path / "killed", target, records=str(records), resume="auto", **changes)
    process = os.fork()
    if not process:
        try:
            _die_in_a_write(2)
            run(again)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert list((tmp_path / "killed" / "checkpoints").glob(".*.tmp"))
    run(again)
    assert differences(tmp_path / "whole", tmp_path / "killed") == []


def _die_in_a_write(times: int) -> None:
    """This process, when a checkpoint is to be given its name the so many-th time."""
    give, given = run_checkpoints.give_name, []

    def name(draft: Path, final: Path) -> None:
        given.append(final)
        if len(given) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        give(draft, final)

    run_checkpoints.give_name = name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "kills", "pruning"),
    [
        ("single", random_kills(10, 0, longest_s=0.5), {}),
        ("single", random_kills(4, 0, longest_s=0.5), {"sparsity": 0.5}),
        pytest.param("ddp", random_kills(4, 0, longest_s=0.5), {}, marks=pytest.mark.engines),
    ],
    ids=["often", "sparse", "ddp"],
)
def test_killed_and_resumed_equals_uninterrupted(
    tmp_path: Path, target: Path, records: Path, engine: str, kills: list[Kill], pruning: dict[str, Any]
) -> None:
    launcher = (sys.executable,) if engine == "single" else TORCHRUN
    settings = tiny_settings(
        tmp_path / "whole",
        target,
        records=str(records),
        engine={"name": engine},
        draft={"init_from": str(save_target(tmp_path / "other", seed=1)), "pruning": pruning} if pruning else {},
        steps=150,
        checkpoint_every=4,
        validate_every=6,
        log_every=5,
    )
    finish(command(settings, launcher))
    settings |= {"output_dir": str(tmp_path / "killed"), "resume": "auto"}
    hits = run_with_kills(command(settings, launcher), tmp_path / "killed", kills)
    assert "a write" in hits
    assert differences(tmp_path / "whole", tmp_path / "killed") == []


PATIENCE_S = 300.0  # for a start on a busy machine; a second training would never end


def start(arguments: list[str], stderr: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A stage that Ctrl-C ends, also where these tests run in the background of a shell, which ignores it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    whole = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(whole, cwd=ROOT, env=environment, stderr=stderr, text=True)


def wait_for_a_step(process: subprocess.Popen[str], run: Path) -> None:
    log = run / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.stat().st_size):
        time.sleep(0.02)
    assert process.poll() is None


@pytest.mark.slow
def test_a_training_is_not_joined_by_a_second_process(tmp_path: Path, target: Path, records: Path) -> None:
    run = tmp_path / "out"
    arguments = command(tiny_settings(run, target, records=str(records), steps=100_000, resume="auto"))
    first = start(arguments, subprocess.DEVNULL)  # a pipe that nobody reads would stop it once it is full
    try:
        wait_for_a_step(first, run)
        first.send_signal(signal.SIGSTOP)  # it leaves the machine to the second one, and keeps the folder
        second = start(arguments)
        said = second.communicate(timeout=PATIENCE_S)[1]
        assert second.returncode == 2, said
        assert f"process {first.pid} on " in said
        assert "loading" not in said
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGCONT)
        first.send_signal(signal.SIGINT)
        assert first.wait(PATIENCE_S) == 130
    steps = [line["step"] for line in metrics(run, "train")]
    assert steps == list(range(2, 2 * len(steps) + 1, 2))
    assert not (run / "run.lock").exists()


@pytest.mark.slow
def test_of_two_that_start_at_once_one_writes_the_records(tmp_path: Path, target: Path, corpus: Path) -> None:
    arguments = [sys.executable, "-m", "distill", f"target.path={target}", "data=text", f"data.path={corpus}"]
    arguments += ["data.validation_share=0.2", "prompts.tokens=8", "prompts.count=24", "prompts.validation_count=4"]
    arguments += ["sampling.max_new_tokens=16", "records.shard_size=4", f"output_dir={tmp_path / 'out'}"]
    both = [start(arguments), start(arguments)]
    said = [process.communicate()[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert not any("Traceback" in one for one in said), said
    assert len(RecordFolder.open(tmp_path / "out")) == 28


PATIENCE = timedelta(seconds=1)


@pytest.mark.parametrize("is_cuda", [True, False])
def test_every_process_group_is_told_to_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_cuda: bool) -> None:
    """On a GPU accelerate makes it, on a CPU we do."""
    told: dict[str, Any] = {}

    def accelerator(**settings: Any) -> Any:
        told["accelerator"] = [one.to_kwargs()["timeout"] for one in settings["kwargs_handlers"]]
        return SimpleNamespace(distributed_type=SimpleNamespace(value="NO"))

    monkeypatch.setattr("torch.cuda.is_available", lambda: is_cuda)
    monkeypatch.setattr("accelerate.Accelerator", accelerator)
    monkeypatch.setattr("accelerate.state.PartialState", lambda cpu, timeout: told.update(ours=timeout))
    monkeypatch.setattr("train.engine._make_deterministic", lambda: None)
    build_accelerator(tiny_config(tmp_path, Path("target"), records="there", engine={"device": "auto"}))
    assert told == {"accelerator": [SLOWEST_RANK]} | ({} if is_cuda else {"ours": SLOWEST_RANK})
    assert timedelta(days=1) < SLOWEST_RANK


def late(rank: int, port: int, folder: str) -> None:
    """Rank 0 comes to the meeting when the patience of gloo is at its end, and so does it a second time."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed_c10d.default_pg_timeout = PATIENCE
    assert distributed_c10d._get_default_timeout("gloo") == PATIENCE  # type: ignore[arg-type]
    settings: dict[str, Any] = {"records": "there", "engine": {"name": "ddp"}}
    accelerator = build_accelerator(tiny_config(Path(folder), Path("target"), **settings))
    if rank == 0:
        time.sleep(3 * PATIENCE.total_seconds())
    accelerator.wait_for_everyone()
    Path(folder, f"rank_{rank}").write_text(str(accelerator.reduce(torch.ones(1)).item()))  # type: ignore[union-attr]
    accelerator.end_training()  # a process group that is left to the interpreter's end may abort it


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    spawn(late, (_free_port(), str(tmp_path)), nprocs=2)
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]
