"""A model split over all GPUs of one process, as accelerate's device_map does: layers on different devices by turns,
their inputs copied from one to the next, forward and backward.

    python3 programs/one_split.py --steps 500
"""

from __future__ import annotations

import torch
from one_process import OneProcess
from torch import nn

LAYERS, ROWS = 8, 256


class Split(nn.Module):
    """Layer i lives on device i modulo their number."""

    def __init__(self, width: int, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layer.to(self.device_of(i)) for i, layer in enumerate(layers))

    def device_of(self, index: int) -> torch.device:
        """Where a layer is."""
        return self.devices[index % len(self.devices)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x.to(self.device_of(index), non_blocking=True))
        return x


def main() -> None:
    process = OneProcess(__doc__)
    width = process.args.width
    model = Split(width, process.devices)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    last = model.device_of(LAYERS - 1)

    def step(number: int) -> torch.Tensor:
        x = process.batch(number, ROWS, width)
        loss = (model(x) - x.flip(1).to(last)).square().mean()
        return process.descend(loss, optimizer)

    process.run(step, model)


if __name__ == "__main__":
    main()
