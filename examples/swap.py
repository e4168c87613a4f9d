"""Two tenants change places, three times: while one leaves the other comes, in bounded device memory.

    python examples/swap.py                       # on a GPU; no PyTorch needed
    sublet simulate -- python examples/swap.py    # on a simulated one

Each tenant holds 64 MiB and counts in it while it has its turn. You see the time of each swap, and at the end that both
have counted to three without a byte wrong.
"""

import sys
import time

import stage

SIZE_BYTES, SWAPS = 64 * stage.MIB, 3


def tenant(fill: int) -> None:
    """A process with memory: each line asks it to count once more."""
    device = stage.device()
    memory = device.allocate(SIZE_BYTES)
    memory.write(bytes([fill]) * SIZE_BYTES)
    print("ready", flush=True)
    for count, _ in enumerate(sys.stdin, 1):
        data = memory.read()
        if data != bytes([fill]) * SIZE_BYTES:
            raise SystemExit("wrong bytes")
        fill += 1
        memory.write(bytes([fill]) * SIZE_BYTES)
        print(count, flush=True)


def main() -> None:
    stage.begin(None)
    import sublet

    train = stage.child("train", "--fill", "10")
    stage.ask(train)
    sublet.Tenant("train").pause()
    infer = stage.child("infer", "--fill", "100")
    stage.ask(infer)
    counted = {}
    for number in range(SWAPS):
        for name, other, process in (("infer", "train", infer), ("train", "infer", train)):
            counted[name] = stage.ask(process, "count")
            began = time.monotonic()
            sublet.Tenant(name).swap_to(other)
            print(f"swap {number + 1}: {name} to {other} in {1000 * (time.monotonic() - began):.0f} ms")
    print(f"both have counted to {counted['train']} and {counted['infer']}, and every byte was right")
    # A process that is away can end too; here it is brought back first, since it waits for its turn.
    stage.end(infer)
    sublet.Tenant("train").resume()
    stage.end(train)


if __name__ == "__main__":
    if "--fill" in sys.argv:
        tenant(int(sys.argv[-1]))
    else:
        main()
