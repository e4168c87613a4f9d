"""A pipeline of as many stages as there are ranks: one forward, one backward in turn, by sends and receives alone.

    torchrun --standalone --nproc-per-node 4 pipeline.py --steps 300

Filling and emptying the pipeline uses isend and irecv, which have a communicator for each pair of neighbours. In between
a stage exchanges with its neighbour in both directions together, by batch_isend_irecv on the communicator of all.
The last stage has the loss; what the others record is the sum of squares of their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from training import Training

LAYERS, ROWS, MICROBATCHES = 2, 64, 8


class Stage:
    """This rank's layers, and how it speaks to its neighbours."""

    def __init__(self, training: Training) -> None:
        self.training, self.width = training, training.args.width
        self.rank, self.last = training.rank, training.world - 1
        torch.manual_seed(self.rank)
        layers = [module for _ in range(LAYERS) for module in (nn.Linear(self.width, self.width), nn.GELU())]
        self.model = nn.Sequential(*layers).to(training.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.sends: list[tuple[Any, torch.Tensor]] = []
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []

    def empty(self) -> torch.Tensor:
        """Room for one micro-batch."""
        return torch.empty(ROWS, self.width, device=self.training.device)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Sends to a neighbour, if there is one; the tensor is kept until the step ends."""
        if 0 <= to <= self.last:
            self.sends.append((dist.isend(tensor, to), tensor))

    def receive(self, source: int) -> torch.Tensor | None:
        """Receives from a neighbour, if there is one."""
        if not 0 <= source <= self.last:
            return None
        room = self.empty()
        dist.irecv(room, source).wait()
        return room

    def exchange(self, tensor: torch.Tensor | None, neighbour: int) -> torch.Tensor | None:
        """Sends to and receives from one neighbour simultaneously."""
        if not 0 <= neighbour <= self.last:
            return None
        room = self.empty()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, neighbour), dist.P2POp(dist.irecv, room, neighbour)]
        )
        for work in works:
            work.wait()
        self.sends.append((None, tensor))
        return room

    def forward(self, number: int, index: int, received: torch.Tensor | None) -> torch.Tensor:
        """One micro-batch; on the last stage its loss too."""
        x = received if received is not None else self.training.batch(number, index, ROWS, self.width)
        x.requires_grad_(self.rank > 0)
        y = self.model(x)
        if self.rank == self.last:
            target = self.training.batch(number, MICROBATCHES + index, ROWS, self.width)
            y = (y - target).square().mean() / MICROBATCHES
            self.losses.append(y.detach())
        self.inputs.append(x)
        self.outputs.append(y)
        return y.detach()

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The oldest micro-batch; the gradient for the stage before."""
        x, y = self.inputs.pop(0), self.outputs.pop(0)
        y.backward(gradient)
        return x.grad

    def step(self, number: int) -> torch.Tensor:
        """All micro-batches, then the optimizer."""
        before, after = self.rank - 1, self.rank + 1
        ahead = min(self.last - self.rank, MICROBATCHES)
        self.optimizer.zero_grad(set_to_none=True)
        for index in range(ahead):
            self.send(self.forward(number, index, self.receive(before)), after)
        received = self.receive(before) if ahead < MICROBATCHES else None
        for index in range(ahead, MICROBATCHES):
            made = self.forward(number, index, received)
            gradient = self.backward(self.exchange(made, after))
            if index + 1 < MICROBATCHES:
                received = self.exchange(gradient, before)
            else:
                self.send(gradient, before)
        for _ in range(ahead):
            self.send(self.backward(self.receive(after)), before)
        for work, _ in self.sends:
            if work is not None:
                work.wait()
        self.sends.clear()
        squares = torch.stack([parameter.grad.square().sum() for parameter in self.model.parameters()]).sum()
        self.optimizer.step()
        value = torch.stack(self.losses).sum() if self.losses else squares
        self.losses.clear()
        return value


def main() -> None:
    training = Training(__doc__)
    stage = Stage(training)
    # All ranks meet once, so that the communicator of all is there before the first batch of sends.
    dist.all_reduce(torch.zeros(1, device=training.device))
    training.run(stage.step, reader=stage.last, model=stage.model)


if __name__ == "__main__":
    main()
