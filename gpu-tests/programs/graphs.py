"""Training whose steps are CUDA graphs with collectives in them, captured once and launched again and again.

    torchrun --standalone --nproc-per-node 4 graphs.py --steps 2000

One graph holds forward, backward, an all-reduce for each layer's gradients and the update; every eighth step a second
one gathers all ranks' outputs. Between the graphs, the batch is drawn and the loss is kept, as ordinary launches.
Without a GPU the same functions run as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from training import Training

LAYERS, ROWS, EVALUATE_EVERY, RATE = 4, 128, 8, 0.05


def captured(body: Callable[[], None], training: Training, graphs: list[torch.cuda.CUDAGraph]) -> Callable[[], None]:
    """`body` as a graph of `graphs`; it runs a few times before, so that whatever is made on first use is there."""
    if not training.cuda:
        return body
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, index = torch.cuda.CUDAGraph(), len(graphs)
    # The process group's own threads ask for events meanwhile; they are not to spoil the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    graphs.append(graph)
    return lambda: graphs[index].replay()


def main() -> None:
    training = Training(__doc__)
    width, world = training.args.width, training.world
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, width)).to(training.device)
    parameters = list(model.parameters())
    evaluation_group = dist.new_group()
    x, target = torch.zeros(2, ROWS, width, device=training.device).unbind()
    loss = torch.zeros((), device=training.device)
    gathered = torch.zeros(world * ROWS, width, device=training.device)
    spread = torch.zeros((), device=training.device)

    def train() -> None:
        value = (model(x) - target).square().mean()
        gradients = torch.autograd.grad(value, parameters)
        for gradient in gradients:
            dist.all_reduce(gradient)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=RATE / world)
            loss.copy_(value)

    def evaluate() -> None:
        with torch.no_grad():
            dist.all_gather_into_tensor(gathered, model(x), group=evaluation_group)
            spread.copy_(gathered.square().mean())

    start = [parameter.detach().clone() for parameter in parameters]
    graphs: list[torch.cuda.CUDAGraph] = []
    train_graph, evaluate_graph = captured(train, training, graphs), captured(evaluate, training, graphs)
    with torch.no_grad():  # what the runs before the capture changed
        for parameter, value in zip(parameters, start, strict=True):
            parameter.copy_(value)

    def step(number: int) -> torch.Tensor:
        x.copy_(training.batch(number, training.rank, ROWS, width))
        target.copy_(x.flip(1))
        train_graph()
        if number % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            evaluate_graph()
            return loss + spread
        return loss

    # NCCL ends a communicator only when no graph holds its collectives any more.
    training.run(step, reader=0, model=model, before_end=graphs.clear)


if __name__ == "__main__":
    main()
