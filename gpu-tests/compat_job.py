"""Do the drop-ins do what the originals' users rely on, with real torch and real NCCL?

Four processes on one GPU, one after the other, each as its user would start it:

- saver: `torch_memory_saver` by Sublet's alias, preloaded by the object found next to it: a region with and one without
  backups, a captured graph, `get_cpu_backup`, `disable`, a resume that does not fit and is repeated, a replay while the
  graph's tag is away, backups that are kept, and such that leave no host memory;
- enabled: the same package set by the environment, as a training framework starts its actors;
- vllm: `CuMemAllocator`, levels 1 and 2, wake-up by tag, and one that does not fit;
- nccl: a communicator of one rank through `sublet.nccl_library_path()` by ctypes, as PyNccl makes it, with `ncclPause`.

Values are checked on the device after each resume. Bound: less than 4 GiB travel each way in each process, some 0.1 s; the
run is four starts of torch, some 10 s each.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import common
import runner
from common import GIB, MIB, JobError, Result
from phases import copied_bytes
from suite import main, options, role_of

ROLES = ("saver", "enabled", "vllm", "nccl")
KEPT_BYTES, LOST_BYTES = GIB, 2 * GIB
#: What else may be on the device: contexts grow when kernels are loaded.
SLACK_BYTES = 64 * MIB

parse = options(__doc__, 85, role=role_of(*ROLES))


# ---------------------------------------------------------------- in the children


def pattern(size_bytes: int, seed: int) -> Any:
    """Bytes on the device that look random, and the same for the same seed."""
    import torch

    generator = torch.Generator(device="cuda:0")
    generator.manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device="cuda:0", generator=generator)


def free_bytes() -> int:
    """What the driver says is free, once all work has ended and torch has given back what it caches."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def about(value: int, wanted: int) -> bool:
    """Is a number of bytes what it should be?"""
    return abs(value - wanted) <= SLACK_BYTES


def only_fits(room_bytes: int) -> Any:
    """A tensor that leaves this much free memory."""
    import torch

    return torch.empty(free_bytes() - room_bytes, dtype=torch.uint8, device="cuda:0")


def resident_bytes(stats: Any) -> int:
    """What a process holds on devices that a pause would take."""
    return sum(entry["resident_bytes"] for device in stats["pool"]["devices"] for entry in device["memory"])


def refused(act: Any) -> int:
    """The missing bytes, where `act` says that a device has too little memory; otherwise 0."""
    import sublet

    try:
        act()
    except sublet.OutOfDeviceMemory as error:
        return error.missing_bytes or 0
    return 0


