"""The simulated trainer: weights, optimizer and cached blocks on a device, changed a little in each step."""

from __future__ import annotations

import argparse
import mmap
import os
import time
from functools import partial
from typing import Any

from device import Device, Memory
from rl.links import Worker
from rl.simulated.policy import LETTERS, digest, packed, unpacked, update

_BUCKET_BYTES = 4 << 20


class Trainer:
    """One process of the trainer."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        import sublet

        self._worker = Worker("train", rank)
        self._host_copy, self._args = sublet.host_copy, args
        self._device = Device(rank)
        self._spare: dict[str, bytes] = {}
        self._memory: dict[str, Memory] = {}
        sizes = {"weights": args.weights_bytes, "optimizer": 2 * args.weights_bytes, "caches": args.caches_bytes}
        # The orchestrator pauses a tag only between two requests.
        self._region = partial(sublet.region, runs_without=True)
        for tag, size_bytes in sizes.items():
            with self._region(tag):
                self._memory[tag] = self._device.allocate(size_bytes)
        zeros = [0.0] * len(LETTERS)
        self._memory["weights"].write(packed(zeros, 0, sizes["weights"]))
        self._memory["optimizer"].write(packed(zeros, 0, sizes["optimizer"]))
        self._bucket: Any = None
        self._sizes = sizes
        total = self._device.total_bytes()
        facts = {"device": rank, "name": "simulated GPU", "total_bytes": total, "context_bytes": args.context_bytes}
        self._worker.hello(gpu=facts, parts={}, versions={})

    def run(self) -> None:
        loss = reward = None
        for step in range(self._args.steps):
            data = self._memory["weights"].read()
            fingerprint = digest(data)
            figures = {"loss": loss, "reward": reward}
            self._worker.say(op="rollout", step=step, fingerprint=fingerprint, ids=self._prompts(step), **figures)
            answer = self._worker.serve(self._operations(), until="completions")["args"]
            if answer.get("failed"):
                self._report_failure(fingerprint)
                return
            loss, reward = self._train(step, answer["groups"])
        data = self._memory["weights"].read()
        self._worker.say(op="done", loss=loss, reward=reward, fingerprint=digest(data))
        self._worker.serve({"sha": lambda: digest(data)}, until="exit")

    def _prompts(self, step: int) -> list[str]:
        return [f"write {step:02d} letters: "] * self._args.generations

    def _train(self, step: int, groups: list[list[str]]) -> tuple[float, float]:
        until = time.monotonic() + self._args.train_s
        if "caches" not in self._memory:
            with self._region("caches"):
                self._memory["caches"] = self._device.allocate(self._sizes["caches"])
        at, logits = unpacked(self._memory["weights"].read())
        since, momentum = unpacked(self._memory["optimizer"].read())
        if (at, since) != (step, step):
            raise ValueError(f"weights are of step {at}, optimizer of {since}, not of {step}")
        logits, momentum, loss, reward = update(logits, momentum, groups)
        self._memory["weights"].write(packed(logits, step + 1, self._sizes["weights"]))
        self._memory["optimizer"].write(packed(momentum, step + 1, self._sizes["optimizer"]))
        time.sleep(max(0.0, until - time.monotonic()))
        return loss, reward

    def _report_failure(self, expected: str) -> None:
        """After a generator has died: what this process holds is as it was."""
        same = digest(self._memory["weights"].read()) == expected
        self._worker.say(op="done", loss=None, reward=None, fingerprint=expected, intact=same)
        self._worker.serve({}, until="exit")

    def _operations(self) -> dict[str, Any]:
        return {
            "lend": self._lend, "lent": self._lent, "write": self._write, "leave": self._leave, "arrive": self._arrive,
            "leave_groups": lambda: None, "join_groups": lambda: None, "trim": self._trim,
        }  # fmt: skip

    def _lend(self, index: int) -> Any:
        begin = index * _BUCKET_BYTES
        if begin >= self._sizes["weights"]:
            return None
        if self._bucket is None:
            with self._region("bucket"):
                self._bucket = self._device.allocate(_BUCKET_BYTES)
        size_bytes = min(_BUCKET_BYTES, self._sizes["weights"] - begin)
        self._bucket.copy(self._memory["weights"], size_bytes, at=begin)
        return {"handle": self._bucket.handle(), "begin": begin, "bytes": size_bytes}

    def _lent(self) -> None:
        self._bucket.free()
        self._bucket = None

    def _write(self, path: str, away: bool) -> int:
        """Writes the weights to a file in memory: from what the pause saved, or from where they are."""
        if "weights" in self._spare:
            data: Any = self._spare["weights"]
        else:
            data = self._host_copy(self._memory["weights"]) if away else self._memory["weights"].read()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Reserved before it is written: a full /dev/shm says so here, and not by a signal at the first touch.
            os.posix_fallocate(descriptor, 0, len(data))
            with mmap.mmap(descriptor, len(data)) as mapped:
                mapped[:] = data
        finally:
            os.close(descriptor)
        return len(data)

    def _trim(self) -> None:
        """Gives up what is cached; the next step takes it again."""
        if "caches" in self._memory:
            self._memory.pop("caches").free()

    def _leave(self) -> int:
        """By hand: contents to the host, memory freed."""
        self._trim()
        for tag, memory in self._memory.items():
            self._spare[tag] = memory.read()
            memory.free()
        return sum(map(len, self._spare.values()))

    def _arrive(self) -> None:
        for tag, size_bytes in self._sizes.items():
            with self._region(tag):
                self._memory[tag] = self._device.allocate(size_bytes)
            self._memory[tag].write(self._spare.pop(tag, b""))


def main() -> None:
    """A process of the trainer, as the conductor starts it."""
    parser = argparse.ArgumentParser()
    for name in ("--steps", "--generations", "--weights-bytes", "--caches-bytes", "--context-bytes"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--train-s", type=float, required=True)
    Trainer(parser.parse_args(), int(os.environ["RL_GRPO_RANK"])).run()


if __name__ == "__main__":
    main()
