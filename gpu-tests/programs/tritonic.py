"""Training by kernels written in Triton: a product of matrices, a softmax and a step of descent, on all GPUs of one
process by turns.

    python3 programs/tritonic.py --steps 500
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from one_process import OneProcess
from steps import not_run
from torch import nn

ROWS, TILE, RATE = 256, 32, 0.1


@triton.jit
def product(a, b, c, m, n, k, a_rows, a_columns, b_rows, b_columns, tile: tl.constexpr):
    """c = a @ b, tile by tile; the distances between rows and columns of both are given."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(0, k, tile):
        at = start + tl.arange(0, tile)
        left = tl.load(a + row[:, None] * a_rows + at[None, :] * a_columns)
        right = tl.load(b + at[:, None] * b_rows + column[None, :] * b_columns)
        total += tl.dot(left, right, input_precision="ieee")
    tl.store(c + row[:, None] * n + column[None, :], total)


@triton.jit
def softmax(source, target, columns, size: tl.constexpr):
    at = tl.arange(0, size)
    row = tl.load(source + tl.program_id(0) * columns + at, mask=at < columns, other=-float("inf"))
    row = tl.exp(row - tl.max(row, axis=0))
    tl.store(target + tl.program_id(0) * columns + at, row / tl.sum(row, axis=0), mask=at < columns)


@triton.jit
def descend(weights, gradients, count, rate, size: tl.constexpr):
    """weights -= rate * gradients."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < count
    gradient = tl.load(gradients + at, mask=there)
    tl.store(weights + at, tl.load(weights + at, mask=there) - rate * gradient, mask=there)


def multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, of sizes that the tile divides."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device)
    product[(m // TILE, n // TILE)](a, b, c, m, n, k, *a.stride(), *b.stride(), tile=TILE)
    return c


def main() -> None:
    process = OneProcess(__doc__)
    if not process.cuda:
        not_run("Triton's kernels need a GPU")
    width = process.args.width
    models = [nn.Linear(width, width, bias=False).to(device) for device in process.devices]
    size = triton.next_power_of_2(width)

    def step(number: int) -> torch.Tensor:
        device = process.devices[number % len(process.devices)]
        weights = models[number % len(models)].weight.data
        x = process.batch(number, ROWS, width).to(device)
        with torch.cuda.device(device):
            given = torch.empty_like(x)
            softmax[(ROWS,)](multiplied(x, weights.t()), given, width, size=size)
            wanted = torch.empty_like(x)
            softmax[(ROWS,)](x.flip(1).contiguous(), wanted, width, size=size)
            difference = given - wanted
            gradient = multiplied(difference.t(), x)
            count = gradient.numel()
            descend[(triton.cdiv(count, 1024),)](weights, gradient, count, RATE / ROWS, size=1024)
            return difference.square().mean()

    process.run(step, nn.ModuleList(models))


if __name__ == "__main__":
    main()
