"""The race's case of pausing by tag, against those who do it today: how fast, in one run on one GPU?

Weights of `--kept-gb` GB in a tag that is kept and KV cache of `--discarded-gb` GB in one that is discarded are paused
and resumed together, `--cycles` times, by three ways, each in a process of its own:

- sublet: `sublet.region`, `sublet.pause(tags)`, `sublet.resume(tags)`, under `sublet run`;
- saver: torch_memory_saver 0.0.10 as it comes, which allocates pinned memory at each pause and frees it at each resume;
- retained: the same with `retain_cpu_backup`, its best mode.

Half of the cycles resume immediately, half after a rest: the driver clears memory in the background after it was given back,
and copies that follow immediately share the device with that.

The weights are written again before each pause, so that nobody gains by what is saved already. Every word of them is checked
on the device after each resume, and with sublet a piece of `host_copy` while paused.

Bound: 20 GB at 55 GB/s are 0.36 s each way; pinning 20 GB takes some 6 s, so `saver` is bound by that and gets fewer
cycles.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import runner
from common import JobError
from suite import main, options, role_of

WAYS = ("sublet", "saver", "retained")
#: Elements of one weight, as of a 7B model's feed-forward layer, in two bytes each.
WEIGHT_WORDS = 4096 * 11008
KV_BLOCK_BYTES = 298 * 2 * common.MIB
GB = 10**9
#: Between a pause and its resume, in every other half of the cycles.
REST_S = 0.5


parse = options(__doc__, 240, kept_gb=float, discarded_gb=float, cycles=int, role=role_of(*WAYS))

# ---------------------------------------------------------------- the ways, in the child


class Memory:
    """Weights and KV cache, as tensors."""

    def __init__(self, args: Any, weights_from: Callable[[int], Any], kv_from: Callable[[int], Any]) -> None:
        import torch
        from checksum import Checksum

        self.torch = torch
        device = torch.device("cuda:0")
        self.sum = Checksum(torch, device)
        count = max(1, round(args.kept_gb * GB / (2 * WEIGHT_WORDS)))
        self.weights = [weights_from(2 * WEIGHT_WORDS) for _ in range(count)]
        self.kv = [kv_from(KV_BLOCK_BYTES) for _ in range(max(1, round(args.discarded_gb * GB / KV_BLOCK_BYTES)))]
        generator = torch.Generator(device=device)
        for number, weight in enumerate(self.weights):
            generator.manual_seed(number)
            weight.view(torch.int64).random_(generator=generator)
        torch.cuda.synchronize()
        self.note_sums()

    def change(self) -> None:
        """Adds one to every word of the weights, so that nothing saved before is as it is."""
        for weight in self.weights:
            weight.view(self.torch.int64).add_(1)
        self.note_sums()

    def note_sums(self) -> None:
        """What the weights must add up to from now on."""
        self.sums = self.checksums()
        self.plain_sum = int(self.weights[0].view(self.torch.int64).sum().item())

    def checksums(self) -> list[int]:
        return [self.sum.of(weight) for weight in self.weights]

    def wrong(self) -> int:
        """How many weights differ, after the KV cache was written and read."""
        for number, block in enumerate(self.kv):
            block.fill_(number & 0x7F)
        bad = sum(int(block[-1].item()) != number & 0x7F for number, block in enumerate(self.kv))
        return bad + sum(before != now for before, now in zip(self.sums, self.checksums(), strict=True))

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.numel() * weight.element_size() for weight in self.weights)


def torch_bytes(size_bytes: int) -> Any:
    """Device memory from torch."""
    import torch

    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda:0")


def way_sublet(args: Any) -> tuple[Memory, Callable[[], Any], Callable[[], Any]]:
    """Ours."""
    import sublet

    def in_region(tag: str, contents: str) -> Callable[[int], Any]:
        def make(size_bytes: int) -> Any:
            with sublet.region(tag, contents):
                return torch_bytes(size_bytes)

        return make

    memory = Memory(args, in_region("weights", "keep"), in_region("kv", "discard"))
    tags = ["weights", "kv"]
    return memory, lambda: sublet.pause(tags=tags), lambda: sublet.resume(tags=tags)


def way_saver(args: Any) -> tuple[Memory, Callable[[], Any], Callable[[], Any]]:
    """torch_memory_saver, in either mode."""
    from torch_memory_saver import torch_memory_saver as saver

    if args.role == "retained":
        saver.retain_cpu_backup = True

    def in_region(tag: str, backup: bool) -> Callable[[int], Any]:
        def make(size_bytes: int) -> Any:
            with saver.region(tag=tag, enable_cpu_backup=backup):
                return torch_bytes(size_bytes)

        return make

    memory = Memory(args, in_region("weights", True), in_region("kv", False))
    return memory, saver.pause, saver.resume


def child(args: Any) -> None:
    """One way: its cycles, timed and checked."""
    import torch

    make = {"sublet": way_sublet, "saver": way_saver, "retained": way_saver}[args.role]
    memory, pause, resume = make(args)
    runner.fact("kept_bytes", memory.kept_bytes)
    wrong, freed_min = 0, None
    for rest_s in [0.0] * args.cycles + [REST_S] * args.cycles:
        memory.change()
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        times = []
        for action in (pause, resume):
            if action is resume:
                time.sleep(rest_s)
            began = time.perf_counter()
            report = action()
            times.append(time.perf_counter() - began)
            if action is pause:
                freed = torch.cuda.mem_get_info()[0] - before
                freed_min = freed if freed_min is None else min(freed, freed_min)
                if args.role == "sublet":
                    wrong += host_copy_is_wrong(memory)
        wrong += memory.wrong()
        runner.sample("pause_s", times[0])
        runner.sample("rested_resume_s" if rest_s else "resume_s", times[1])
        runner.fact("last_resume", told(report))
    total = memory.kept_bytes + sum(block.numel() for block in memory.kv)
    runner.row("values exact after each cycle", wrong == 0, f"{wrong} wrong")
    runner.row(
        "a pause frees all of it",
        (freed_min or 0) >= 0.99 * total,
        f"{(freed_min or 0) / GB:.1f} of {total / GB:.1f} GB",
    )
    if args.role == "sublet":
        host_copy_kinds()


def told(report: Any) -> Any:
    """What a resume says of itself, in values that JSON has: `sublet.Report` is none."""
    return getattr(report, "details", report)


def host_copy_is_wrong(memory: Memory) -> int:
    """Whether the saved bytes of one weight add up to anything but what they did on the device."""
    import sublet

    return int(int(sublet.host_copy(memory.weights[0]).view(memory.torch.int64).sum().item()) != memory.plain_sum)


def host_copy_kinds() -> None:
    """Tensors of several types and layouts against their saved bytes."""
    import sublet
    import torch

    with sublet.region("kinds"):
        base = torch.randn(64, 96, device="cuda:0")
        kinds = {
            "float32": base,
            "bfloat16": base.bfloat16(),
            "float8": base.to(torch.float8_e4m3fn),
            "transposed": base.t(),
            "sliced": base[3:40, 5:90:7],
            "complex conjugate": torch.complex(base, base).conj(),
            "empty": base[:0],
        }
    before = {name: tensor.cpu() for name, tensor in kinds.items()}
    sublet.pause(tags="kinds")
    bad = []
    for name, tensor in kinds.items():
        saved = sublet.host_copy(tensor)
        same = saved.shape == tensor.shape and saved.stride() == tensor.stride() and saved.dtype == tensor.dtype
        values = [each.to(torch.float32) if name == "float8" else each for each in (saved, before[name])]
        bad += [] if same and torch.equal(*values) else [name]
    sublet.resume(tags="kinds")
    runner.row("host_copy of every kind of tensor", not bad, ", ".join(bad) or ", ".join(kinds))


# ---------------------------------------------------------------- in the race


def start(work: Path, way: str, kept_gb: float) -> runner.Child:
    """The process of one way: `kept_gb` kept, and twice as much discarded."""
    cycles = 1 if way == "saver" else 3
    command = [__file__, "--role", way, "--cycles", str(cycles), "--deadline", "150"]
    command += ["--kept-gb", str(kept_gb), "--discarded-gb", str(2 * kept_gb)]
    if way == "sublet":
        tenant = f"saver-{way}-{os.getpid()}"
        return runner.Child(work, way, command, tenant=tenant, sites=[runner.package(work, "sublet")])
    site = runner.package(work, "torch_memory_saver")
    cuda = "13" if (torch_cuda_major() or 13) >= 13 else "12"
    hooks = sorted(site.glob(f"torch_memory_saver_hook_mode_preload_cu{cuda}*.so"))
    if not hooks:
        raise JobError(f"torch_memory_saver has no preload library for CUDA {cuda}")
    env = {"LD_PRELOAD": str(hooks[0]), "LD_LIBRARY_PATH": runner.cuda_libraries()}
    return runner.Child(work, way, command, sites=[site], env=env)


def torch_cuda_major() -> int | None:
    """The CUDA version that the installed torch is built for, without importing it."""
    import importlib.metadata

    try:
        needs = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return 12 if any("-cu12" in need for need in needs) else 13


if __name__ == "__main__":
    main(parse, "saver", child, dict.fromkeys(WAYS, child))
