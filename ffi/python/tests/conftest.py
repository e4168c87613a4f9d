"""Tests run where the package is installed, against the simulated driver.

A test marked `tenant("name")` runs as a process of that tenant of its own: the runner starts itself
again under `python -m sublet run`, for that one test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Optional

import pytest

from package_stage import TIMEOUT_S, Stage, python

INSIDE = "SUBLET_TEST_INSIDE"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tenant(name): runs as a process of its own of this tenant")


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A run directory of this test's own."""
    # A socket's path has to be short.
    run_dir = tempfile.mkdtemp(prefix="sublet-")
    stage = Stage(run_dir)
    try:
        yield stage
    finally:
        stage.close()
        shutil.rmtree(run_dir, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Optional[bool]:
    marker = pyfuncitem.get_closest_marker("tenant")
    if marker is None or INSIDE in os.environ:
        return None
    run_dir = tempfile.mkdtemp(prefix="sublet-")
    environment = {**Stage(run_dir).environment(), INSIDE: "1"}
    test = f"{pyfuncitem.path}::{pyfuncitem.nodeid.partition('::')[2]}"
    command = [*python(marker.args[0]), "-m", "pytest", "-q", "-c", str(pyfuncitem.config.inipath), test]
    try:
        ran = subprocess.run(
            command, env=environment, text=True, capture_output=True, timeout=TIMEOUT_S
        )
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    if ran.returncode != 0:
        pytest.fail(f"in a process of its own:\n{ran.stdout}{ran.stderr}", pytrace=False)
    return True
