"""Joules that are not added, added twice, of the wrong call, or not said to be an estimate."""

from __future__ import annotations

from tests.eval import test_energy
from tests.faults import Fault, noticed_by

FAULTS: list[Fault] = [
    *noticed_by(
        test_energy.test_packages_and_memory_are_added_and_what_contains_or_is_in_them_is_not,
        ("eval.measure.energy:rapl", 'or name == "dram"', 'or name == "core"'),
        ("eval.measure.energy:rapl", 'name.startswith("package")', 'name.startswith("p")'),
        ("eval.measure.energy:EnergyMeter.around", "sum(spent)", "spent[0]"),
        ("eval.measure.energy:_microjoules", "/ 1e6", "/ 1e3"),
    ),
    *noticed_by(
        test_energy.test_a_counter_that_began_again_is_continued_at_its_range,
        ("eval.measure.energy:Counter.since", "grown + self.wraps_at", "0.0"),
    ),
    *noticed_by(
        test_energy.test_a_gpu_is_found_by_its_uuid_and_the_processor_is_added,
        ("eval.measure.energy:energy_meter", "(*of_gpus, *of_processor)", "(*of_gpus,)"),
        ("eval.measure.energy:_millijoules", "/ 1e3", "/ 1e6"),
    ),
    *noticed_by(
        test_energy.test_a_gpu_without_a_counter_is_not_metered_by_the_processor_alone,
        ("eval.measure.energy:energy_meter", "no_gpus if gpus else no_processor", "no_processor"),
    ),
    *noticed_by(
        test_energy.test_stated_watts_times_seconds_are_an_estimate_and_marked,
        ("eval.measure.energy:energy_meter", 'kind="estimate"', 'kind="measured"'),
        ("eval.render.page:_joules", '(estimate)"', '"'),
    ),
    *noticed_by(
        test_energy.test_the_meter_stands_around_every_call_of_the_timed_run_and_nothing_else,
        ("eval.measure.timed_run:interleave", "replace(sample, joules=joules)", "sample"),
        ("eval.results.energy:energy_pairs", "sum(joules)", "max(joules)"),
    ),
    *noticed_by(
        test_energy.test_rounds_are_merged_and_runs_pooled_and_what_was_metered_otherwise_is_not_added,
        ("eval.results.energy:same_facts", "!= first", "is None"),
    ),
]
