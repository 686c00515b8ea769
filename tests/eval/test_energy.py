"""Joules per emitted token: what counters say, what is said where there is none, and how both reach pages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode.common.errors import ConfigError
from eval.measure import energy
from eval.measure.config import TimingConfig
from eval.measure.energy import Counter, EnergyMeter, energy_meter, nvml, rapl
from eval.measure.timed_run import interleave
from eval.render.page import energy_table
from eval.render.report_page import page_of
from eval.results.energy import energy_entry, energy_pairs, joules_per_token, merged, pooled_energy, same_facts
from eval.results.figures import Scope, make_row
from eval.results.pooling import pooled_row
from eval.results.schema import Row, read_results
from tests.eval.samples import FakeArm, at_paces, prompts, timed_samples
from tests.eval.test_rows import CHAIN, COSTS

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")
PUBLISHED = Path(__file__).parents[2] / "docs" / "results"
JOULES = {"ours": [[11.0, 11.0], [22.0, 11.0], [44.0, 11.0]]}


def zone(folder: Path, number: str, name: str, microjoules: int, wraps_at: int = 1_000_000_000) -> Path:
    found = folder / f"intel-rapl:{number}"
    found.mkdir(parents=True)
    for file, content in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", wraps_at)):
        (found / file).write_text(f"{content}\n")
    return found


def stepping(step: float, name: str = "fake") -> EnergyMeter:
    """Grows by `step` joules at each reading."""
    read = [0.0]

    def next_reading() -> float:
        read[0] += step
        return read[0]

    return EnergyMeter((Counter(name, next_reading),), kind="measured")


def test_packages_and_memory_are_added_and_what_contains_or_is_in_them_is_not(tmp_path: Path) -> None:
    names = {"0": "package-0", "0:0": "core", "0:1": "dram", "1": "package-1", "2": "psys"}
    zones = {number: zone(tmp_path, number, name, 5_000_000) for number, name in names.items()}
    counters, reason = rapl(tmp_path)
    meter = EnergyMeter(tuple(counters), kind="measured")

    def call() -> str:
        for exponent, one in enumerate(zones.values()):
            (one / "energy_uj").write_text(str(5_000_000 + 10**exponent * 1_000_000))
        return "done"

    assert reason is None
    assert meter.around(call) == ("done", pytest.approx(1 + 100 + 1000))
    source = "RAPL intel-rapl:0 (package-0) + RAPL intel-rapl:0:1 (dram) + RAPL intel-rapl:1 (package-1)"
    assert meter.facts() == {"kind": "measured", "source": source, "reason": None}


def test_a_counter_that_began_again_is_continued_at_its_range(tmp_path: Path) -> None:
    package = zone(tmp_path, "0", "package-0", 90_000_000, wraps_at=100_000_000)
    meter = EnergyMeter(tuple(rapl(tmp_path)[0]))
    _, joules = meter.around(lambda: (package / "energy_uj").write_text("5000000"))
    assert joules == pytest.approx(100 - 90 + 5)


def test_why_there_is_no_counter_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    meter = energy_meter(None, [CPU])
    assert meter.around(lambda: 7) == (7, None)
    assert meter.reason == f"no RAPL counter in {tmp_path / 'none'}; timing.watts=WATTS gives an estimate"
    package = zone(tmp_path, "0", "package-0", 1)
    monkeypatch.setattr(energy, "_microjoules", _forbidden(package / "energy_uj"))
    assert rapl(tmp_path) == (
        [],
        f"RAPL counters are not readable by this user ({package / 'energy_uj'}; sudo chmod a+r lets it)",
    )
    (package / "max_energy_range_uj").write_text("many")
    monkeypatch.undo()
    assert "could not be read: invalid literal" in str(rapl(tmp_path)[1])


def _forbidden(file: Path) -> Callable[[Path], float]:
    """Reading `file` is for root alone, as the kernel has it since 5.10; a test may be run by root."""
    read = energy._microjoules

    def microjoules(asked: Path) -> float:
        if asked == file:
            raise PermissionError(13, "Permission denied", str(file))
        return read(asked)

    return microjoules


class FakeNvml:
    """Two cards, in millijoules."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.is_begun = refuses, False
        self.millijoules = {"GPU-a": 1_000, "GPU-b": 50_000}
        self.NVMLError = type("NVMLError", (Exception,), {})

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_begun = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        assert self.is_begun
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if self.refuses:
            raise self.NVMLError("Not Supported")
        return self.millijoules[handle]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {0: "b", 1: "a"}  # torch's first device is NVML's second
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: SimpleNamespace(uuid=ids[one.index]))


@pytest.mark.usefixtures("cards")
def test_a_gpu_is_found_by_its_uuid_and_the_processor_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    package = zone(tmp_path, "0", "package-0", 0)
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    meter = energy_meter(None, [GPU])

    def call() -> None:
        library.millijoules.update({"GPU-a": 900_000, "GPU-b": 50_000 + 2_500})
        (package / "energy_uj").write_text("4000000")

    assert meter.around(call)[1] == pytest.approx(2.5 + 4)
    assert meter.facts()["source"] == "NVML cuda:0 + RAPL intel-rapl:0 (package-0)"
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    assert energy_meter(None, [GPU]).facts()["source"] == "NVML cuda:0"


@pytest.mark.usefixtures("cards")
def test_a_gpu_without_a_counter_is_not_metered_by_the_processor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone(tmp_path, "0", "package-0", 0)
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(refuses=True))
    meter = energy_meter(None, [GPU])
    assert meter.counters == ()
    assert str(meter.reason).startswith("NVML counts no energy here: Not Supported")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install 'draftsmith[energy]'" in str(nvml([GPU])[1])


