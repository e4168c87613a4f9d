"""Where the modules of the jobs are, and the fixture `work`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "gpu-lane" / "tests"))

from lane import work  # noqa: E402, F401
