"""The job that counts driver calls and CPU time: its arithmetic, and a small run on the simulated driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

JOBS = Path(__file__).resolve().parent.parent

import common  # noqa: E402
import scaling_job  # noqa: E402
from common import Result  # noqa: E402


@pytest.mark.parametrize(("power", "factor"), [(0.0, 5.0), (1.0, 3.0), (2.0, 0.1)])
def test_exponent_is_the_slope_in_a_doubly_logarithmic_picture(power: float, factor: float) -> None:
    points = [(x, factor * x**power) for x in (10.0, 100.0, 1000.0)]
    assert scaling_job.exponent(points) == pytest.approx(power)


def test_exponent_of_nothing_is_nothing() -> None:
    assert scaling_job.exponent([]) == scaling_job.exponent([(10.0, 3.0)]) == 0.0
    assert scaling_job.exponent([(0.0, 1.0), (10.0, 0.0)]) == 0.0


def test_upper_half_leaves_out_where_constants_count() -> None:
    points = [(float(x), 100.0 + x) for x in (10, 100, 1000, 10_000, 100_000)]
    assert [x for x, _ in scaling_job.upper_half(points)] == [1000, 10_000, 100_000]
    assert scaling_job.exponent(scaling_job.upper_half(points)) > scaling_job.exponent(points)
    assert len(scaling_job.upper_half(points[:2])) == 2
    assert [x for x, _ in scaling_job.upper_half(points[:4])] == [100, 1000, 10_000]


def test_parts_add_up() -> None:
    assert scaling_job.spread(10, 8) == [2, 2, 1, 1, 1, 1, 1, 1]
    assert sum(scaling_job.spread(99_999, 7)) == 99_999


def test_least_of_each_place_counts() -> None:
    points = [{"place": 2, "cpu_s": 3.0}, {"place": 1, "cpu_s": 2.0}, {"place": 2, "cpu_s": 1.0}]
    assert scaling_job.least(points, "cpu_s") == [points[1], points[2]]


def test_cpu_time_of_another_process_is_seen() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None and busy.stdout.readline()
        before = scaling_job.process_cpu_s(busy.pid)
        common.wait_until("its CPU time", lambda: scaling_job.process_cpu_s(busy.pid) > before + 0.01, 30)
    finally:
        busy.kill()
        busy.wait()


def test_small_run_counts_calls_exactly(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The job sets it; this has it set back.
    monkeypatch.setenv("SIMCUDA_NODE", "")
    arguments = ["--allocations", "100", "--processes-of-many", "2", "--processes", "2", "--each", "5", "--cycles", "1"]
    args, result = scaling_job.parse(arguments), Result(work / "scaling.json", "scaling", {})
    scaling_job.body(args, result, work)
    calls = {
        (sweep, point["place"], point["action"]): point["driver_calls"]
        for sweep, points in result.data["samples"].items()
        for point in points
    }
    # Unmapped and released; created, mapped and given access.
    assert calls["allocations", 100, "pause"] - calls["allocations", 10, "pause"] == 2 * 90
    assert calls["allocations", 100, "resume"] - calls["allocations", 10, "resume"] == 3 * 90
    assert calls["processes", 2, "pause"] == 2 * calls["processes", 1, "pause"]
    assert result.data["gpu"]["name"] == "simulated GPU"
    assert result.data["summary"]["allocations_pause_driver_calls_exponent"] > 0
