"""Sharded training by torch's fully_shard: weights are gathered layer by layer, and gradients scattered.

    torchrun --standalone --nproc-per-node 2 fsdp2.py --steps 500
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import Training

LAYERS, ROWS = 6, 128


def main() -> None:
    training = Training(__doc__)
    width = training.args.width
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(training.device)
    mesh = init_device_mesh(training.device.type, (training.world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)

    def step(number: int) -> torch.Tensor:
        x = training.batch(number, training.rank, ROWS, width)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    training.run(step, reader=0, model=model)


if __name__ == "__main__":
    main()
