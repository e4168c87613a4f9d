"""What the short examples stand on: a process under Sublet, on a real GPU or on a simulated one.

`--simulate` runs an example on simulated GPUs: `SUBLET_TEST_SIMCUDA_DIR` names the folder of the simulated driver, as
`cargo xtask test` sets it. Memory is allocated by calls of the driver, so that no other library is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from device import Device

MIB = 1 << 20
_DRIVER = "SUBLET_TEST_SIMCUDA_DIR"
_GPUS, _GPU_BYTES = 2, 512 * MIB
_TIMEOUT_S = 300
SUBLET = [sys.executable, "-m", "sublet"]


def begin(tenant: str | None) -> None:
    """Called first. With --simulate the example runs again, on simulated GPUs, and ends with that. Else this process
    comes under Sublet as one of `tenant`, unless that is None."""
    try:
        import sublet
    except ImportError:
        leave("Python finds no 'sublet': cargo xtask wheel, then pip install target/wheels/*.whl")
    if "--simulate" in sys.argv:
        with tempfile.TemporaryDirectory(prefix="sublet-example-") as place:
            words = [word for word in sys.argv if word != "--simulate"]
            done = subprocess.run([sys.executable, *words], env={**os.environ, **simulated(Path(place), _GPU_BYTES)}, timeout=_TIMEOUT_S)
            sys.exit(done.returncode)
    if tenant is not None:
        sublet.attach(tenant=tenant)


def simulated(place: Path, gpu_bytes: int) -> dict[str, str]:
    """A node of simulated GPUs in `place`, and a run directory; the environment that leads processes to them."""
    driver = os.environ.get(_DRIVER)
    if driver is None or not (Path(driver) / "libcuda.so.1").is_file():
        leave(f"--simulate needs the simulated driver: put `cargo xtask built --python` before it, or set {_DRIVER} to its folder")
    node, run_dir = place / "node", place / "run"
    run_dir.mkdir(mode=0o700)
    for folder in [*(f"dev{number}" for number in range(_GPUS)), "host"]:
        (node / folder).mkdir(parents=True)
        (node / folder / "ledger").write_bytes(bytes(8))
    sizes = " ".join([str(gpu_bytes)] * _GPUS)
    (node / "node.conf").write_text(f"id = {os.urandom(16).hex()}\nversion = 13000\ncapacities_bytes = {sizes}\n")
    return {"SIMCUDA_NODE": str(node), "LD_LIBRARY_PATH": str(driver), "SUBLET_RUN_DIR": str(run_dir)}


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
