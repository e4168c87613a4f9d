"""Two tenants that do not fit together take turns by themselves: the one that begins a turn pauses what is in its way.

    python examples/turns.py                       # on a GPU; no PyTorch needed
    sublet simulate -- python examples/turns.py    # on a simulated one

Each tenant counts in memory of its own, three times, inside `with sublet.turn():`. You see who had to make way for each
turn, and at the end that both have counted to three without a byte wrong. On a GPU with room for both, which 576 MiB free are,
nobody has to; the simulated one is smaller than that.
"""

import sys
import threading

import stage

SIZE_BYTES, TURNS = 288 * stage.MIB, 3


def tenant(fill: int) -> None:
    """A process with memory, which counts in its turns once it is asked to."""
    import sublet

    device = stage.device()
    memory = device.allocate(SIZE_BYTES)
    memory.write(bytes([fill]) * SIZE_BYTES)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(TURNS):
        with sublet.turn() as had:
            if memory.read() != bytes([fill]) * SIZE_BYTES:
                raise SystemExit("wrong bytes")
            fill += 1
            memory.write(bytes([fill]) * SIZE_BYTES)
        print(", ".join(had.paused) or "nobody", flush=True)
    sys.stdin.readline()


def main() -> None:
    stage.begin(None)
    import sublet

    train = stage.child("train", "--fill", "10")
    stage.ask(train)
    # Both do not fit, so the first is away while the second takes its memory.
    sublet.Tenant("train").pause()
    infer = stage.child("infer", "--fill", "100")
    stage.ask(infer)
    counted = {"train": 0, "infer": 0}

    def follow(name: str) -> None:
        process = {"train": train, "infer": infer}[name]
        for number in range(TURNS):
            paused = stage.ask(process, "" if number else "go")
            print(f"{name}, turn {number + 1}: {paused} made way")
            counted[name] += 1

    threads = [threading.Thread(target=follow, args=(name,)) for name in counted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"both have counted to {counted['train']} and {counted['infer']}, and every byte was right")
    stage.end(infer, train)


if __name__ == "__main__":
    if "--fill" in sys.argv:
        tenant(int(sys.argv[-1]))
    else:
        main()