def test_stated_watts_times_seconds_are_an_estimate_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(energy.time, "perf_counter", lambda: next(clock))
    meter = energy_meter(40.0, [CPU])
    _, joules = meter.around(lambda: None)
    assert joules == pytest.approx(100.0)
    entry = energy_entry("batch 1", "ours", [[100.0, 50.0]], meter, 0)
    assert entry == {
        "where": "batch 1",
        "arm": "ours",
        "kind": "estimate",
        "source": "40 W as timing.watts states",
        "reason": None,
        "joules_per_token": 2.0,
        "joules_per_token_ci95": None,
        "by_batch": [[100.0, 50.0]],
    }
    table = energy_table({"energy": [entry]})
    assert table.cells == [["batch 1", "ours", "2.000 (estimate)", "estimate: 40 W as timing.watts states"]]
    assert "it says what times say" in table.note


@pytest.mark.parametrize("watts", [0.0, -5.0, float("inf"), float("nan")])
def test_watts_are_above_zero(watts: float) -> None:
    with pytest.raises(ConfigError, match="timing.watts"):
        TimingConfig(watts=watts)


def test_the_meter_stands_around_every_call_of_the_timed_run_and_nothing_else() -> None:
    meter, seen = stepping(1.5), []
    arms = [FakeArm("a"), FakeArm("b")]
    samples = interleave(arms, prompts(3), 4, 2, 0, 1, "x", lambda: seen.append(meter.counters[0].read()), meter)
    every = [one for groups in samples.values() for group in groups for one in group]
    assert [one.joules for one in every] == [1.5] * 12
    assert len(seen) == 6
    assert energy_pairs(samples["a"]) == [[3.0, 8.0]] * 3
    without = interleave(arms, prompts(3), 4, 1, 0, 1, "x")
    assert energy_pairs(without["a"]) is None


def test_joules_per_token_are_the_median_over_prompts_with_its_interval() -> None:
    estimate = joules_per_token(JOULES["ours"], 0)
    assert estimate is not None
    assert (estimate.value, estimate.ci95) == (2.0, (1.0, 4.0))
    assert joules_per_token([[3.0, 0.0]], 0) is None
    assert joules_per_token(None, 0) is None


def row_with(meter: EnergyMeter, joules: float | None) -> dict[str, Any]:
    samples = timed_samples("d k=2")
    ours = [[replace(one, joules=joules) for one in group] for group in samples["d k=2"]]
    scope = Scope("code", range(3))
    return make_row(CHAIN, scope, {**samples, "d k=2": ours}, COSTS, None, 1, "float32", 3, meter).model_dump()


def test_a_row_has_joules_per_token_or_null_with_the_reason() -> None:
    row = row_with(stepping(1.0), 22.0)
    assert (row["energy_j_per_token"], row["energy_kind"], row["energy_reason"]) == (2.0, "measured", None)
    assert row["energy_j_per_token_ci95"] == [2.0, 2.0]
    row = row_with(EnergyMeter(reason="no counter"), None)
    assert (row["energy_j_per_token"], row["energy_kind"], row["energy_reason"]) == (None, None, "no counter")


def test_pages_say_why_nothing_was_measured() -> None:
    entries = [energy_entry("batch 1", arm, None, EnergyMeter(reason="no counter"), 0) for arm in "ab"]
    table = energy_table({"energy": entries})
    assert (table.rows, table.reason) == ([], "Not measured: no counter.")
    assert energy_table({}).reason == ""


def test_rounds_are_merged_and_runs_pooled_and_what_was_metered_otherwise_is_not_added() -> None:
    meter = stepping(1.0)
    one, other = (energy_entry("w", "a", [[joules, 10.0]], meter, 0) for joules in (10.0, 30.0))
    (both,) = merged([one, other], 0)
    assert (both["joules_per_token"], both["joules_per_token_ci95"]) == (2.0, [1.0, 3.0])
    (pooled,) = pooled_energy([{"energy": [one]}, {"energy": [other]}], 0)["energy"]
    assert (pooled["joules_per_token"], pooled["joules_per_token_ci95"]) == (2.0, None)
    estimate = energy_entry("w", "a", [[10.0, 10.0]], energy_meter(40.0, [CPU]), 0)
    (mixed,) = merged([one, estimate], 0)
    assert mixed["joules_per_token"] is None
    assert mixed["reason"] == "metered in different ways: fake (measured), 40 W as timing.watts states (estimate)"
    nothing = energy_entry("w", "a", None, EnergyMeter(reason="no counter"), 0)
    assert same_facts([one, nothing])["reason"] == "no counter"
    assert pooled_energy([{"energy": [one]}, {}], 0) == {"energy": None}
    assert pooled_energy([{}, {}], 0) == {}


def test_rows_of_several_runs_are_pooled_and_rows_of_earlier_versions_too() -> None:
    low, high = (row_with(stepping(1.0), joules) for joules in (11.0, 33.0))
    pooled = pooled_row([Row(**low), Row(**high)], 0)
    assert (pooled.energy_j_per_token, pooled.energy_kind, pooled.joules_by_prompt) == (2.0, "measured", None)
    before = {key: value for key, value in low.items() if key not in ("energy_kind", "joules_by_prompt")}
    before |= {"energy_j_per_token": None, "energy_reason": "not measured"}
    pooled = pooled_row([Row(**low), Row(**before)], 0)
    assert (pooled.energy_j_per_token, pooled.energy_reason) == (None, "not measured")


def test_published_pages_of_a_time_before_energy_was_metered_are_as_they_were() -> None:
    summary = page_of(read_results(PUBLISHED / "toy.json")).markdown()
    assert "Energy: not measured: this report reads no energy counter." in summary
    assert "## Energy" not in summary


def test_paces_alone_are_not_metered() -> None:
    assert energy_pairs(at_paces(0.1)) is None
