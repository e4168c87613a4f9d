"""What the conformance job reads from the program's output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

import common
import conformance


def test_the_last_totals_of_the_output_count() -> None:
    output = "ok      one_case\n1 passed, 0 failed\nok      another_case\n51 passed, 0 failed\n"
    assert conformance.verdict(output) == "51 passed, 0 failed"


def test_output_without_totals_is_said_to_have_none() -> None:
    assert conformance.verdict("ok      one_case\n") == "no totals in its output"


def test_captures_of_the_simulated_driver_forbid_what_those_of_a_gpu_do(work: Path) -> None:
    script = Path(conformance.__file__).with_name("captured_calls.py")
    done = subprocess.run([sys.executable, str(script)], env=common.child_env(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["differences"] == []
