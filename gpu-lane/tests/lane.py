"""What tests of the GPU lane's jobs stand on: their modules, and a folder with the simulated driver."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = tuple(ROOT / name for name in ("gpu-lane", "gpu-tests", "benchmarks"))
sys.path[:0] = map(str, FOLDERS)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job's folder, with the simulated driver and a run directory; nothing outlives it."""
    import common  # written for Python 3.11

    with tempfile.TemporaryDirectory(prefix="sublet-") as folder:
        monkeypatch.setenv("LD_LIBRARY_PATH", os.environ["SUBLET_TEST_SIMCUDA_DIR"])
        monkeypatch.setenv("SUBLET_BIN", os.environ["SUBLET_TEST_BIN"])
        monkeypatch.setenv("SUBLET_RUN_DIR", folder)
        monkeypatch.setenv("SUBLET_FILE_DIR", folder)
        yield Path(folder)
        common.stop_children()
