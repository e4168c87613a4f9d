"""What is left when a process dies in the middle: of the survivors, of their memory, and of files?

One job of NCCL ranks a round. `kill -9` takes one rank at a random time in a pause from outside, in a resume, in a pause
from inside (ncclPause on every rank), or while all stand paused; in one round it takes the command itself, again and
again. All that wait for the dead rank must be told which process died within 2 s of it. The survivors must then
be paused, or be pausable, and another process must be able to allocate 90% of what they had. When the rest is ended too,
no file, socket, shared memory or device memory may be left.

Bound: a dead process's socket closes immediately, so an error should take some ms; a round is the start of a job, 10 s.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import cli
import common
from common import MIB, JobError, Result
from observer import Observer, observed
from rank import NcclRanks
from suite import main, options

ERROR_WITHIN_S = 2.0
#: A command that ends well so soon after a death had every answer already.
LAST_MOMENT_S = 0.01
#: Empty, and used again by the next tenant of that name.
LOCK = "coordinator.lock"
ROUNDS = ("paused", "coordinator", "during_pause", "inside", "during_resume", "during_pause", "during_pause", "during_resume")
#: What may stay on a GPU after every process is gone.
LEFT_MAX = 4 * MIB

parse = options(
    __doc__, 280, rounds=(",".join(ROUNDS), f"a list of {', '.join(sorted(set(ROUNDS)))}"), seed=1,
    coordinators=(10, "commands to kill in that round"),
)


class Round:
    """One job and one death."""

    def __init__(self, job: Job, number: int, kind: str) -> None:
        self.job, self.kind, self.result = job, kind, job.result
        self.title = f"round {number} ({kind})"
        self.tenant = f"deaths-{os.getpid()}-{number}"
        self.record: dict[str, Any] = {"kind": kind}
        job.data.setdefault("rounds", []).append(self.record)
        environment = {"LAUNCH_KEEP_SURVIVORS": "1"}
        how = {"env": environment, "life_s": job.args.deadline, "start_s": 90}
        self.ranks = NcclRanks(self.result, job.work, f"deaths{number}", job.world, self.tenant, **how)
        self.ranks.call("connect", 60)
        self.ranks.call("messages", 60, words=[1024, 1 << 18])
        self.ranks.step()
        self.victim = job.random.randrange(job.world)
        self.pid = self.ranks.pids[self.victim]
        self.record["victim"] = {"rank": self.victim, "pid": self.pid}
        # Whole cycles first: what one frees and, as the first takes longer, how long the next takes.
        for _ in range(2):
            self.before = job.observer.free()
            self.pause_s = self.command("pause")["wall_s"]
            self.freed = [now - then for then, now in zip(self.before, job.observer.free(), strict=True)]
            self.resume_s = self.command("resume")["wall_s"]
        self.check_step("after whole cycles")

    def check(self, what: str, passed: bool, detail: str = "") -> None:
        """A verdict of this round."""
        self.result.check(f"{self.title}: {what}", passed, detail)

    def check_step(self, when: str) -> None:
        """Collectives must be as at first."""
        wrong = self.ranks.step(30)["wrong"]
        self.check(f"collectives bit-identical {when}", not wrong, str(wrong[:4]))

    def command(self, action: str, must: bool = True) -> dict[str, Any]:
        told = cli.sublet(action, self.tenant, "--json", timeout_s=30)
        if must and told["exit"] != 0:
            self.ranks.print_stacks()
            raise JobError(f"{self.title}: {cli.say(told)} {told.get('json')}"[:1500])
        return told

    # ------------------------------------------------------------ deaths

    def kill(self) -> None:
        """Ends the victim."""
        os.kill(self.pid, signal.SIGKILL)

    def killed_during(self, action: str, took_s: float, victim: int | None) -> dict[str, Any]:
        """Starts the command and kills `victim`, or the command itself, at a random time in it."""
        delay_s = self.job.random.uniform(0.0, 0.9 * took_s)
        told = cli.killed(action, self.tenant, after_s=delay_s, victim=victim)
        if told["exit"] == common.EXIT_DEADLINE:
            self.ranks.print_stacks()
            raise JobError(f"{self.title}: the command hung for 30 s after the death")
        return {**told, "action": action, "took_s": took_s}

    def judge(self, told: dict[str, Any]) -> None:
        """The command must have ended in time, and have named the dead."""
        said = told.pop("said")
        text, document = said.strip(), told.pop("json", None)
        if isinstance(document, dict):
            report = document.get("report") or {}
            text = document.get("error") or f"losses: {report.get('losses')}"
            told["outcome"] = document.get("outcome")
        told["error"] = text[:1500]
        self.record["told"] = told
        self.result.sample("error_after_s", told["after_s"])
        self.check(f"the command ended within {ERROR_WITHIN_S:.0f} s", told["after_s"] <= ERROR_WITHIN_S, f"{told['after_s']:.3f} s")
        if told.get("ended_before") or (told["exit"] == 0 and told["after_s"] < LAST_MOMENT_S):
            self.record["note"] = "the command was done before it could see the death"
            return
        if told["exit"] == 0 and "had ended before" in said:
            self.record["note"] = "the rank was dead before the command looked, and its notes say so"
            self.check("the report says what was lost with the dead process", "has ended" in said, said[:600])
            return
        named = str(self.pid) in said
        self.check("the error names the dead process", named and told["exit"] != 0, f"exit {told['exit']}: {told['error'][:600]}")

    def during(self, action: str) -> None:
        """A rank dies in a pause or a resume."""
        if action == "resume":
            self.command("pause")
        took = self.pause_s if action == "pause" else self.resume_s
        self.judge(self.killed_during(action, took, self.pid))
        self.hand_on()

    def while_paused(self) -> None:
        """A rank dies while all stand paused; the next resume says so."""
        self.command("pause")
        self.kill()
        time.sleep(0.2)
        self.record["ps"] = cli.sublet("ps", timeout_s=10).get("stdout", "")[:1500]
        began = time.perf_counter()
        told = self.command("resume", must=False)
        said = f"{json.dumps(told.get('json'))}\n{told.get('stderr', '')}"
        took = time.perf_counter() - began
        self.judge({"action": "resume", "exit": told["exit"], "after_s": took, "json": told.get("json"), "said": said})
        self.hand_on()

    def inside(self) -> None:
        """A rank dies while every rank is in ncclPause."""
        ranks = self.ranks.send("together", action="pause")
        time.sleep(self.job.random.uniform(0.0, 0.6 * self.pause_s))
        self.kill()
        killed, answers, late = time.perf_counter(), {}, []
        for rank in [rank for rank in ranks if rank != self.victim]:
            try:
                self.ranks.collect("together", [rank], 10)
                answers[rank] = "returned 0"
            except JobError as error:
                answers[rank] = str(error)[:500]
            if time.perf_counter() - killed > ERROR_WITHIN_S:
                late.append(rank)
        took = time.perf_counter() - killed
        self.record["answers"], self.record["after_s"] = answers, took
        self.result.sample("error_after_s", took)
        self.check(f"every survivor's call returned within {ERROR_WITHIN_S:.0f} s", not late, f"{took:.3f} s, late {late}")
        unnamed = [rank for rank, text in answers.items() if text != "returned 0" and str(self.pid) not in text]
        self.check("errors name the dead process", not unnamed, str(answers)[:900])
        self.hand_on()

    def coordinator(self) -> None:
        """The command dies, again and again; the next one puts things right and the job goes on."""
        for number in range(self.job.args.coordinators):
            action = ("pause", "resume")[number % 2]
            if action == "resume":
                self.command("pause")
            told = self.killed_during(action, self.pause_s if action == "pause" else self.resume_s, None)
            told.pop("said")
            told.pop("json")
            pause, resume = self.command("pause", must=False), self.command("resume", must=False)
            exits = (pause["exit"], resume["exit"])
            after = {"next": exits, "pause_s": pause["wall_s"], "resume_s": resume["wall_s"]}
            self.record.setdefault("kills", []).append({**told, **after})
            said = [(t.get("json") or {}).get("error") for t in (pause, resume)]
            if exits != (0, 0):
                self.ranks.print_stacks()
                raise JobError(f"after the command was killed in a {action}, the next ones ended with {exits}: {said}"[:1500])
            wrong = self.ranks.step(30)["wrong"]
            if wrong:
                raise JobError(f"collectives differ after the command was killed: {wrong[:4]}")
        self.check(f"{self.job.args.coordinators} commands killed, the next ones succeed, collectives bit-identical", True)

    # ------------------------------------------------------------ afterwards

    def hand_on(self) -> None:
        """The survivors are paused now or can be; another process takes 90% of what they had."""
        states = self.states()
        self.record["states"] = states
        if any(state != "paused" for state in states.values()):
            told = self.command("pause", must=False)
            error = (told.get("json") or {}).get("error")
            self.record["second_pause"] = {"exit": told["exit"], "wall_s": told["wall_s"], "error": error}
            self.check("survivors can be paused", told["exit"] in (0, 3), str(self.record["second_pause"])[:900])
        survivors = [gpu for gpu in range(self.job.world) if gpu != self.victim]
        free = self.job.observer.settled_free()
        entries = []
        for gpu in survivors:
            wanted = int(self.freed[gpu] * 0.9) // 4096 * 4096
            entries.append([gpu, max(0, free[gpu] - self.freed[gpu] - 256 * MIB), wanted])
        answers = self.job.observer.take(entries)
        missing = [self.freed[gpu] - (free[gpu] - self.before[gpu]) for gpu in survivors]
        self.record["hand_on"] = {"answers": answers, "missing_bytes": missing}
        given = all(answer["allocated"] for answer in answers) and max(missing) <= 0.1 * max(self.freed)
        self.check("another process takes 90% of the survivors' memory", given, f"{answers} missing {missing}")

    def states(self) -> dict[int, str]:
        """Each process's state, as `sublet ps` has it."""
        told = cli.sublet("ps", "--json", timeout_s=15)
        found = {}
        for tenant in cli.tenants(told):
            if tenant.get("tenant") == self.tenant:
                found = {m["member"]["pid"]: m["member"]["state"] for m in tenant.get("members", [])}
        return found

    def end(self) -> None:
        """Ends what is left of the job; nothing of it may remain."""
        self.ranks.kill()
        pids = [Path(f"/proc/{pid}") for pid in self.ranks.pids.values()]
        common.wait_until("the end of the ranks", lambda: not any(path.exists() for path in pids), 15)
        shown = cli.sublet("ps", "--json", timeout_s=15)
        left = [str(path.relative_to(self.job.run_dir)) for path in self.job.run_dir.rglob("*") if not path.is_dir()]
        files = [path for path in left if Path(path).name != LOCK]
        shared = sorted(name for name in set(os.listdir("/dev/shm")) - self.job.shared_before if not name.startswith("sublet-sim"))
        used = [then - now for then, now in zip(self.job.empty, self.job.observer.settled_free(), strict=True)]
        self.record["left"] = {"files": left, "shared": shared, "gpu_bytes": used}
        clean = shown["exit"] == 0 and not cli.tenants(shown) and not files
        self.check("ps shows no tenant and removes what the dead left", clean, str(left))
        self.check("nothing is left in shared memory", not shared, str(shared))
        self.check("nothing is left on the GPUs", max(used[: self.job.world]) <= LEFT_MAX, str(used))

    def run(self) -> None:
        """The death of this round, and the end."""
        deaths = {"paused": self.while_paused, "inside": self.inside, "coordinator": self.coordinator}
        try:
            if self.kind in deaths:
                deaths[self.kind]()
            else:
                self.during(self.kind.removeprefix("during_"))
        finally:
            self.end()


