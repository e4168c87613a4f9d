"""Training with two NCCLs in each process: torch's adds the gradients, and a copy of its file, loaded next to it, adds
words that the host knows.

    torchrun --standalone --nproc-per-node 2 two_nccls.py --steps 500
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from rawcuda import Nccl
from steps import not_run
from torch import nn
from training import Training

LAYERS, ROWS, RATE, WORDS = 4, 128, 0.05, 1 << 18


def torch_nccl() -> Path:
    """The file that torch's NCCL was loaded from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libnccl.so" in path:
            return Path(path)
    not_run("torch has its NCCL in itself: there is no file to load a second time")
    raise AssertionError


class Second:
    """The other NCCL, and a buffer of its own."""

    def __init__(self, training: Training) -> None:
        # A file of its own: the loader knows a library by its file.
        copy = (training.args.out or Path(".")) / f"second{training.rank}" / "libnccl.so.2"
        copy.parent.mkdir(parents=True)
        shutil.copy(torch_nccl(), copy)
        self.nccl = Nccl(str(copy))
        names = [self.nccl.unique_id() if training.rank == 0 else b""]
        dist.broadcast_object_list(names, 0)
        self.rank, self.world = training.rank, training.world
        self.comm = self.nccl.join(names[0], training.rank, training.world)
        self.stream = torch.cuda.Stream()
        self.words = torch.zeros(WORDS, dtype=torch.int32, device=training.device)

    def add(self, number: int) -> torch.Tensor:
        """How many words are not the sum of what all ranks gave."""
        now = torch.cuda.current_stream()
        self.words.fill_(number * (self.rank + 1))
        self.stream.wait_stream(now)
        place, stream = self.words.data_ptr(), ctypes.c_void_p(self.stream.cuda_stream)
        self.nccl.all_reduce(place, place, WORDS, self.comm, stream)
        now.wait_stream(self.stream)
        return (self.words != number * self.world * (self.world + 1) // 2).sum()

    def end(self) -> None:
        self.nccl.call("ncclCommDestroy", self.comm)


def main() -> None:
    training = Training(__doc__)
    if not training.cuda:
        not_run("NCCL needs a GPU")
    width, world = training.args.width, training.world
    dist.barrier()
    second = Second(training)
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, width)).to(training.device)
    parameters = list(model.parameters())

    def step(number: int) -> torch.Tensor:
        x = training.batch(number, training.rank, ROWS, width)
        loss = (model(x) - x.flip(1)).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        wrong = second.add(number)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                dist.all_reduce(gradient)
                parameter.sub_(gradient, alpha=RATE / world)
        # A wrong word changes the value.
        return loss + wrong

    training.run(step, reader=0, model=model, before_end=second.end)


if __name__ == "__main__":
    main()