def saver_role(_args: Any) -> None:
    """torch_memory_saver by its alias."""
    import torch
    import torch_memory_saver as package
    from torch_memory_saver import torch_memory_saver as saver

    import sublet

    runner.row("the alias is imported", Path(package.__file__).is_relative_to(sublet.__path__[0]), package.__file__)
    runner.row("preloaded by the object next to it", sublet.attached())
    with saver.region("weights", enable_cpu_backup=True):
        weights = pattern(KEPT_BYTES, 1)
    with saver.region("kv_cache"):
        cache = torch.full((LOST_BYTES // 4,), 3.0, device="cuda:0")
    total = torch.zeros(1, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    (weights[:MIB].float() + cache[:MIB]).sum()
    torch.cuda.synchronize()
    with saver.cuda_graph(graph, tag="graph"):
        # A temporary of 1 GiB, which belongs to the graph's tag.
        large = weights[: GIB // 4].float() + cache[: GIB // 4]
        total.copy_(large.view(-1)[:MIB].sum())
    graph.replay()
    torch.cuda.synchronize()
    wanted, places = float(total.item()), (weights.data_ptr(), cache.data_ptr())
    head, before = weights[: 4 * MIB].cpu(), free_bytes()
    for cycle in range(2):
        saver.pause("kv_cache")
        runner.row(f"{cycle}: the cache is given back", about(free_bytes() - before, LOST_BYTES))
        runner.row(f"{cycle}: weights are there meanwhile", torch.equal(weights[: 4 * MIB].cpu(), head))
        saver.pause("weights")
        saver.pause("graph")
        saver.pause("graph")
        runner.row(f"{cycle}: a replay while the graph's tag is away is refused", *replay_refused(graph))
        given = free_bytes() - before
        runner.row(f"{cycle}: all are given back", given >= KEPT_BYTES + LOST_BYTES + GIB - SLACK_BYTES, str(given))
        copied = saver.get_cpu_backup(weights[: 4 * MIB])
        lent = saver.get_cpu_backup(weights[: 4 * MIB], zero_copy=True)
        runner.row(f"{cycle}: backups are read", torch.equal(copied, head) and torch.equal(lent, head))
        del lent
        for tag in ("graph", "weights", "kv_cache"):
            saver.resume(tag)
        runner.row(f"{cycle}: weights are exact", torch.equal(weights, pattern(KEPT_BYTES, 1)))
        runner.row(f"{cycle}: no backup while resident", saver.get_cpu_backup(weights) is None)
        cache.fill_(3.0)
        total.zero_()
        graph.replay()
        runner.row(f"{cycle}: the graph replays", float(total.item()) == wanted, f"{total.item()} for {wanted}")
    runner.row("addresses stay", places == (weights.data_ptr(), cache.data_ptr()))

    saver.pause("weights")
    intruder = only_fits(KEPT_BYTES // 2)
    missing = refused(lambda: saver.resume("weights"))
    runner.row("a resume that does not fit says what is missing", about(missing, KEPT_BYTES // 2), str(missing))
    del intruder
    torch.cuda.empty_cache()
    saver.resume("weights")
    runner.row("and works when it fits", torch.equal(weights, pattern(KEPT_BYTES, 1)))
    keep_backups(saver)
    give_backups_back(saver)


def replay_refused(graph: Any) -> tuple[bool, str]:
    """Is a replay refused, and what it said."""
    import sublet

    try:
        graph.replay()
    except sublet.UsageError as error:
        return "'tms/graph/discard'" in str(error), str(error)
    return False, "it was replayed"


def keep_backups(saver: Any) -> None:
    """Backups that are kept after a resume, through two pauses."""
    import torch

    with saver.region("small", enable_cpu_backup=True):
        small = pattern(64 * MIB, 3)
    saver.pause("small")
    place = saver.get_cpu_backup(small, zero_copy=True).data_ptr()
    saver.retain_cpu_backup = True
    saver.resume("small")
    for seed in (3, 4):
        wanted = pattern(64 * MIB, seed)
        kept = saver.get_cpu_backup(small, zero_copy=True)
        same = kept is not None and kept.data_ptr() == place and torch.equal(kept, wanted.cpu())
        runner.row(f"backup {seed} is kept where it was", same and torch.equal(small, wanted))
        del kept
        if seed == 3:
            small.copy_(pattern(64 * MIB, 4))
            saver.pause("small")
            saver.resume("small")
    saver.retain_cpu_backup = False
    saver.pause("small")
    saver.resume("small")
    runner.row("and forgotten by a resume that keeps none", saver.get_cpu_backup(small) is None)


def own_bytes() -> int:
    """Host memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def give_backups_back(saver: Any) -> None:
    """Host memory of backups of the kind mmap, which a resume gives back."""
    import torch

    with saver.region("mapped", enable_cpu_backup=True, cpu_backup_backend="mmap"):
        mapped = pattern(KEPT_BYTES, 5)
    saver.pause("mapped")
    saver.resume("mapped")  # what earlier pauses took is given back too
    torch.cuda.synchronize()
    before = own_bytes()
    saver.pause("mapped")
    during = own_bytes()
    saver.resume("mapped")
    after = own_bytes()
    detail = f"{before >> 20}, {during >> 20}, {after >> 20} MiB"
    moved = min(during - before, during - after)
    runner.row("a pause takes host memory and the resume gives it back", moved >= KEPT_BYTES * 3 // 4, detail)
    runner.row("mapped memory is exact", torch.equal(mapped, pattern(KEPT_BYTES, 5)))


def enabled_role(_args: Any) -> None:
    """torch_memory_saver, set by the environment."""
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    weights = pattern(KEPT_BYTES, 2)
    with saver.region("grads"):
        grads = torch.zeros(GIB // 4, device="cuda:0")
    before = free_bytes()
    saver.pause()
    given = free_bytes() - before
    runner.row("all is given back", given >= KEPT_BYTES + GIB - SLACK_BYTES, str(given))
    with saver.disable():
        passing = torch.full((GIB,), 5, dtype=torch.uint8, device="cuda:0")
        mean = float(passing.float().mean().item())
        del passing
    runner.row("work goes on outside of tags", mean == 5.0, str(mean))
    runner.row("and leaves nothing", about(free_bytes() - before, given), str(free_bytes() - before))
    saver.resume()
    runner.row("weights are exact", torch.equal(weights, pattern(KEPT_BYTES, 2)))
    grads.zero_()
    runner.row("what was not backed up is usable", float(grads.sum().item()) == 0.0)


def vllm_role(_args: Any) -> None:
    """vLLM's allocator."""
    import torch
    from sublet.compat.vllm import CuMemAllocator

    import sublet

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        wide = torch.ones(GIB // 4, device="cuda:0")
        weights = pattern(KEPT_BYTES, 3)
        del wide
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.zeros(LOST_BYTES, dtype=torch.uint8, device="cuda:0")
    head, place, usage = weights[:MIB].cpu(), weights.data_ptr(), allocator.get_current_usage()
    runner.row("what was freed in a pool is given back", about(usage, KEPT_BYTES + LOST_BYTES), str(usage))
    before = free_bytes()
    for cycle in range(2):
        allocator.sleep(offload_tags=("weights",))
        runner.row(f"{cycle}: level 1 gives all back", about(free_bytes() - before, usage))
        saved = copied_bytes(sublet.stats()["last_pause"])
        # Unchanged since they were last saved, they are not copied again.
        runner.row(f"{cycle}: and copies the weights alone, once", about(saved, KEPT_BYTES if cycle == 0 else 0), str(saved))
        allocator.wake_up(tags=["weights"])
        runner.row(f"{cycle}: weights are exact", torch.equal(weights, pattern(KEPT_BYTES, 3)))
        runner.row(f"{cycle}: the cache is still away", free_bytes() - before >= LOST_BYTES - SLACK_BYTES)
        allocator.wake_up(tags=["kv_cache"])
        cache.fill_(cycle)
        runner.row(f"{cycle}: the cache is usable", int(cache[-1].item()) == cycle)
    allocator.sleep("weights")
    intruder = only_fits(KEPT_BYTES + LOST_BYTES // 2)
    missing = refused(allocator.wake_up)
    runner.row("a wake-up that does not fit says what is missing", about(missing, LOST_BYTES // 2), str(missing))
    runner.row("and keeps the backups", torch.equal(sublet.host_copy(weights[:MIB]), head))
    del intruder
    torch.cuda.empty_cache()
    allocator.wake_up()
    exact = torch.equal(weights, pattern(KEPT_BYTES, 3)) and weights.data_ptr() == place
    runner.row("and works when it fits", exact)
    allocator.sleep(offload_tags=())
    allocator.wake_up()
    weights.copy_(pattern(KEPT_BYTES, 4))
    runner.row("level 2: memory is back, to be filled again", torch.equal(weights, pattern(KEPT_BYTES, 4)))


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def nccl_role(_args: Any) -> None:
    """NCCL by ctypes, through ours."""
    import torch

    import sublet

    weights = pattern(KEPT_BYTES, 5)
    nccl = ctypes.CDLL(sublet.nccl_library_path())
    float32, add, stream = 7, 0, torch.cuda.current_stream().cuda_stream
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    data = ctypes.c_void_p
    nccl.ncclAllReduce.argtypes = [data, data, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, data, data]
    version, unique_id, comm = ctypes.c_int(), UniqueId(), ctypes.c_void_p()
    codes = [nccl.ncclGetVersion(ctypes.byref(version)), nccl.ncclGetUniqueId(ctypes.byref(unique_id))]
    codes.append(nccl.ncclCommInitRank(ctypes.byref(comm), 1, unique_id, 0))
    runner.row("a communicator is made", codes == [0, 0, 0], f"NCCL {version.value}: {codes}")
    seats = sublet.stats()["communicators"]
    runner.row("and counted", len(seats) == 1, str(seats))
    sent, received = torch.arange(float(MIB), device="cuda:0"), torch.zeros(MIB, device="cuda:0")

    def reduce() -> bool:
        received.zero_()
        places = (sent.data_ptr(), received.data_ptr())
        code = nccl.ncclAllReduce(*places, MIB, float32, add, comm, stream)
        torch.cuda.synchronize()
        return code == 0 and torch.equal(sent, received)

    runner.row("it reduces", reduce())
    for cycle in range(2):
        codes = [nccl.ncclPause(None), nccl.ncclPause(None)]
        held = resident_bytes(sublet.stats())
        runner.row(f"{cycle}: ncclPause gives all back", codes == [0, 0] and held == 0, f"{codes}, {held} bytes held")
        codes = [nccl.ncclResume(None), nccl.ncclResume(None)]
        exact = torch.equal(weights, pattern(KEPT_BYTES, 5))
        runner.row(f"{cycle}: and ncclResume brings it back", codes == [0, 0] and exact and reduce(), str(codes))
    if hasattr(nccl, "ncclCommSuspend"):
        codes = [nccl.ncclCommSuspend(comm, 1), nccl.ncclPause(None), nccl.ncclResume(None), nccl.ncclCommResume(comm)]
        runner.row("NCCL's own suspend and resume around ours", codes == [0] * 4 and reduce(), str(codes))
    group = ctypes.c_int(-1)
    codes = [nccl.ncclGetGroupID(ctypes.byref(group)), nccl.ncclSetGroupID(3), nccl.ncclMemStats()]
    runner.row("the group is fixed by now", codes == [0, 1, 0] and group.value == 0, str(codes))
    runner.row("the communicator ends", nccl.ncclCommDestroy(comm) == 0)


# ---------------------------------------------------------------- in the parent


def body(args: Any, result: Result, work: Path) -> None:
    """The processes, one after the other."""
    common.touch_host_memory(3 * KEPT_BYTES / 1e9)
    site = runner.package(work, "sublet")
    alias = site / "sublet" / "alias"
    preload = alias / "torch_memory_saver_hook_mode_preload.abi3.so"
    if not preload.is_file():
        raise JobError(f"{preload.name} is not in the package")
    by_alias = {"LD_PRELOAD": str(preload), "SUBLET_TENANT": f"compat-{os.getpid()}"}
    by_environment = {**by_alias, "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    starts: dict[str, dict[str, Any]] = {
        "saver": {"env": by_alias, "sites": [alias, site]},
        "enabled": {"env": by_environment, "sites": [alias, site]},
        "vllm": {"tenant": f"compat-vllm-{os.getpid()}", "sites": [site]},
        "nccl": {"tenant": f"compat-nccl-{os.getpid()}", "sites": [site]},
    }
    limit_s = (args.deadline - 15) / len(ROLES)
    for role in ROLES:
        command = [__file__, "--role", role, "--deadline", str(limit_s + 5)]
        runner.Child(work, role, command, **starts[role]).finish(result, limit_s, prefix=role)
    runner.verdicts(result)


if __name__ == "__main__":
    main(parse, "compat", body, {"saver": saver_role, "enabled": enabled_role, "vllm": vllm_role, "nccl": nccl_role})
