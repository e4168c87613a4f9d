"""What the torch programs of one process with all GPUs share. Nothing here knows Sublet.

A step's loss is read one step later, through pinned memory, so that the host runs ahead of its devices.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NCCL_ALGO", "Ring")

import torch
from steps import Steps


class OneProcess:
    """Devices and seeds; `step(number)` gives the loss on a device."""

    def __init__(self, doc: str | None) -> None:
        self.steps = Steps(doc)
        self.args = self.steps.args
        self.cuda = torch.cuda.is_available()
        count = self.args.devices or (torch.cuda.device_count() if self.cuda else 2)
        self.devices = [torch.device("cuda", i) if self.cuda else torch.device("cpu") for i in range(count)]
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        self.generator = torch.Generator(device=self.devices[0])
        self.pending: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []

    def batch(self, step: int, *shape: int) -> torch.Tensor:
        """The same numbers for the same step."""
        self.generator.manual_seed(1_000_003 * step)
        return torch.randn(*shape, device=self.devices[0], generator=self.generator)

    def read(self, loss: torch.Tensor | None) -> str:
        """Queues a loss, and gives the one before as a hexadecimal number."""
        if loss is not None:
            place = torch.empty((), dtype=loss.dtype, pin_memory=self.cuda)
            place.copy_(loss.detach(), non_blocking=True)
            event = None
            if self.cuda:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(loss.device))
            self.pending.append((place, event))
        if not self.pending or (loss is not None and len(self.pending) < 2):
            return ""
        place, event = self.pending.pop(0)
        if event is not None:
            event.synchronize()
        return float(place).hex()

    def descend(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """One step of training by `loss`, which it gives back."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    def run(self, step: Callable[[int], torch.Tensor], model: torch.nn.Module) -> None:
        """All steps; then the last loss and a digest of the weights."""

        def finish() -> str:
            last = self.read(None)
            digest = hashlib.sha256()
            for parameter in model.parameters():
                digest.update(parameter.detach().cpu().numpy().tobytes())
            return f"{last}\nweights {digest.hexdigest()}"

        self.steps.run(lambda number: self.read(step(number)), finish)
