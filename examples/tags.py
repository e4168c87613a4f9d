"""Memory by tag: weights are kept, a KV cache is discarded, and each leaves and comes back by itself.

    python examples/tags.py                       # on a GPU; no PyTorch needed
    sublet simulate -- python examples/tags.py    # on a simulated one

You see what is free on the GPU before, while each tag is away, and after. The weights have their bytes again, at the same
address; what the discarded cache holds is undefined, and nothing of it was copied.
"""

import stage


def main() -> None:
    stage.begin("train")
    import sublet

    device = stage.device()
    with sublet.region("weights"):
        weights = device.allocate(64 * stage.MIB)
    with sublet.region("kv", contents="discard"):
        device.allocate(128 * stage.MIB)
    weights.write(b"\x07" * weights.size_bytes)

    def show(when: str) -> None:
        print(f"{when:32} {stage.mib(device.free_and_total_bytes()[0])} free")

    show("both on the GPU")
    for tag in ("kv", "weights"):
        report = sublet.pause(tags=tag)
        show(f"'{tag}' away, {report.outcome}")
    # The process runs on: here it reads the saved bytes where they lie in host memory.
    print(f"{'':32} first saved byte: {sublet.host_copy(weights)[0]}")
    sublet.resume(tags=["weights", "kv"])
    show("both back")
    same = weights.read() == b"\x07" * weights.size_bytes
    print("the weights are as they were" if same else "the weights are NOT as they were")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
