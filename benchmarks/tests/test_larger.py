"""What the job `larger` makes of its samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

import larger_job
import larger_models
from common import Result

PARAMETERS = 6_738_415_616
RATES = {"in_gb_s": 50.0, "out_gb_s": 40.0}


@pytest.mark.parametrize(
    ("compute_s", "over_bound"),
    [
        # 2 * (26.95 - 6) + (53.91 - 3) GB come in: 1.86 s at 50 GB/s; 71.9 GB go out: 1.80 s at 40 GB/s.
        (2.4, 1.25),
        (1.0, 3.0 / 1.856),
    ],
)
def test_bound_is_the_larger_of_compute_and_the_link(compute_s: float, over_bound: float) -> None:
    found = larger_models.against_bound([2.9, 3.0, 3.1], [compute_s], PARAMETERS, RATES)
    assert found["step_s"] == 3.0 and found["compute_s"] == compute_s
    assert found["link_s"] == pytest.approx(1.856, rel=1e-3)
    assert found["over_bound"] == pytest.approx(over_bound, rel=1e-3)


def test_7b_is_compared_with_its_bound(tmp_path: Path) -> None:
    result = Result(tmp_path / "result.json", "larger", {})
    result.data["baseline"] = {}
    result.data["facts"] = {"7b": {"parameters": PARAMETERS, "losses": [1.0]}, "7b_bound": {"link": RATES}}
    for series, value in (("7b_step_s", 3.0), ("7b_bound_step_s", 2.5), ("7b_in_bytes_a_step", 120e9), ("7b_out_bytes_a_step", 90e9)):
        result.sample(series, value)
    larger_models.compare(result)
    found = result.data["baseline"]["7b"]
    assert (found["in_gb_s"], found["in_over_link"], found["out_gb_s"]) == (40.0, 0.8, 30.0)
    assert found["over_bound"] == 1.2 and found["in_over_least"] > 1
    assert result.data["checks"] == [], "there are no losses to compare"
    result.data["facts"]["7b_bound"]["losses"] = [2.0]
    larger_models.compare(result)
    assert [check["passed"] for check in result.data["checks"]] == [False]
    # A run that was cut short has no bound to compare with.
    del result.data["baseline"]["7b"], result.data["samples"]["7b_bound_step_s"]
    larger_models.compare(result)
    assert "7b" not in result.data["baseline"]


def test_every_row_has_a_shape_and_a_reference_that_is_a_row() -> None:
    shapes = {name: row.shape for name, row in larger_job.BY_NAME.items()}
    assert set(shapes.values()) == set(larger_models.SHAPES) and len(shapes) == len(larger_job.ROWS)
    assert {row.reference for row in larger_job.ROWS} - {""} <= set(shapes)
    assert (shapes["7b_bound"], shapes["lora14_third"]) == ("7b", "14b")
    references = {name: row.reference for name, row in larger_job.BY_NAME.items() if row.reference}
    assert (references["tenth"], references["infer_half"], references["lora14_third"]) == ("resident", "infer", "lora14")


def test_rows_that_page_are_tenants() -> None:
    plain = {row.name for row in larger_job.ROWS if not row.is_paged}
    assert plain == {"resident", "save_on_cpu", "infer", "lora", "lora14", "7b_bound", "fsdp2", "torchao"}
