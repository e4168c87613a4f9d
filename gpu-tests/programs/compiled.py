"""Training of a model that torch.compile has made kernels for, on one GPU.

    MODE=reduce-overhead python3 programs/compiled.py --steps 500

With the mode reduce-overhead, forward and backward are CUDA graphs whose memory is a pool of torch's own.
"""

from __future__ import annotations

import os

import torch
from one_process import OneProcess
from steps import not_run
from torch import nn

LAYERS, ROWS = 2, 256


class Block(nn.Module):
    """Attention and a chain of two layers, each added to its input."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        query, key, value = self.mixed(self.before(x)).view(rows, 3, self.heads, -1).permute(1, 2, 0, 3)
        weights = torch.softmax(query @ key.transpose(1, 2) / (width // self.heads) ** 0.5, dim=-1)
        x = x + self.joined((weights @ value).transpose(0, 1).reshape(rows, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.after(x))))


def main() -> None:
    mode = os.environ.get("MODE", "default")
    process = OneProcess(__doc__)
    if process.cuda:
        try:
            import triton  # noqa: F401
        except ImportError:
            not_run("torch.compile needs triton, which is not here")
    width = process.args.width
    model = nn.Sequential(*(Block(width) for _ in range(LAYERS))).to(process.devices[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x.flip(1)).square().mean()

    compiled = torch.compile(loss_of, mode=mode, fullgraph=True)

    def step(number: int) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return process.descend(compiled(process.batch(number, ROWS, width)), optimizer)

    process.run(step, model)


if __name__ == "__main__":
    main()
