"""nn.DataParallel training on all GPUs by one process: a thread for each, weights sent out by NCCL in every step.

    python3 programs/one_parallel.py --steps 500
"""

from __future__ import annotations

import torch
from one_process import OneProcess
from torch import nn

LAYERS, ROWS = 6, 256


def main() -> None:
    process = OneProcess(__doc__)
    width = process.args.width
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(process.devices[0])
    ids = [device.index for device in process.devices] if process.cuda else None
    parallel = nn.DataParallel(model, device_ids=ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)

    def step(number: int) -> torch.Tensor:
        x = process.batch(number, ROWS * len(process.devices), width)
        loss = (parallel(x) - x.flip(1)).square().mean()
        return process.descend(loss, optimizer)

    process.run(step, model)


if __name__ == "__main__":
    main()
