"""Tensor parallel by 2 and data parallel by 2: three kinds of communicators, and collectives on two more streams.

    torchrun --standalone --nproc-per-node 4 tpdp.py --steps 500

The first layer of each block is split by columns, the second by rows. Between blocks each rank of a tensor-parallel pair
keeps half of the rows: they are gathered before a block and summed and scattered after it. Gradients are summed
over the data-parallel pair as soon as each is ready, during the rest of backward. The norm of all gradients and the mean
loss are summed over all ranks, the loss on a stream of its own.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from training import Training

LAYERS, ROWS, TENSOR = 4, 256, 2
NORM_MAX = 1.0


def gather(part: torch.Tensor, group: Any) -> torch.Tensor:
    """The rows of all ranks of the group."""
    whole = part.new_empty(part.shape[0] * TENSOR, *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def scatter(whole: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's rows of the sum over the group."""
    part = whole.new_empty(whole.shape[0] // TENSOR, *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole.contiguous(), group=group)
    return part


class Gather(torch.autograd.Function):
    """Gathers rows; the gradient is summed and scattered."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return gather(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scatter(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    """Sums and scatters rows; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return scatter(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather(gradient, ctx.group), None


class Block(nn.Module):
    """This rank's half of a feed-forward block."""

    def __init__(self, width: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.up = nn.Linear(width, 4 * width // TENSOR)
        self.down = nn.Linear(4 * width // TENSOR, width, bias=False)

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        whole = Gather.apply(part, self.group)
        return part + Scatter.apply(self.down(torch.nn.functional.gelu(self.up(whole))), self.group)


def main() -> None:
    training = Training(__doc__, eager=True)
    rank, world, width = training.rank, training.world, training.args.width
    if world % TENSOR:
        raise SystemExit(f"{world} ranks do not divide into pairs")
    tensor_rank, data_rank = rank % TENSOR, rank // TENSOR
    # Every rank makes every group, in the same order.
    pairs = [dist.new_group(list(range(at, at + TENSOR))) for at in range(0, world, TENSOR)]
    columns = [dist.new_group(list(range(at, world, TENSOR))) for at in range(TENSOR)]
    tensor_group, data_group = pairs[data_rank], columns[tensor_rank]

    torch.manual_seed(tensor_rank)
    model = nn.Sequential(*[Block(width, tensor_group) for _ in range(LAYERS)]).to(training.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    pending: list[Any] = []

    def sum_gradient(parameter: torch.Tensor) -> None:
        parameter.grad.div_(world // TENSOR)
        pending.append(dist.all_reduce(parameter.grad, group=data_group, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(sum_gradient)
    side = torch.cuda.Stream() if training.cuda else None

    def mean_loss(loss: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks, on the side stream."""
        total = loss.detach().clone()
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            total.record_stream(side)
        with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
            dist.all_reduce(total)
            total.div_(world)
        return total

    def step(number: int) -> torch.Tensor:
        x = training.batch(number, data_rank, ROWS, width)
        part = x.chunk(TENSOR)[tensor_rank]
        target = x.flip(1).chunk(TENSOR)[tensor_rank]
        loss = (model(part) - target).square().mean()
        total = mean_loss(loss)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for work in pending:
            work.wait()
        pending.clear()
        squares = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum()
        dist.all_reduce(squares)
        scale = (NORM_MAX / (squares / (world // TENSOR)).sqrt()).clamp(max=1.0)
        for parameter in model.parameters():
            parameter.grad.mul_(scale)
        optimizer.step()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        return total

    training.run(step, reader=0, model=model)


if __name__ == "__main__":
    main()
