"""Does a stock PyTorch and NCCL job survive pauses, how long do they take, and what stays on the GPU?

One process per GPU, two communicators, all-reduce on both and all-to-all on one. Two sizes: `--tensors-gib 8
--discard-half` (half of the tensors kept, half in a region whose contents may be lost) and `--nccl-only` (a few MiB
of messages). `--control` says who pauses: `outside` (the `sublet` command), `inside` (ncclPause on every rank),
`inside-one` (sublet_pause_tenant on rank 0), or a comma-separated list of these, one after the other in the same
processes; `none` runs the baseline alone. The baseline, in the same run and without Sublet, destroys the process group
and builds it again (`--rebuild-cycles`).

After each cycle every collective must be bit-identical to the first and every kept block to its checksum. In the last
cycle of each kind another process, while the tenant is paused, fills what was free anyhow and then allocates 90% of
what the pause freed. Free memory is read by a third process (observer.py).

Bound: a pause copies the kept bytes once each way: (bytes kept + NCCL's own 1.7 to 3.3 GB a rank) at 55 GB/s a GPU
(152 out, 198 in for 4 GPUs together), 30 to 60 ms a rank for NCCL alone; creating, mapping, exporting and importing
some 700 to 1,200 blocks of 2 MiB at about 0.2 ms each adds 0.15 to 0.3 s, and the driver serialises it per process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import cli
import common
from common import GIB, MIB, JobError, Result
from observer import observed
from phases import Phases
from rank import NcclRanks
from suite import main, options

CONTROLS = ("outside", "inside", "inside-one")
#: More than the baseline that a paused process may leave on the GPU.
LEFT_ALLOWANCE = 32 * MIB
#: NCCL on plain allocations: more of them, so the goal for speed is another's.
IS_PLAIN = os.environ.get("NCCL_CUMEM_ENABLE") == "0"


parse = options(
    __doc__, 280, control=("outside", "outside, inside, inside-one (a list), or none"), cycles=(20, "cycles of each kind of control"),
    tensors_gib=(0.0, "GiB of big tensors a GPU"), discard_half=(False, "half of them in a region to discard"),
    nccl_only=(False, "small messages and no big tensors"), rebuild_cycles=(3, "cycles of the baseline; 0 skips it"),
    expandable=(False, "torch with expandable_segments:True"),
    warm_host=(False, "touch host memory first, for machines that grow it"), pause_timeout=(60.0, "seconds for one pause or resume"),
)  # fmt: skip


class Job:
    """The run: observer, baseline, tenant."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        self.args, self.result, self.work = args, result, work
        self.data = result.data
        self.observer, self.world = observed(args, result, work)
        self.empty = self.observer.settled_free()
        self.tenant = f"bench-{os.getpid()}"
        self.controls = [] if args.control == "none" else args.control.split(",")
        if not set(self.controls) <= set(CONTROLS):
            raise JobError(f"--control {args.control}: use {', '.join(CONTROLS)} or none")
        half = args.tensors_gib / 2 if args.discard_half else 0.0
        self.kept_gib = 0.0 if args.nccl_only else args.tensors_gib - half
        self.scratch_gib = 0.0 if args.nccl_only else half
        self.words = [1024, 1 << 18] if args.nccl_only else [1024, 1 << 18, 1 << 24]
        self.env = {}
        if args.expandable:
            self.env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

    def used(self, free: list[int]) -> list[int]:
        """Bytes in use per GPU beyond the idle machine."""
        return [before - now for before, now in zip(self.empty, free, strict=True)][: self.world]

    def start(self, label: str, tenant: str | None) -> tuple[NcclRanks, dict[str, Any]]:
        """Ranks with context, communicators and tensors; the memory in use after each step."""
        memory: dict[str, Any] = {}
        how = {"env": self.env, "launcher": "launch", "life_s": self.args.deadline}
        ranks = NcclRanks(self.result, self.work, label, self.world, tenant, **how)
        memory["context"] = self.used(self.observer.free())
        ranks.call("connect", 90)
        ranks.call("messages", 60, words=self.words, all_to_all_groups=1)
        if self.kept_gib or self.scratch_gib:
            reply = ranks.call("tensors", 60, kept_gib=self.kept_gib, scratch_gib=self.scratch_gib)
            memory["tensors"] = reply[0]
        memory["first_step_s"] = ranks.step(90)["seconds"]
        memory["later_step_s"] = ranks.step()["seconds"]
        memory["full"] = self.used(self.observer.free())
        memory["seen_from_inside"] = ranks.call("memory")
        return ranks, memory

    # ------------------------------------------------------------ baseline

    def baseline(self) -> None:
        """Destroys and rebuilds the communicators, without Sublet."""
        record: dict[str, Any] = {"samples": {"destroy_s": [], "rebuild_s": [], "left_bytes": []}}
        self.data["baseline"] = record
        ranks, record["memory"] = self.start("baseline", None)
        samples, wrong = record["samples"], []
        for cycle in range(self.args.rebuild_cycles):
            gone = ranks.call("disconnect", 60)
            samples["left_bytes"].append(self.used(self.observer.free()))
            back = ranks.call("reconnect", 90)
            samples["destroy_s"].append(max(reply["destroy_s"] for reply in gone))
            samples["rebuild_s"].append(max(reply["rebuild_s"] for reply in back))
            wrong += [name for reply in back for name in reply["wrong"]]
            common.log(f"baseline {cycle}: destroy {samples['destroy_s'][-1]:.3f} rebuild {samples['rebuild_s'][-1]:.3f} s")
            self.result.save()
        ranks.call("disconnect", 60)
        ranks.call("drop_tensors", 60)
        record["left_after_destroy"] = self.used(self.observer.settled_free())
        record["wrong"] = wrong
        for name in ("destroy_s", "rebuild_s"):
            record[name] = common.summarise(samples[name])
        record["total_s"] = common.summarise(
            [a + b for a, b in zip(samples["destroy_s"], samples["rebuild_s"], strict=True)]
        )
        ranks.close()
        self.result.save()

    # ------------------------------------------------------------ the tenant

    def change(self, ranks: NcclRanks, control: str, action: str) -> dict[str, Any]:
        """Pauses or resumes; the time that the caller waits, and what it was told."""
        limit = self.args.pause_timeout
        began = time.perf_counter()
        if control == "outside":
            told = cli.sublet(action, self.tenant, "--json", timeout_s=limit)
            if told["exit"] != 0:
                self.data.setdefault("failures", []).append(told)
                self.data["ps_at_failure"] = cli.sublet("ps", timeout_s=20)
                ranks.print_stacks()
                raise JobError(cli.say(told))
            return {"wall_s": told["wall_s"], "told": told}
        try:
            if control == "inside":
                replies = ranks.call("together", limit + 10, action=action)
            else:
                replies = ranks.call("tenant", limit + 10, ranks=[0], action=action, timeout_ms=int(limit * 1000))
        except JobError:
            self.data["ps_at_failure"] = cli.sublet("ps", timeout_s=20)
            self.data["stats_at_failure"] = cli.sublet("stats", self.tenant, "--json", timeout_s=20)
            raise
        return {
            "wall_s": max(reply["seconds"] for reply in replies),
            "ranks_s": [reply["seconds"] for reply in replies],
            "with_steering_s": time.perf_counter() - began,
        }

    def next_tenant(self, before: list[int], paused: list[int]) -> dict[str, Any]:
        """Another process takes 90% of what was freed, after filling what was free anyhow."""
        entries = []
        for gpu in range(self.world):
            freed = max(0, paused[gpu] - before[gpu])
            entries.append([gpu, max(0, before[gpu] - 256 * MIB), int(freed * 0.9) // 4096 * 4096])
        if not all(entry[2] for entry in entries):
            return {"passed": False, "why": "a pause freed nothing", "entries": entries}
        answers = self.observer.take(entries)
        return {"passed": all(answer["allocated"] for answer in answers), "gpus": answers}

    def cycle(self, ranks: NcclRanks, control: str, number: int, last: bool) -> dict[str, Any]:
        """One pause and resume, with every check."""
        if control != "outside":
            ranks.call("sync", 30)
        before = self.observer.free()
        pause = self.change(ranks, control, "pause")
        paused = self.observer.free()
        sample: dict[str, Any] = {"control": control, "cycle": number, "pause": pause}
        sample["left_bytes"] = self.used(paused)
        sample["freed_bytes"] = [now - then for then, now in zip(before, paused, strict=True)][: self.world]
        if last:
            sample["next_tenant"] = self.next_tenant(before, paused)
        resume = self.change(ranks, control, "resume")
        after = self.observer.free()
        sample["resume"] = resume
        sample["lost_bytes"] = [then - now for then, now in zip(before, after, strict=True)][: self.world]
        step = ranks.step()
        sample["first_step_s"], sample["wrong"] = step["seconds"], step["wrong"]
        left = max(sample["left_bytes"]) / MIB
        common.log(
            f"{control} {number}: pause {pause['wall_s']:.3f} resume {resume['wall_s']:.3f} s, left {left:.0f} MiB,"
            f" step {step['seconds']:.3f} s, wrong {len(step['wrong'])}"
        )
        return sample

    def cycles(self) -> None:
        """The cycles under Sublet."""
        if self.args.warm_host:
            self.data["host_warmed"] = common.touch_host_memory((self.kept_gib + 4) * self.world)
        ranks, self.data["memory"] = self.start("tenant", self.tenant)
        self.data["stats_before"] = cli.sublet("stats", self.tenant, "--json", timeout_s=30)
        phases = Phases()
        for control in self.controls:
            series = control.replace("-", "_")
            for number in range(self.args.cycles):
                last = number == self.args.cycles - 1
                sample = self.cycle(ranks, control, number, last)
                self.result.sample(series, sample)
                for action in ("pause", "resume"):
                    told = sample[action].get("told", {}).get("json")
                    if told is None and (number in (1, self.args.cycles - 1)):
                        told = self.data.setdefault("stats", {})[f"{control}.{number}"] = ranks.call("stats", 20, ranks=[0])
                    if isinstance(told, dict):
                        told = told.get(f"last_{action}", told)
                    phases.add_members(f"{control}.{action}", told)
                if sample["wrong"]:
                    self.result.check(f"{control}: cycle {number} bit-identical", False, str(sample["wrong"][:6]))
                self.result.save()
            self.summarise(control)
        self.data["phases"] = phases.summaries()
        self.data["stats_after"] = cli.sublet("stats", self.tenant, "--json", timeout_s=30)
        self.data["ps_after"] = cli.sublet("ps", timeout_s=30)
        ranks.call("stats", 20, print_too=True)
        ranks.call("disconnect", 60)
        ranks.call("drop_tensors", 60)
        self.data["left_after_destroy"] = self.used(self.observer.settled_free())
        ranks.close()
        self.data["left_after_exit"] = self.used(self.observer.settled_free())
        self.verdicts()

    # ------------------------------------------------------------ verdicts

    def summarise(self, control: str) -> None:
        """Medians of one kind of control; the first cycle stands apart."""
        samples = self.data["samples"][control.replace("-", "_")]
        later = samples[1:] or samples
        summary: dict[str, Any] = {}
        for action in ("pause", "resume"):
            summary[f"{action}_s"] = common.summarise([s[action]["wall_s"] for s in later])
            summary[f"first_{action}_s"] = samples[0][action]["wall_s"]
        summary["pause_resume_s"] = common.summarise([s["pause"]["wall_s"] + s["resume"]["wall_s"] for s in later])
        summary["first_step_s"] = common.summarise([s["first_step_s"] for s in later])
        summary["left_mib"] = max(max(s["left_bytes"]) for s in samples) / MIB
        summary["freed_gib"] = min(min(s["freed_bytes"]) for s in samples) / GIB
        summary["lost_mib_max"] = max(max(s["lost_bytes"]) for s in samples) / MIB
        self.data["summary"][control] = summary
        wrong = sum(len(s["wrong"]) for s in samples)
        complete = len(samples) == self.args.cycles
        self.result.check(f"{control}: {len(samples)} cycles, all bit-identical", wrong == 0 and complete, f"{wrong} wrong")
        taken = samples[-1].get("next_tenant", {})
        self.result.check(f"{control}: another process took 90% of what was freed", taken.get("passed", False), str(taken))

    def verdicts(self) -> None:
        """The figures that were promised."""
        baseline, summary = self.data["baseline"], self.data["summary"]
        references = {"the same process after destroy and empty cache": self.data["left_after_destroy"]}
        if "left_after_destroy" in baseline:
            references["the unhooked process after destroy and empty cache"] = baseline["left_after_destroy"]
        paused = [s["left_bytes"] for c in self.controls for s in self.data["samples"][c.replace("-", "_")]]
        worst = [max(column) for column in zip(*paused, strict=True)]
        for what, reference in references.items():
            over = [left - known for left, known in zip(worst, reference, strict=True)]
            detail = f"left {[b // MIB for b in worst]} MiB, reference {[b // MIB for b in reference]} MiB"
            self.result.check(f"left while paused is within 32 MiB of {what}", max(over) <= LEFT_ALLOWANCE, detail)
        rebuild = (baseline.get("total_s") or {}).get("median")
        for control in self.controls:
            both = summary[control]["pause_resume_s"]["median"]
            if rebuild and both:
                summary[control]["times_faster_than_rebuild"] = rebuild / both
            if both and self.world == 4 and self.args.nccl_only and not IS_PLAIN:
                fast = bool(rebuild) and rebuild / both >= 5
                self.result.check(f"{control}: 5 times faster than rebuild", fast, f"{rebuild} s against {both} s")


def body(args: Any, result: Result, work: Path) -> None:
    """Baseline, then tenant."""
    job = Job(args, result, work)
    if args.rebuild_cycles > 0:
        job.baseline()
        result.check("baseline: rebuilt collectives bit-identical", not result.data["baseline"]["wrong"])
    if job.controls:
        job.cycles()


def named(args: Any) -> str:
    """The name of the record."""
    size = "nccl" if args.nccl_only else f"tensors{args.tensors_gib:g}"
    return f"nccl_{size}_{args.control.replace(',', '+')}{'_expandable' if args.expandable else ''}"


if __name__ == "__main__":
    main(parse, named, body)
