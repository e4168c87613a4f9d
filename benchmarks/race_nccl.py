"""The race's NCCL case: memory of communicators alone, given back and brought back in three ways.

The same ranks have 2 communicators first and many then. Without Sublet they destroy and rebuild them, and suspend and
resume them by NCCL itself where it can; under Sublet they are paused and resumed from outside, wholly and then NCCL's memory
alone.

`legacy` is the same memory where NCCL makes it with cudaMalloc and shares it by the older IPC handles (`NCCL_CUMEM_ENABLE=0`), as
some servers set it: paused and resumed from outside, next to the figures of `nccl` in the same run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import cli
import common
from common import MIB, JobError
from rank import NcclRanks

if TYPE_CHECKING:
    from race_job import Race

#: Words of a collective's messages.
WORDS = (1024, 1 << 18)
#: How often the baseline does each, by communicators: once, unless named here.
REPEATS = {2: 2}


#: What has NCCL make its memory with cudaMalloc.
LEGACY = {"NCCL_CUMEM_ENABLE": "0"}


def kinds(many: int, prefix: str = "nccl") -> tuple[tuple[str, int, int], ...]:
    """Name, communicators, and how many of them do all-to-all."""
    return ((f"{prefix}2", 2, 1), (f"{prefix}20", many, many))


def run(race: Race) -> None:
    """Communicators alone."""
    baseline(race)
    tenant(race)


def run_legacy(race: Race) -> None:
    """Communicators alone, whose memory is no cuMem."""
    tenant(race, "legacy", LEGACY)


def start(race: Race, label: str, tenant: str | None, env: dict[str, str] | None = None) -> NcclRanks:
    """Ranks with a context, and nothing else."""
    how = {"env": env, "life_s": race.args.deadline, "start_s": race.within(120)}
    ranks = NcclRanks(race.result, race.work, label, race.gpus, tenant, **how)
    race.started.append(ranks)
    return ranks


def connect(race: Race, ranks: NcclRanks, name: str, communicators: int, all_to_all: int) -> None:
    """The first communicators, or further ones, and everything that their first collectives make."""
    if communicators == 2:
        ranks.call("connect", race.within(60))
        ranks.call("messages", race.within(60), words=list(WORDS))
    ranks.call("more", race.within(60), communicators=communicators, all_to_all_groups=all_to_all)
    for _ in range(2):
        step = ranks.step(race.within(90))
    common.log(f"{ranks.label} {name}: {communicators} communicators, step {step['seconds']:.3f} s")


def baseline(race: Race) -> None:
    """Destroy and rebuild, and NCCL's own way."""
    result = race.result
    ranks = start(race, "nccl-plain", None)
    wrong: list[str] = []
    for name, communicators, all_to_all in kinds(race.args.many):
        connect(race, ranks, name, communicators, all_to_all)
        wrong += suspended(race, ranks, name, REPEATS.get(communicators, 1))
        for _ in range(REPEATS.get(communicators, 1)):
            gone = ranks.call("disconnect", race.within(60))
            back = ranks.call("reconnect", race.within(90))
            result.sample(f"{name}_rebuild_destroy_s", max(reply["destroy_s"] for reply in gone))
            result.sample(f"{name}_rebuild_rebuild_s", max(reply["rebuild_s"] for reply in back))
            wrong += [each for reply in back for each in reply["wrong"]]
        result.save()
    result.check("nccl: rebuilt collectives bit-identical", not wrong, str(wrong[:6]))
    ranks.kill()  # to leave in order takes as long as destroying the communicators


def suspended(race: Race, ranks: NcclRanks, name: str, repeats: int) -> list[str]:
    """NCCL's own suspend and resume, where it has them; which collectives are wrong after it."""
    wrong: list[str] = []
    for _ in range(repeats):
        for action in ("suspend", "resume"):
            replies = ranks.call("suspend", race.within(60), action=action)
            missing = [reply["why"] for reply in replies if reply["seconds"] is None]
            if missing:
                version = race.data["versions"].get("nccl")
                race.not_run("ncclCommSuspend", f"{missing[0]} (NCCL {version})")
                return wrong
            race.result.sample(f"{name}_suspend_{action}_s", max(reply["seconds"] for reply in replies))
        wrong += ranks.step(race.within(60))["wrong"]
    return wrong


