"""What came out, on one screen? Prints a table of the records in a folder of results.

`python3 summary.py FOLDER`. Takes well under a second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: Samples from which on a p99 says something.
LONG_SERIES = 100


def number(value: Any) -> str:
    """A short number, or a dash."""
    return f"{value:.4g}" if isinstance(value, (int, float)) else "-"


def medians(summary: dict[str, Any]) -> list[str]:
    """One line per figure."""
    lines = []
    for name, entry in summary.items():
        if not isinstance(entry, dict):
            lines.append(f"{name} {number(entry)}")
        elif "ratio" in entry:
            hooked, plain = entry["hooked"]["median"], entry["unhooked"]["median"]
            lines.append(f"{name}: hooked {number(hooked)}, unhooked {number(plain)}, ratio {entry['ratio']:.4f}")
        elif "median" in entry:
            lines.append(f"{name} median {number(entry['median'])}, p99 {number(entry['p99'])}, n {entry['count']}")
        else:
            parts = [f"{k} {number(v.get('median', v.get('all')) if isinstance(v, dict) else v)}" for k, v in entry.items()]
            lines.append(f"{name}: " + ", ".join(parts))
    return lines


def phases(table: dict[str, Any]) -> list[str]:
    """One line per action: its phases, in ms, with driver calls."""
    lines = []
    for key, rows in table.items():
        if "elapsed_us" in rows:
            key, rows = key.split(".")[0], {key: rows}
        parts = []
        for name, row in rows.items():
            took, calls = row["elapsed_us"], row["driver_calls"]["median"]
            slow = f" (p99 {number((took['p99'] or 0) / 1000)})" if took["count"] >= LONG_SERIES else ""
            parts.append(f"{name} {number((took['median'] or 0) / 1000)}{slow} ms/{number(calls)} calls")
        if parts:
            lines.append(f"phases {key}: " + ", ".join(parts))
    return lines


def show(record: dict[str, Any]) -> None:
    gpu = record.get("gpu") or {}
    gpus = (record.get("parameters") or {}).get("gpus") or gpu.get("count")
    print(f"\n{record['name']}: {record['status'].upper()}  ({gpus} x {gpu.get('name')}, {record.get('date')})")
    for entry in record.get("checks", []):
        if not entry["passed"]:
            print(f"  FAIL {entry['what']}: {' '.join(entry['detail'].split())[:220]}")
    passed = sum(entry["passed"] for entry in record.get("checks", []))
    print(f"  {passed} of {len(record.get('checks', []))} checks passed, {record.get('nccl_warnings', 0)} NCCL WARN lines")
    for line in medians(record.get("summary") or {}) + phases(record.get("phases") or {}):
        print(f"  {line[:400]}")
    baseline = record.get("baseline") or {}
    parts = [f"{k} {number(v['median'])}" for k, v in baseline.items() if isinstance(v, dict) and "median" in v]
    if parts:
        print(f"  baseline: {', '.join(parts)}"[:240])
    for note in record.get("notes", []):
        print(f"  note: {' '.join(note.split())[:240]}")


def main() -> int:
    """All files of the folder; 1 when a record did not pass."""
    if "--dry-run" in sys.argv or len(sys.argv) < 2:
        print("dry run of summary")
        return 0
    bad = 0
    files = sorted(Path(sys.argv[1]).glob("*.json"))
    for path in files:
        try:
            records = json.loads(path.read_text())
        except ValueError as error:
            print(f"{path.name}: {error}")
            bad += 1
            continue
        for record in records if isinstance(records, list) else []:
            if "status" in record:
                try:
                    show(record)
                except (KeyError, TypeError, ValueError) as error:
                    print(f"  (record {record.get('name')} cannot be shown: {error})")
                bad += record["status"] != "passed"
    print(f"\n{len(files)} result files, {bad} records not passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
