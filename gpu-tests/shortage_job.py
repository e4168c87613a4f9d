"""What does a resume do when another process has taken the memory?

A job of NCCL ranks with kept tensors is paused; a holder then takes so much of every GPU that half of what the job
needs is missing. `sublet resume` must refuse immediately, say how many bytes are missing and who holds them, and leave the
job paused. `sublet resume --wait` in the background must return soon after the holder lets go, and every kept
word and collective must be as before. One round with a holder outside of any tenant, one with a tenant.

Bound: a refusal asks the driver for free memory, some ms; the wait looks again at least every 2 s.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import cli
from common import MIB, JobError, Result
from observer import Observer, observed
from rank import NcclRanks
from suite import main, options

REFUSED_WITHIN_S, RETURNED_WITHIN_S, WAIT_S = 2.0, 4.0, 60

parse = options(
    __doc__, 150, kept_gib=(2.0, "GiB of tensors a GPU"), hold_s=(1.5, "time that --wait waits before the holder lets go"),
)


class Job:
    """The paused job and the holders."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        self.args, self.result, self.work, self.data = args, result, work, result.data
        self.observer, self.world = observed(args, result, work)
        self.tenant = f"shortage-{os.getpid()}"
        how = {"life_s": args.deadline, "start_s": 90}
        self.ranks = NcclRanks(result, work, "shortage", self.world, self.tenant, **how)
        self.ranks.call("connect", 60)
        self.ranks.call("messages", 60, words=[1024, 1 << 18])
        self.ranks.call("tensors", 60, kept_gib=args.kept_gib, scratch_gib=0.0, block_mib=512)
        self.check_step("before")

    def command(self, *words: str, timeout_s: float = 30.0) -> dict[str, Any]:
        """Runs the command and keeps what it told."""
        told = cli.sublet(*words, "--json", timeout_s=timeout_s)
        self.data.setdefault("told", []).append(told)
        return told

    def check_step(self, when: str) -> None:
        """Every collective and every kept word."""
        wrong = self.ranks.step()["wrong"]
        self.result.check(f"{when}: collectives and kept words identical", not wrong, str(wrong[:6]))

    def states(self) -> set[str]:
        """States of the tenant's processes."""
        told = cli.sublet("ps", "--json", timeout_s=15)
        mine = [entry for entry in cli.tenants(told) if entry.get("tenant") == self.tenant]
        return {member["member"]["state"] for entry in mine for member in entry["members"]}

    def round(self, kind: str) -> None:
        """Pause, hold, a refused resume, a waiting one."""
        name = f"holder-{os.getpid()}" if kind == "tenant" else None
        holder = Observer(self.work, name)
        try:
            before = self.observer.free()
            told = self.command("pause", self.tenant)
            if told["exit"] != 0:
                self.ranks.print_stacks()
                raise JobError(f"{cli.say(told)} {told.get('json')}"[:1500])
            paused = self.observer.free()
            freed = [now - then for then, now in zip(before, paused, strict=True)][: self.world]
            got = holder.hold([[gpu, paused[gpu] - freed[gpu] // 2] for gpu in range(self.world)])
            self.data.setdefault("held_bytes", {})[kind] = got
            self.refused(kind, name, holder.pids[0], freed)
            self.waited(kind, holder)
        finally:
            holder.close()
        self.check_step(f"{kind}: right after the resume")

    def refused(self, kind: str, name: str | None, pid: int, freed: list[int]) -> None:
        """A resume without --wait."""
        free = self.observer.free()
        told = self.command("resume", self.tenant)
        document = told.get("json") or {}
        error, missing = document.get("error") or told.get("stderr", ""), document.get("missing_device_bytes") or 0
        short = sum(max(0, need - now) for need, now in zip(freed, free, strict=False))
        self.result.sample("refused_s", told["wall_s"])
        refused = told["exit"] == 1 and told["wall_s"] <= REFUSED_WITHIN_S
        detail = f"exit {told['exit']} in {told['wall_s']:.3f} s"
        self.result.check(f"{kind}: resume is refused within {REFUSED_WITHIN_S:.0f} s", refused, detail)
        detail = f"{missing} bytes said, {short} counted over {len(freed)} GPUs: {error}"
        self.result.check(f"{kind}: the error says how much is missing", 0 < missing <= sum(freed), detail)
        said = f"{error} {document.get('shortages')}"
        holder = [word for word in (name, str(pid)) if word and word in said]
        self.result.check(f"{kind}: the error names the holder", bool(holder), f"process {pid}, tenant {name}: {said}")
        self.result.check(f"{kind}: the tenant is still paused", self.states() == {"paused"}, str(self.states()))
        now = self.observer.free()
        kept = max(abs(then - since) for then, since in zip(free, now, strict=True))
        self.result.check(f"{kind}: a refused resume keeps nothing", kept <= 4 * MIB, f"{free} then {now}")

    def waited(self, kind: str, holder: Observer) -> None:
        """A resume with --wait, in the background, while the holder lets go."""
        box: list[dict[str, Any]] = []
        words = ("resume", self.tenant, f"--wait={WAIT_S}s")
        waiter = threading.Thread(target=lambda: box.append(self.command(*words, timeout_s=WAIT_S + 30)), daemon=True)
        waiter.start()
        waiter.join(self.args.hold_s)
        self.result.check(f"{kind}: --wait waits while memory is short", waiter.is_alive(), str(box)[:600])
        holder.drop()
        dropped = time.perf_counter()
        waiter.join(WAIT_S + 30)
        took = time.perf_counter() - dropped
        if not box:
            self.ranks.print_stacks()
            raise JobError(f"{kind}: resume --wait did not come back")
        self.result.sample("returned_after_release_s", took)
        in_time = box[0]["exit"] == 0 and took <= RETURNED_WITHIN_S
        what = f"{kind}: --wait returns within {RETURNED_WITHIN_S:.0f} s of the release"
        self.result.check(what, in_time, f"{took:.3f} s {cli.say(box[0])[:400]}")

    def run(self) -> None:
        """Both rounds."""
        for kind in ("process", "tenant"):
            self.round(kind)
        self.ranks.close()


if __name__ == "__main__":
    main(parse, "shortage", lambda *given: Job(*given).run())
