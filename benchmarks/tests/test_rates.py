"""What the job `rates` says of its samples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

import common
import rates_job

NAME = "calls_per_s"


def told(tmp_path: Path, hooked: list[float], plain: list[float], name: str = NAME) -> common.Result:
    result = common.Result(tmp_path / "rates.json", "rates", {})
    rates_job.tell(1, result, {"hooked0": {name: hooked}, "unhooked0": {name: plain}})
    return result


def test_samples_at_half_speed_do_not_count_as_a_price(tmp_path: Path) -> None:
    result = told(tmp_path, [100.0, 50.0, 50.0, 50.0, 100.0] * 6, [100.0, 100.0, 50.0, 100.0, 100.0] * 6)
    assert [entry["passed"] for entry in result.data["checks"]] == [True]
    figures = result.data["summary"][NAME]
    assert figures["ratio"] == 1.0 and figures["ratio_of_medians"] == 1.0 and figures["hooked"]["best"] == 100.0


def test_a_price_in_every_call_is_told(tmp_path: Path) -> None:
    result = told(tmp_path, [97.0, 50.0] * 15, [100.0, 50.0] * 15)
    assert [entry["passed"] for entry in result.data["checks"]] == [False]
    assert result.data["summary"][NAME]["by_pair"] == [0.97]


def test_a_price_of_cuda_malloc_is_noted_and_fails_nothing(tmp_path: Path) -> None:
    result = told(tmp_path, [90.0] * 30, [100.0] * 30, rates_job.MALLOC + "2_mib_per_s")
    assert result.data["checks"] == [] and "ratio 0.9000" in result.data["notes"][0]


class Told:
    """Ranks that answer every step as they are told."""

    def __init__(self, world: int, answers: dict[str, list[Any]]) -> None:
        self.world, self.answers = world, answers
        self.asked: dict[str, Any] = {}

    def call(self, op: str, _timeout_s: float, **arguments: Any) -> list[Any]:
        self.asked[op] = arguments
        return self.answers[op]


def test_every_figure_is_measured_and_the_slowest_rank_counts(tmp_path: Path) -> None:
    launches = {"op_per_s": [5.0], "graph_per_s": [6.0], "query_per_s": [7.0]}
    answers = {
        "launches": [launches],
        "calls": [{"calls_per_s": 4.0}, {"calls_per_s": 3.0}],
        "all_reduce": [{"bus_gb_s": [340.0]}, {"bus_gb_s": [339.0]}],
        "mallocs": [{"2_mib_per_s": [12.0], "64_mib_per_s": [4.0]}],
    }
    rates = {"torch_launches_per_s": 5.0, "graph_launches_per_s": 6.0, "event_queries_per_s": 7.0, "calls_per_s": 3.0}
    mallocs = {"malloc_free_2_mib_per_s": 12.0, "malloc_free_64_mib_per_s": 4.0}
    args = rates_job.parse(["--out", str(tmp_path / "rates.json")])
    ranks: Any = Told(2, answers)
    assert rates_job.measure(args, ranks) == rates | {"all_reduce_bus_gb_s": 339.0} | mallocs
    alone: Any = Told(1, answers)
    assert rates_job.measure(args, alone) == rates | mallocs and "all_reduce" not in alone.asked
