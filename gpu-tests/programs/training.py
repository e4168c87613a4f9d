"""What the training scripts of this folder share. Nothing here knows Sublet.

Every number a script draws comes from a seed and every sum is made in a fixed order, so two runs with as many ranks
give the same losses, bit for bit. `--seconds` chooses the number of steps on the machine: the first steps are timed
and all ranks agree on rank 0's answer. `--steps` gives it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NCCL_ALGO", "Ring")

import torch
import torch.distributed as dist

#: Steps that `--seconds` times first, and how many of them are not counted.
TIMED_STEPS, UNTIMED_STEPS = 40, 20


class Training:
    """Arguments, process group, and the loop around a script's own step."""

    def __init__(self, doc: str | None, eager: bool = False) -> None:
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--steps", type=int, default=200)
        parser.add_argument("--seconds", type=float, help="train for about so long instead of --steps")
        parser.add_argument("--width", type=int, default=512)
        parser.add_argument("--group-timeout-s", type=float, default=600.0, help="timeout of the process groups")
        parser.add_argument("--backend", default="nccl", help="torch's name of what carries collectives on GPUs")
        parser.add_argument("--out", type=Path, help="folder for every rank's losses")
        self.args = parser.parse_args()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ["LOCAL_RANK"])
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", local) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(local)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        dist.init_process_group(
            self.args.backend if self.cuda else "gloo",
            timeout=timedelta(seconds=self.args.group_timeout_s),
            # With a device NCCL makes the communicator now and splits the others from it.
            device_id=self.device if eager and self.cuda else None,
        )
        self.generator = torch.Generator(device=self.device)

    def batch(self, step: int, part: int, *shape: int) -> torch.Tensor:
        """The same numbers for the same step and part, whatever was drawn before."""
        self.generator.manual_seed(1_000_003 * step + part)
        return torch.randn(*shape, device=self.device, generator=self.generator)

    def run(
        self,
        step: Callable[[int], torch.Tensor],
        reader: int,
        model: torch.nn.Module,
        before_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Calls `step(number)` for every step and keeps the value it gives on the device. `before_end` is called
        when all is written, before the process group ends.

        Rank `reader` alone reads and prints each value, so it waits for its GPU while the others run ahead.
        """
        history: list[torch.Tensor] = []
        total, began, number = self.args.steps, time.monotonic(), 0
        timing = self.args.seconds is not None
        if timing:
            total = TIMED_STEPS
        while number < total:
            value = step(number).detach().clone()
            history.append(value)
            if self.rank == reader:
                print(f"step {number} loss {value.item().hex()}", flush=True)
            number += 1
            if timing and number == UNTIMED_STEPS:
                self.wait()
                began = time.monotonic()
            if timing and number == TIMED_STEPS:
                total, timing = self.agreed_steps(began), False
            if number == UNTIMED_STEPS and not timing:
                began = time.monotonic()
        self.wait()
        took = time.monotonic() - began
        if self.rank == reader:
            print(f"rate {(number - UNTIMED_STEPS) / took:.3f} steps/s over {number - UNTIMED_STEPS} steps", flush=True)
        self.write(history, model)
        before_end()
        dist.destroy_process_group()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def agreed_steps(self, began: float) -> int:
        """How many steps fill `--seconds`, as rank 0 measured it."""
        self.wait()
        step_s = (time.monotonic() - began) / (TIMED_STEPS - UNTIMED_STEPS)
        wanted = torch.tensor([max(TIMED_STEPS, int(self.args.seconds / step_s))], device=self.device)
        dist.broadcast(wanted, 0)
        return int(wanted.item())

    def write(self, history: list[torch.Tensor], model: torch.nn.Module) -> None:
        """Writes this rank's values, one hexadecimal number a line, and a digest of its final weights."""
        if self.args.out is None:
            return
        digest = hashlib.sha256()
        for parameter in model.parameters():
            # Of a sharded one, the part that this rank has.
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            digest.update(own.detach().cpu().numpy().tobytes())
        lines = [float(value).hex() for value in torch.stack(history).tolist()]
        lines.append(f"weights {digest.hexdigest()}")
        (self.args.out / f"rank{self.rank}.txt").write_text("\n".join(lines) + "\n")
