"""What the conformance job reads from the program's output."""

from __future__ import annotations

import sys

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

import conformance


def test_the_last_totals_of_the_output_count() -> None:
    output = "ok      one_case\n1 passed, 0 failed\nok      another_case\n51 passed, 0 failed\n"
    assert conformance.verdict(output) == "51 passed, 0 failed"


def test_output_without_totals_is_said_to_have_none() -> None:
    assert conformance.verdict("ok      one_case\n") == "no totals in its output"