def tenant(race: Race, prefix: str = "nccl", env: dict[str, str] | None = None) -> None:
    """Pauses and resumes from outside."""
    result = race.result
    ranks = start(race, prefix, f"race-{prefix}-{os.getpid()}", env)
    wrong: list[str] = []
    for name, communicators, all_to_all in kinds(race.args.many, prefix):
        connect(race, ranks, name, communicators, all_to_all)
        note_memory(race, ranks, name)
        cycles = race.args.nccl_cycles if communicators == 2 else max(2, race.args.nccl_cycles // 2)
        for cycle in range(cycles + 1):
            told = [race.command(action, str(ranks.tenant)) for action in ("pause", "resume")]
            # The first pause makes host memory.
            series = f"{name}_first" if cycle == 0 else name
            for action, each in zip(("pause", "resume"), told, strict=True):
                result.sample(f"{series}_{action}_s", each["wall_s"])
            wrong += ranks.step(race.within(60))["wrong"]
            common.log(f"{series}: pause {told[0]['wall_s']:.3f} resume {told[1]['wall_s']:.3f} s, wrong {len(wrong)}")
        note_host_memory(race, ranks, name)
        wrong += [] if env else alone(race, ranks, name, cycles // 2)
        result.save()
    result.check(f"{prefix}: collectives bit-identical after every resume", not wrong, str(wrong[:6]))
    ranks.kill()  # to leave in order takes as long as destroying the communicators


def alone(race: Race, ranks: NcclRanks, name: str, cycles: int) -> list[str]:
    """NCCL's memory by itself: the processes run on and see it free. Which collectives are wrong after it."""
    wrong: list[str] = []
    freed: list[float] = []
    for _ in range(cycles):
        held = [reply["free"] for reply in ranks.call("memory", race.within(30))]
        for action in ("pause", "resume"):
            told = race.command(action, str(ranks.tenant), "--library", "nccl")
            race.result.sample(f"{name}_alone_{action}_s", told["wall_s"])
            if action == "pause":
                now = [reply["free"] for reply in ranks.call("memory", race.within(30))]
                freed.append(min(after - before for before, after in zip(held, now, strict=True)) / MIB)
        wrong += ranks.step(race.within(60))["wrong"]
    detail = f"{min(freed):.0f} MiB on each GPU at least, of {race.data['sizes'][name] / MIB:.0f} in the largest rank"
    race.result.check(f"{name}: NCCL's memory alone is back while the ranks run on", min(freed) > 0, detail)
    return wrong


def members(told: dict[str, Any]) -> list[dict[str, Any]]:
    """The pool of each process, out of what `stats --json` said."""
    return [entry["pool"] for tenant in cli.tenants(told) for entry in tenant.get("members", [])]


def nccl_bytes(pool: dict[str, Any]) -> int:
    """What NCCL holds of its own in one process; everything where nothing is NCCL's, as in a rehearsal."""
    classes = [entry for device in pool["devices"] for entry in device["memory"]]
    own = [entry for entry in classes if "nccl" in entry["library"]]
    return sum(entry["own_bytes"] for entry in own or classes)


def note_memory(race: Race, ranks: NcclRanks, name: str) -> None:
    """How much there is to move in the rank that has most, and in how many pieces."""
    pools = members(cli.sublet("stats", str(ranks.tenant), "--json", timeout_s=race.within(30)))
    if not pools:
        raise JobError("the tenant has no processes")
    race.data["sizes"][name] = max(nccl_bytes(pool) for pool in pools)
    for key in ("own_count", "imported_count"):
        counts = [sum(entry[key] for device in pool["devices"] for entry in device["memory"]) for pool in pools]
        race.result.sample(f"{name}_{key}", max(counts))
    common.log(f"{name}: {race.data['sizes'][name] / MIB:.0f} MiB of its own in the largest rank")


def note_host_memory(race: Race, ranks: NcclRanks, name: str) -> None:
    """What saved contents take of each rank's host."""
    for pool in members(cli.sublet("stats", str(ranks.tenant), "--json", timeout_s=race.within(30))):
        race.result.sample(f"{name}_host_mib", pool["host_arena_bytes"] / MIB)
