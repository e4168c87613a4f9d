"""NCCL's memory leaves by itself, and the processes run on: what frameworks destroy process groups for.

    sublet run --tenant train -- torchrun --nproc-per-node 2 examples/nccl_alone.py    # needs 2 GPUs and PyTorch

Every rank makes an all-reduce, NCCL's memory is paused for all of them, they go on computing without it, it is resumed, and
the same communicator makes the same all-reduce. You see what is free on GPU 0 at each point. From outside it is
`sublet pause train --library nccl`. No group is destroyed or rebuilt.
"""

import os

import stage


def main() -> None:
    stage.begin(None)
    import sublet

    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        stage.leave("needs PyTorch: pip install torch")
    if "RANK" not in os.environ or not torch.cuda.is_available():
        stage.leave("start it with: sublet run --tenant train -- torchrun --nproc-per-node 2 examples/nccl_alone.py")
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    meeting = dist.new_group(backend="gloo")

    def show(when: str) -> None:
        if rank == 0:
            print(f"{when:28} {stage.mib(torch.cuda.mem_get_info()[0])} free")

    def sum_of_all() -> float:
        numbers = torch.full((1 << 20,), float(rank + 1), device="cuda")
        dist.all_reduce(numbers)
        return numbers[0].item()

    before = sum_of_all()
    show("NCCL on the GPU")
    dist.barrier(meeting)
    if rank == 0:
        sublet.Tenant().pause("nccl")
    dist.barrier(meeting)
    show("NCCL away")
    # Everything but NCCL works.
    square = torch.randn(1024, 1024, device="cuda")
    (square @ square).sum().item()
    dist.barrier(meeting)
    if rank == 0:
        sublet.Tenant().resume("nccl")
    dist.barrier(meeting)
    after = sum_of_all()
    show("NCCL back")
    if rank == 0:
        print("the same sum" if before == after else f"{after} instead of {before}")
    dist.destroy_process_group()
    raise SystemExit(0 if before == after else 1)


if __name__ == "__main__":
    main()
