"""What the phases of pauses and resumes took, gathered over many of them."""

from __future__ import annotations

from typing import Any

import common

#: The figures of one process in one phase.
FIGURES = ("elapsed_us", "driver_calls", "bytes")


def phase_table(report: Any) -> dict[str, dict[str, float]]:
    """Per phase: slowest member's elapsed_us, sums of driver_calls and bytes, number of members.

    Reads any nesting: `["Phase", {...}]`, `{"phase": "Phase", ...}` or `{"Phase": {...}}`, as long as the
    innermost object has `elapsed_us`.
    """
    table: dict[str, dict[str, float]] = {}

    def add(name: str, entry: dict[str, Any]) -> None:
        row = table.setdefault(name, {"elapsed_us": 0, "driver_calls": 0, "bytes": 0, "members": 0})
        row["elapsed_us"] = max(row["elapsed_us"], entry.get("elapsed_us") or 0)
        row["driver_calls"] += entry.get("driver_calls") or 0
        row["bytes"] += entry.get("bytes") or 0
        row["members"] += 1

    def walk(node: Any, name: str) -> None:
        if isinstance(node, dict):
            own = node.get("phase") or node.get("name")
            name = own if isinstance(own, str) else name
            if "elapsed_us" in node and ("driver_calls" in node or "steps" in node):
                add(name, node)
                return
            for key, value in node.items():
                walk(value, name if key in ("members", "report", "phases", "reports") else str(key))
        elif isinstance(node, list):
            if len(node) == 2 and isinstance(node[0], str) and isinstance(node[1], dict):
                walk(node[1], node[0])
            else:
                for value in node:
                    walk(value, name)

    walk(report, "?")
    return table


def copied_bytes(report: Any) -> int:
    """Contents that a pause has copied to the host, whichever phase that was in, by any nesting of its report."""
    if isinstance(report, dict):
        kept = report.get("kept") or {}
        return int(kept.get("copied_bytes", 0)) + sum(copied_bytes(value) for key, value in report.items() if key != "kept")
    return sum(copied_bytes(value) for value in report) if isinstance(report, list | tuple) else 0


class Phases:
    """Series by action and phase: the wall time of each, and what its processes took."""

    def __init__(self) -> None:
        self.walls: dict[str, dict[str, list[float]]] = {}
        self.members: dict[str, dict[str, dict[str, list[float]]]] = {}

    def add(self, action: str, report: dict[str, Any]) -> None:
        """Adds a report of the command."""
        for phase in report.get("phases", []):
            self.walls.setdefault(action, {}).setdefault(phase["phase"], []).append(phase["wall_us"])
        self.add_members(action, report.get("phases"))

    def add_members(self, action: str, told: Any) -> None:
        """Adds what processes took, wherever in `told` it stands."""
        table = self.members.setdefault(action, {})
        for name, row in phase_table(told).items():
            for figure in FIGURES:
                table.setdefault(name, {}).setdefault(figure, []).append(row[figure])

    def flat_walls(self) -> dict[str, list[float]]:
        """The wall times, by "action.Phase"."""
        return {f"{action}.{name}": values for action, table in self.walls.items() for name, values in table.items()}

    def summaries(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Of what the processes took: by action, phase and figure."""
        return {
            action: {name: {k: common.summarise(v) for k, v in row.items()} for name, row in table.items()}
            for action, table in self.members.items()
        }

    def print(self) -> None:
        """The wall times as a table."""
        print(f"{'phase':<28}{'n':>6}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}")
        for name, values in self.flat_walls().items():
            row = common.summarise(values)
            figures = "".join(f"{(row[key] or 0) / 1000:>10.2f}" for key in ("median", "p99", "max"))
            print(f"{name:<28}{row['count']:>6}{figures}")
