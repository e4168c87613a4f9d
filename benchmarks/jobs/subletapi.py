"""The `sublet` command and the C functions of libsublet.so, as a user of either has them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from common import EXIT_DEADLINE, JOBS, MIB, JobError, adopt, child_env, release, stop_child


def find_beside(variable: str, *candidates: str) -> str:
    """A file named by the environment or found beside this folder; the first candidate if none exists."""
    given = os.environ.get(variable)
    if given:
        return given
    for candidate in candidates:
        path = (JOBS.parent / candidate).resolve()
        if path.exists():
            return str(path)
    return str((JOBS.parent / candidates[0]).resolve())


def sublet_bin() -> str:
    """The `sublet` command: $SUBLET_BIN, the bundle's, or a build of the source tree."""
    return find_beside("SUBLET_BIN", "bin/sublet", "../target/release/sublet")


def tenant_command(tenant: str | None, cmd: Sequence[str]) -> list[str]:
    """`cmd` under Sublet as `tenant`, or as it is when there is no tenant."""
    if tenant is None:
        return list(cmd)
    return [sublet_bin(), "run", "--tenant", tenant, "--", *cmd]


def sublet(*args: str, timeout_s: float = 90.0) -> dict[str, Any]:
    """Runs the `sublet` command; a record with exit code, wall time and output, parsed where it is JSON."""
    began = time.perf_counter()
    try:
        child = subprocess.Popen(
            [sublet_bin(), *args],
            env=child_env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return {"args": list(args), "exit": 127, "wall_s": 0.0, "stderr": f"{sublet_bin()}: {error}"}
    adopt(child)
    try:
        out, err = child.communicate(timeout=timeout_s)
        code = child.returncode
    except subprocess.TimeoutExpired as late:
        code, out, err = EXIT_DEADLINE, late.stdout or b"", (late.stderr or b"") + b"\ntimed out"
        stop_child(child)
    took = time.perf_counter() - began
    release(child)
    record: dict[str, Any] = {"args": list(args), "exit": code, "wall_s": took}
    text = out.decode(errors="replace").strip()
    parsed = parse_json(text)
    if parsed is None:
        record["stdout"] = text[:8000]
    else:
        record["json"] = parsed
    if err.strip():
        record["stderr"] = err.decode(errors="replace").strip()[-2000:]
    return record


def parse_json(text: str) -> Any:
    """`text` as JSON, or its last line that is JSON, or None."""
    for candidate in (text, *reversed(text.splitlines()[-3:])):
        if candidate[:1] in ("{", "["):
            with contextlib.suppress(ValueError):
                return json.loads(candidate)
    return None


def say(record: dict[str, Any]) -> str:
    """One line about a record of `sublet`."""
    detail = record.get("stderr") or record.get("stdout") or ""
    return f"sublet {' '.join(record['args'])}: exit {record['exit']} in {record['wall_s']:.3f} s {detail[:400]}".strip()


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


class Library:
    """The C functions of libsublet.so, as the process has them through its preload."""

    def __init__(self) -> None:
        lib = ctypes.CDLL(None)
        text, number, wide = ctypes.c_char_p, ctypes.c_int, ctypes.c_uint32
        self.names = {
            "ncclPause": ([ctypes.c_void_p], number),
            "ncclResume": ([ctypes.c_void_p], number),
            "ncclMemStats": ([], number),
            "sublet_pause_tenant": ([text, wide], number),
            "sublet_resume_tenant": ([text, wide], number),
            "sublet_region_begin": ([text, number], number),
            "sublet_region_end": ([], number),
            "sublet_last_error": ([], text),
            "sublet_stats_json": ([ctypes.c_char_p, ctypes.c_size_t], ctypes.c_int64),
        }
        self.missing = []
        self._call: dict[str, Any] = {}
        for name, (arguments, result) in self.names.items():
            try:
                function = getattr(lib, name)
            except AttributeError:
                self.missing.append(name)
                continue
            function.argtypes, function.restype = arguments, result
            self._call[name] = function

    @property
    def present(self) -> bool:
        """Whether every function is there."""
        return not self.missing

    def call(self, name: str, *arguments: Any) -> float:
        """Calls a function whose result must be 0; the seconds it took."""
        if name not in self._call:
            raise JobError(f"{name} is not in this process: it was not started with 'sublet run'")
        began = time.perf_counter()
        code = self._call[name](*arguments)
        took = time.perf_counter() - began
        if code != 0:
            raise JobError(f"{name} returned {code}: {self.last_error()}")
        return took

    def last_error(self) -> str:
        """The library's last message on this thread."""
        text = self._call["sublet_last_error"]() if "sublet_last_error" in self._call else None
        return text.decode(errors="replace") if text else ""

    def stats(self) -> Any:
        """sublet_stats_json as an object, or its text."""
        if "sublet_stats_json" not in self._call:
            return None
        size = 4 * MIB
        buffer = ctypes.create_string_buffer(size)
        length = self._call["sublet_stats_json"](buffer, size)
        if length < 0:
            return {"error": self.last_error(), "code": length}
        text = buffer.value.decode(errors="replace")
        parsed = parse_json(text)
        return text[:8000] if parsed is None else parsed

    @contextlib.contextmanager
    def region(self, tag: str, discard: bool):
        """Device memory allocated by this thread inside belongs to `tag`."""
        self.call("sublet_region_begin", tag.encode(), 1 if discard else 0)
        try:
            yield
        finally:
            self.call("sublet_region_end")


if __name__ == "__main__":
    print("subletapi is a module; the jobs import it")
