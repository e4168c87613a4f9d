"""Two tenants of one family: one lends a bucket by a CUDA IPC handle, the other copies from it.

    python examples/families.py                       # on a GPU; no PyTorch needed
    sublet simulate -- python examples/families.py    # on a simulated one

You see the bytes arrive, a pause of the lender that is refused while the bucket is open and names who has it, and the same
pause that succeeds once it is closed. Without `--family` on both sides the handle would not open.
"""

import sys

import stage

SIZE_BYTES = 8 * stage.MIB


def tenant() -> None:
    """Either side, told what to do line by line."""
    device = stage.device()
    own, opened = device.allocate(SIZE_BYTES), None
    print("ready", flush=True)
    for line in sys.stdin:
        word, *handle = line.split()
        if word == "lend":
            own.write(b"\x05" * SIZE_BYTES)
            print(own.handle(), flush=True)
        elif word == "open":
            opened = device.open(handle[0], SIZE_BYTES)
            own.copy(opened, SIZE_BYTES)
            print("right" if own.read() == b"\x05" * SIZE_BYTES else "WRONG", flush=True)
        elif word == "close" and opened is not None:
            opened.free()
            print("closed", flush=True)


def main() -> None:
    stage.begin(None)
    import sublet

    train, infer = (stage.child(name, "--tenant", options=("--family", "rl")) for name in ("train", "infer"))
    for process in (train, infer):
        stage.ask(process)
    print("the bytes that arrived are", stage.ask(infer, f"open {stage.ask(train, 'lend')}"))
    try:
        sublet.Tenant("train").pause(timeout=1)
    except sublet.Error as error:
        print(f"a pause of the lender meanwhile is refused: {error}")
    print(stage.ask(infer, "close"))
    print("a pause of the lender now:", sublet.Tenant("train").pause())
    sublet.Tenant("train").resume()
    stage.end(train, infer)


if __name__ == "__main__":
    if "--tenant" in sys.argv:
        tenant()
    else:
        main()
