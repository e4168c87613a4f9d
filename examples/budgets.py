"""A budget of device memory: a tenant sees a smaller GPU, and gets no more than that.

    python examples/budgets.py                       # on a GPU; no PyTorch needed
    sublet simulate -- python examples/budgets.py    # on a simulated one

You see what the driver tells a process with a budget of 128 MiB, an allocation that is refused as on a full GPU, and the
same one that succeeds once `sublet budget` has raised the budget, while the process runs.
"""

import subprocess
import sys

import stage
from device import DriverError


def tenant() -> None:
    """A process with a budget: each line asks it to allocate so many MiB."""
    device = stage.device()
    kept = [device.allocate(64 * stage.MIB)]
    free, total = device.free_and_total_bytes()
    print(f"the GPU has {stage.mib(total)}, {stage.mib(free)} free", flush=True)
    for line in sys.stdin:
        try:
            kept.append(device.allocate(int(line) * stage.MIB))
            print(f"{line.strip()} MiB more: allocated", flush=True)
        except DriverError as error:
            print(f"{line.strip()} MiB more: {error}", flush=True)


def main() -> None:
    stage.begin(None)
    process = stage.child("infer", "--tenant", options=("--budget", "0=128MiB"))
    print("with a budget of 128 MiB:", stage.ask(process))
    print(stage.ask(process, "96"), flush=True)
    subprocess.run([*stage.SUBLET, "budget", "infer", "0=192MiB"], check=True, timeout=60)
    found = stage.ask(process, "96")
    print(found)
    stage.end(process)
    raise SystemExit(0 if "allocated" in found else 1)


if __name__ == "__main__":
    if "--tenant" in sys.argv:
        tenant()
    else:
        main()
