"""What the job `rates` says of its samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

import common
import rates_job

NAME = "calls_per_s"


def told(tmp_path: Path, hooked: list[float], plain: list[float]) -> common.Result:
    result = common.Result(tmp_path / "rates.json", "rates", {})
    rates_job.tell(1, result, {"hooked0": {NAME: hooked}, "unhooked0": {NAME: plain}})
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
