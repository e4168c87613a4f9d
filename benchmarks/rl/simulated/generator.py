"""The simulated generator: its own weights, a KV cache and workspace on a device."""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from device import Device, Memory
from rl.links import Worker
from rl.simulated.policy import digest, unpacked, write_texts

_CONTENTS: dict[str, Any] = {"weights": "discard", "graphs": "keep", "kv": "discard"}
_KV_BYTES_PER_TOKEN = 4096


class Generator:
    """One process of the generator."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        import sublet

        self._worker = Worker("infer", rank)
        self._args, self._device = args, Device(rank)
        # The orchestrator pauses a tag only between two requests.
        self._region = partial(sublet.region, runs_without=True)
        self._sizes = {"weights": args.weights_bytes, "graphs": args.graphs_bytes, "kv": args.kv_bytes}
        self._memory: dict[str, Memory] = {}
        self._arrive(["weights", "graphs", "kv"])
        total = self._device.total_bytes()
        facts = {"device": rank, "name": "simulated GPU", "total_bytes": total, "context_bytes": args.context_bytes}
        kv = {"kv_bytes_per_token": _KV_BYTES_PER_TOKEN}
        self._worker.hello(gpu=facts, parts={}, versions={}, **kv)

    def run(self) -> None:
        """Serves until it is told to end."""
        operations: dict[str, Any] = {
            "borrow": self._borrow, "load": self._load, "generate": self._generate, "leave": self._leave, "arrive": self._arrive,
        }  # fmt: skip
        self._worker.serve(operations, until="exit")

    def _borrow(self, handle: str, begin: int, bytes: int) -> None:
        opened = self._device.open(handle, bytes)
        self._memory["weights"].copy(opened, bytes, to=begin)
        opened.free()

    def _load(self, path: str) -> None:
        self._memory["weights"].write(Path(path).read_bytes())

    def _generate(self, ids: list[str], tokens: int, seed: int) -> dict[str, Any]:
        until = time.monotonic() + self._args.generate_s
        data = self._memory["weights"].read()
        _, logits = unpacked(data)
        texts = write_texts(logits, seed, len(ids), tokens)
        # The cache is scratch: what a pause left there is never read.
        self._memory["kv"].write("".join(texts).encode())
        time.sleep(max(0.0, until - time.monotonic()))
        return {"completions": texts, "fingerprint": digest(data), "tokens": len(texts) * tokens}

    def _leave(self, parts: list[str]) -> int:
        for part in parts:
            self._memory.pop(part).free()
        # Weights come again with each hand-over, so that nothing is kept.
        return 0

    def _arrive(self, parts: list[str]) -> None:
        for part in parts:
            with self._region(part, contents=_CONTENTS[part]):
                self._memory[part] = self._device.allocate(self._sizes[part])


def main() -> None:
    """A process of the generator, as the conductor starts it."""
    parser = argparse.ArgumentParser()
    for name in ("--weights-bytes", "--graphs-bytes", "--kv-bytes", "--context-bytes"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--generate-s", type=float, required=True)
    Generator(parser.parse_args(), int(os.environ["RL_GRPO_RANK"])).run()


if __name__ == "__main__":
    main()
