"""An ordinary data-parallel training script. It does not know Sublet.

    sublet run --tenant train -- torchrun --nproc-per-node 4 examples/train.py

While it runs, from another terminal: `sublet ps`, `sublet pause train`, `sublet resume train`. The loss goes on where
it stood, and is the same, bit for bit, as in a run that was never paused.

Batches are drawn from seeds, so two runs with the same arguments print the same losses.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def build_model(width: int, layers: int) -> torch.nn.Module:
    """`layers` square layers of `width`: about `4 * layers * width**2` bytes of weights, three times that with Adam."""
    blocks: list[torch.nn.Module] = []
    for _ in range(layers):
        blocks += [torch.nn.Linear(width, width), torch.nn.GELU()]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(width, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.05, help="shortest time of a step, in seconds")
    args = parser.parse_args()

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model(args.width, args.layers).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    generator = torch.Generator(device="cuda")

    for step in range(args.steps):
        begin = time.monotonic()
        generator.manual_seed(1_000_000 * rank + step)
        batch = torch.randn(64, args.width, device="cuda", generator=generator)
        loss = model(batch).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        # Every rank reads the loss, so all of them stand at the same step while they wait for the next.
        mean_loss = total.item() / dist.get_world_size()
        if rank == 0:
            print(f"step {step} loss {mean_loss.hex()} took {time.monotonic() - begin:.3f} s", flush=True)
        time.sleep(max(0.0, args.step_s - (time.monotonic() - begin)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
