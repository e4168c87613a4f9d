"""DeepSpeed's ZeRO-3: weights, gradients and the optimizer's state are split over ranks, and gathered layer by layer.

    torchrun --standalone --nproc-per-node 2 programs/engine_zero3.py --steps 500
"""

from __future__ import annotations

import deepspeed
import torch
from torch import nn
from training import Training

LAYERS, ROWS = 6, 128


def main() -> None:
    training = Training(__doc__)
    width = training.args.width
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(LAYERS)))
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(number: int) -> torch.Tensor:
        x = training.batch(number, training.rank, ROWS, width)
        loss = (engine(x) - x.flip(1)).square().mean()
        engine.backward(loss)
        engine.step()
        return loss

    # What a rank holds of the weights: the parameters themselves are empty between steps.
    class Parts(nn.Module):
        """The parts of the weights that this rank has."""

        def __init__(self) -> None:
            super().__init__()
            parts = [parameter.ds_tensor.detach() for parameter in engine.module.parameters()]
            self.parts = nn.ParameterList([nn.Parameter(part, requires_grad=False) for part in parts])

    training.run(step, reader=0, model=Parts())


if __name__ == "__main__":
    main()