class Job:
    """What the rounds share."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        self.args, self.result, self.work, self.data = args, result, work, result.data
        self.random = random.Random(args.seed)
        self.run_dir = work / "run"
        self.run_dir.mkdir(mode=0o700)
        os.environ["SUBLET_RUN_DIR"] = str(self.run_dir)
        self.shared_before = set(os.listdir("/dev/shm"))
        self.observer, self.world = observed(args, result, work)
        self.empty = self.observer.settled_free()

    def run(self) -> None:
        """All rounds; one that breaks is a failed check and the next ones still run."""
        began, longest = time.monotonic(), 0.0
        for number, kind in enumerate(self.args.rounds.split(",")):
            at = time.monotonic()
            if self.args.deadline - 15 - (at - began) < longest:
                self.result.check(f"round {number} ({kind})", False, "no time was left for it")
                continue
            try:
                Round(self, number, kind).run()
            except JobError as error:
                self.result.check(f"round {number} ({kind}) ran to its end", False, str(error))
                self.observer.kill()
                common.stop_children()
                self.observer = Observer(self.work)
            longest = max(longest, time.monotonic() - at)
            self.result.save()
        for record in self.data.get("rounds", []):
            told = record.get("told", {})
            after = told.get("after_s", record.get("after_s"))
            shown = "-" if after is None else f"{after:.3f} s"
            print(f"{record['kind']:<14} exit {told.get('exit', '-')!s:<4} after {shown}  {str(told.get('error', ''))[:150]}")


if __name__ == "__main__":
    main(parse, "deaths_nccl", lambda *given: Job(*given).run())
