"""Data-parallel training of a small transformer: gradients are summed in many buckets while backward still runs.

    torchrun --standalone --nproc-per-node 4 ddp.py --steps 500
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Training

LAYERS, HEADS, BATCH, LENGTH = 4, 8, 8, 64
#: Small buckets: a step has about a dozen all-reduces.
BUCKET_MIB = 4


class Block(nn.Module):
    """Attention written out, since not every fused one adds up in a fixed order, and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).reshape(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (width // HEADS) ** -0.5, dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.between(x))


def main() -> None:
    training = Training(__doc__)
    width = training.args.width
    model = nn.Sequential(*[Block(width) for _ in range(LAYERS)], nn.Linear(width, width)).to(training.device)
    parallel = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)

    def step(number: int) -> torch.Tensor:
        x = training.batch(number, training.rank, BATCH, LENGTH, width)
        loss = (parallel(x) - x.flip(1)).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    training.run(step, reader=0, model=model)


if __name__ == "__main__":
    main()
