"""Training whose gradients are added by kernels over torch's symmetric memory: ranks read and write each other's
buffers and wait for each other's signals, without NCCL.

    torchrun --standalone --nproc-per-node 2 symmetric.py --steps 500

By turns the one-shot sum, the two-shot sum, and one by hand: a barrier, the peer's buffer read as it is mapped here, a
barrier. Without a GPU the process group adds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from steps import not_run
from torch import nn
from training import Training

LAYERS, ROWS, RATE = 4, 128, 0.05


class Sums:
    """A buffer that every rank sees, and sums over it."""

    def __init__(self, training: Training, count: int) -> None:
        self.cuda, self.rank, self.world = training.cuda, training.rank, training.world
        self.own = torch.zeros(count, device=training.device)
        if not self.cuda:
            return
        import torch.distributed._symmetric_memory as symmetric

        if not torch.cuda.can_device_access_peer(training.device, (training.rank + 1) % self.world):
            not_run("these GPUs do not reach each other's memory")
        group = dist.group.WORLD
        self.name = group.group_name
        self.own = symmetric.empty(count, dtype=torch.float32, device=training.device)
        self.own.zero_()
        self.handle = symmetric.rendezvous(self.own, group=self.name)
        self.buffers = [self.handle.get_buffer(rank, (count,), torch.float32) for rank in range(self.world)]

    def add(self, number: int) -> torch.Tensor:
        """The sum over all ranks' buffers."""
        if not self.cuda:
            dist.all_reduce(self.own)
            return self.own
        kind = number % 3
        if kind == 0:
            return torch.ops.symm_mem.one_shot_all_reduce(self.own, "sum", self.name)
        if kind == 1:
            return torch.ops.symm_mem.two_shot_all_reduce_(self.own, "sum", self.name)
        self.handle.barrier(channel=0)
        total = torch.zeros_like(self.own)
        for buffer in self.buffers:
            total += buffer
        # Nobody writes the next numbers before all have read these.
        self.handle.barrier(channel=1)
        return total


def main() -> None:
    training = Training(__doc__)
    width = training.args.width
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, width)).to(training.device)
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    # The kernels copy 16 bytes at a time, and each rank an equal part.
    unit = 64 * training.world
    sums = Sums(training, -(-sum(sizes) // unit) * unit)

    def step(number: int) -> torch.Tensor:
        x = training.batch(number, training.rank, ROWS, width)
        loss = (model(x) - x.flip(1)).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            at = 0
            for gradient in gradients:
                sums.own[at : at + gradient.numel()].copy_(gradient.reshape(-1))
                at += gradient.numel()
            total = sums.add(number)
            at = 0
            for parameter in parameters:
                part = total[at : at + parameter.numel()].view_as(parameter)
                parameter.sub_(part, alpha=RATE / training.world)
                at += parameter.numel()
        return loss

    training.run(step, reader=0, model=model)


if __name__ == "__main__":
    main()
