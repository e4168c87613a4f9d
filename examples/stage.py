"""What the short examples stand on: a process under Sublet, on a real GPU or on a simulated one.

`sublet simulate -- python examples/tags.py` runs one on simulated GPUs. Memory is allocated by calls of the driver, so that no
other library is needed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from device import Device

MIB = 1 << 20
_TIMEOUT_S = 300
SUBLET = [sys.executable, "-m", "sublet"]


def begin(tenant: str | None) -> None:
    """Called first. This process comes under Sublet as one of `tenant`, unless that is None."""
    try:
        import sublet
    except ImportError:
        leave("Python finds no 'sublet': cargo xtask wheel, then pip install target/wheels/*.whl")
    if tenant is not None:
        sublet.attach(tenant=tenant)


def leave(why: str) -> NoReturn:
    """Ends the example, which cannot run here."""
    print(f"{Path(sys.argv[0]).name}: {why}", file=sys.stderr)
    sys.exit(2)


def device(ordinal: int = 0) -> Device:
    """A device, current on this thread."""
    return Device(ordinal)


def child(tenant: str, *words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """This example again, as a process of `tenant`: what it prints comes line by line, and it ends with its input."""
    command = [*SUBLET, "run", "--tenant", tenant, *options, "--", sys.executable, sys.argv[0], *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def ask(process: subprocess.Popen[str], line: str = "") -> str:
    """Sends a line and gives the next one that the process prints; the example ends where it has ended."""
    assert process.stdin is not None and process.stdout is not None
    if line:
        process.stdin.write(line + "\n")
    answer = process.stdout.readline()
    if not answer:
        sys.exit(f"a process has ended with {process.wait(_TIMEOUT_S)}")
    return answer.strip()


def end(*processes: subprocess.Popen[str]) -> None:
    """Lets them end."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(_TIMEOUT_S)


def mib(size_bytes: int) -> str:
    """Bytes for a reader."""
    return f"{size_bytes / MIB:.0f} MiB"
