"""The `sublet` command, as a user has it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from common import EXIT_DEADLINE, ROOT, adopt, child_env, release, stop_child


def find_beside(variable: str, *candidates: str) -> str:
    """A file named by the environment or found in the bundle; the first candidate if none exists."""
    given = os.environ.get(variable)
    if given:
        return given
    for candidate in candidates:
        path = (ROOT / candidate).resolve()
        if path.exists():
            return str(path)
    return str((ROOT / candidates[0]).resolve())


def sublet_bin() -> str:
    """The `sublet` command: $SUBLET_BIN, the bundle's, or a build of the source tree."""
    return find_beside("SUBLET_BIN", "bin/sublet", "target/release/sublet")


def tenant_command(tenant: str | None, cmd: Sequence[str]) -> list[str]:
    """`cmd` under Sublet as `tenant`, or as it is when there is no tenant."""
    if tenant is None:
        return list(cmd)
    return [sublet_bin(), "run", "--join", "--tenant", tenant, "--", *cmd]


def _start(args: Sequence[str]) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sublet_bin(), *args],
        env=child_env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    adopt(child)
    return child


def _end(child: subprocess.Popen[bytes], timeout_s: float) -> tuple[int, str, str]:
    """Exit code and output of a command; EXIT_DEADLINE of one that had to be stopped after `timeout_s`."""
    try:
        out, err = child.communicate(timeout=timeout_s)
        code = child.returncode
    except subprocess.TimeoutExpired as late:
        code, out, err = EXIT_DEADLINE, late.stdout or b"", (late.stderr or b"") + b"\ntimed out"
        stop_child(child)
    release(child)
    return code, out.decode(errors="replace").strip(), err.decode(errors="replace").strip()


def sublet(*args: str, timeout_s: float = 90.0) -> dict[str, Any]:
    """Runs the `sublet` command; a record with exit code, wall time and output, parsed where it is JSON."""
    began = time.perf_counter()
    try:
        child = _start(args)
    except OSError as error:
        return {"args": list(args), "exit": 127, "wall_s": 0.0, "stderr": f"{sublet_bin()}: {error}"}
    code, out, err = _end(child, timeout_s)
    record: dict[str, Any] = {"args": list(args), "exit": code, "wall_s": time.perf_counter() - began}
    parsed = parse_json(out)
    if parsed is None:
        record["stdout"] = out[:8000]
    else:
        record["json"] = parsed
    if err:
        record["stderr"] = err[-2000:]
    return record


def killed(*args: str, after_s: float, victim: int | None = None, timeout_s: float = 30.0) -> dict[str, Any]:
    """Runs `sublet *args --json` and sends SIGKILL after `after_s`, to process `victim` or to the command itself.

    A command that hangs for `timeout_s` after that is stopped, and the record's exit is EXIT_DEADLINE."""
    child = _start([*args, "--json"])
    time.sleep(after_s)
    ended_before = child.poll() is not None
    if victim or not ended_before:
        os.kill(victim or child.pid, signal.SIGKILL)
    began = time.perf_counter()
    code, out, err = _end(child, timeout_s)
    return {
        "args": list(args),
        "delay_s": after_s,
        "ended_before": ended_before,
        "exit": code,
        "after_s": time.perf_counter() - began,
        "json": parse_json(out),
        "said": f"{out}\n{err}".strip(),
    }


def parse_json(text: str) -> Any:
    """`text` as JSON, or its last line that is JSON, or None."""
    for candidate in (text, *reversed(text.splitlines()[-3:])):
        if candidate[:1] in ("{", "["):
            with contextlib.suppress(ValueError):
                return json.loads(candidate)
    return None


def tenants(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The tenants in what `ps --json` or `stats --json` said; none where it failed."""
    document = record.get("json")
    return document.get("tenants", []) if isinstance(document, dict) else []


def did(record: dict[str, Any]) -> bool:
    """Has the command done what it was asked? Memory that nobody can move may stay, if no process was lost."""
    told = record.get("json") or {}
    is_partial = told.get("outcome") == "partial" and not (told.get("report") or {}).get("losses")
    return record["exit"] == 0 or (record["exit"] == 3 and is_partial)


def say(record: dict[str, Any]) -> str:
    """One line about a record of `sublet`."""
    detail = record.get("stderr") or record.get("stdout") or ""
    return f"sublet {' '.join(record['args'])}: exit {record['exit']} in {record['wall_s']:.3f} s {detail[:400]}".strip()
