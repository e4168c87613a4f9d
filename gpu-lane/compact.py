"""Makes result files fit to commit: small, and without paths of the machine. No sample is lost.

Reports of the `sublet` command are kept whole for the first and the last of a series; of the others stay the wall time and,
by phase, wall time and each process's time, driver calls and bytes. Usage: compact.py FILE...
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

WHOLE_BYTES_MAX = 190 * 1024


def is_told(value: Any) -> bool:
    """Whether `value` is a record of one run of the command with a report in it."""
    return isinstance(value, dict) and isinstance(value.get("json"), dict) and "report" in value["json"]


def essence(report: dict[str, Any]) -> dict[str, Any]:
    """The figures of a report, one list entry per process."""
    phases = {}
    for phase in report.get("phases", []):
        members = [member.get("report", member) for member in phase.get("members", [])]
        phases[phase["phase"]] = {
            "wall_us": phase["wall_us"],
            **{name: [member.get(name) for member in members] for name in ("elapsed_us", "driver_calls", "bytes")},
        }
    return {"wall_us": report.get("wall_us"), "phases": phases}


def shrink(value: Any, whole: bool = True) -> Any:
    """`value` with the reports inside it reduced, but for those on the edge of their series."""
    if is_told(value):
        kept = {name: value[name] for name in ("args", "exit", "wall_s") if name in value}
        return value if whole else {**kept, "report": essence(value["json"]["report"] or {})}
    if isinstance(value, dict):
        return {name: shrink(inner, whole) for name, inner in value.items()}
    if isinstance(value, list):
        last = len(value) - 1
        deep = last > 1 and any(isinstance(inner, (dict, list)) for inner in value)
        return [shrink(inner, whole and (not deep or index in (0, last))) for index, inner in enumerate(value)]
    return value


def without_paths(text: str) -> str:
    """Absolute paths cut down to their last part; what a command line was cut off at goes too."""
    return re.sub(r"/(?:home|opt|root|tmp|work)(?:/[^\s\"'\\,]*/|/)([^\s\"'\\/,]*)", r"\1", text)


def main(paths: list[str]) -> int:
    """Rewrites the files."""
    for name in paths:
        path = Path(name)
        records = json.loads(without_paths(path.read_text()))
        if path.stat().st_size > WHOLE_BYTES_MAX:
            records = shrink(records)
        text = json.dumps(records, indent=1)
        if len(text) > WHOLE_BYTES_MAX:
            text = json.dumps(records, separators=(",", ":"))
        path.write_text(text + "\n")
        print(f"{path.name}: {len(text) // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
