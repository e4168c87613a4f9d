"""The examples in the package's documentation run, each as the tenant `train` on the simulated driver."""

from __future__ import annotations

import doctest
import importlib
import inspect
import subprocess
import sys

import pytest

import simdriver
import sublet

MODULES = ("_errors", "_library", "_memory", "_pausing", "_regions", "_report", "_tenants", "_turns", "ray")


def examples() -> list[doctest.DocTest]:
    """One test for each docstring with an example."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = {
        "allocate": simdriver.allocate,
        "subprocess": subprocess,
        "sublet": sublet,
        "sys": sys,
    }
    found = []
    for name in MODULES:
        module = importlib.import_module(f"sublet.{name}")
        for public in vars(module).values():
            ours = getattr(public, "__module__", "").startswith("sublet")
            if ours and (inspect.isclass(public) or inspect.isfunction(public)):
                found += finder.find(public, public.__name__, module=False, extraglobs=names)
    unique = {test.name: test for test in found if test.examples}
    return list(unique.values())


@pytest.mark.tenant("train")
@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_example_does_what_it_says(example: doctest.DocTest) -> None:
    held = simdriver.allocate(2 * simdriver.MIB)
    said: list[str] = []
    options = doctest.ELLIPSIS
    runner = doctest.DocTestRunner(optionflags=options)
    assert runner.run(example, out=said.append).failed == 0, "".join(said)
    held.free()


def test_what_a_user_calls_first_has_an_example() -> None:
    documented = {test.name for test in examples()}
    assert {"region", "pause", "resume", "stats", "Tenant", "host_copy"} <= documented
