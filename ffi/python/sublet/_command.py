"""Pauses and resumes that only the ``sublet`` command can carry out: a process cannot have the driver freeze or thaw itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any, Optional

from sublet._errors import RefusedError, UsageError, from_document
from sublet._library import command, command_path
from sublet._native import Library

#: The command's exit code for a command line that it does not understand, of which it prints no document.
_NOT_UNDERSTOOD = 2


def run(action: str, *arguments: str, timeout_ms: int = 0, done: Optional[list[str]] = None) -> dict[str, Any]:
    """Runs the command, and returns its report, or both halves of a swap, in the library's form.

    Blocks until the command ends, which has a limit for each of its phases. Ctrl-C calls the command off. If that comes
    too late, ``done`` has its output.

    Raises:
        UsageError, RetryError, RefusedError, OutOfDeviceMemory, OutOfHostMemory, LostError: as the command said.
    """
    limit = [f"--timeout={timeout_ms}ms"] if timeout_ms else []
    # It speaks to the driver for itself, without us in between.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [command_path(), action, "--json", *limit, *arguments]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        child = subprocess.Popen(
            command, env=environment, text=True, stdin=nothing, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        raise RefusedError(f"{action}: cannot start {command[0]}: {error}; install the package again") from error
    with child:
        said = ""
        try:
            said, complaint = child.communicate()
        except BaseException:
            child.send_signal(signal.SIGINT)
            said, _ = child.communicate()
            raise
        finally:
            if said and done is not None:
                done.append(said)
    if not said:
        kind = UsageError if child.returncode == _NOT_UNDERSTOOD else RefusedError
        raise kind(f"{action}: {complaint.strip() or f'{command[0]} ended with {child.returncode}: `sublet ps` says what it left'}")
    document = json.loads(said)
    if action != "swap" or "outcome" not in document:
        return _answer(action, document)
    # A half that was not tried is none, and then the other has failed.
    return {name: _answer(action, document[name]) for name in ("paused", "resumed") if document[name]}


def _answer(action: str, half: dict[str, Any]) -> dict[str, Any]:
    if half.get("outcome", "failed") == "failed":
        raise from_document(action, half)
    report = half["report"] or {}
    return {**report, **{name: half[name] for name in ("outcome", "stayed_bytes", "stays", "paused", "reasons")}}


def is_deep(library: Library, tenant: Optional[str]) -> bool:
    """Is a process of the tenant frozen? ``None`` is the caller's own tenant."""
    members = command(library, "stats", tenant=tenant)["members"]
    return any(member["member"]["state"] == "deep" for member in members)
