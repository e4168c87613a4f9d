"""One run in one mode: starts both tenants, plays the steps, and keeps the record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Protocol

from rl import handover, metrics, sampling, switching
from rl.arguments import Options
from rl.absence import GENERATOR, TRAINER, Absence, Habits, State
from rl.problem import Problem, WorkerGone, ended
from rl.progress import Progress
from rl.record import Run
from rl.stopping import Stopped, asked_to_end
from rl.teams import END_S, Team


class Jobs(Protocol):
    """Which programs the tenants run: simulated, or with PyTorch."""

    def train(self, mode: str, work: Path) -> Team:
        """The trainer, not started."""

    def infer(self, mode: str, work: Path) -> Team:
        """The generator, not started."""


class Conductor:
    """Plays one mode. `play` may be called once."""

    def __init__(self, options: Options, jobs: Jobs, mode: str, work: Path) -> None:
        self._options, self._mode = options, mode
        self._train, self._infer = jobs.train(mode, work), jobs.infer(mode, work)
        self._switch = switching.make(mode, self._train, self._infer, options.handover, options.deadline_s)
        self._weights_file = options.shm / f"rl-grpo-{os.getpid()}-{mode}"
        self._clock = sampling.clock()
        self._expected: tuple[type[Exception], ...] = (Problem, *self._switch.errors)
        no_gpus = not options.simulate and options.device == "cpu"
        self._sampler = sampling.Sampler(self._clock, options.sample_s, no_gpus)
        #: What one does during the other's work, and how long each of them takes.
        self._absence: Optional[Absence] = None
        self._habits, self._generators_habits = Habits(), Habits()
        self._progress = Progress(mode, options.steps)
        self.run = Run(mode=mode, handover=options.handover)
        #: Whether it was asked to end.
        self.stopped = False

    def play(self) -> Run:
        """All steps. A run that does not come to its end says why in `failure`; what it has recorded is there.

        So does one that is asked to end, and no other mode is played after it (`stopped`).
        """
        try:
            with asked_to_end(), self._sampler:
                self._start()
                self._steps()
        except self._expected as problem:
            self.run.failure = str(problem)
        except Stopped as asked:
            self.run.failure, self.stopped = f"{asked}, after {len(self.run.steps)} of {self._options.steps} steps", True
        finally:
            self._progress.close()
            if self._absence is not None:
                self._absence.call_off()
            for team in (self._infer, self._train):
                team.kill()
            # Nobody is left whom it could pause or resume.
            if self._absence is not None:
                self._absence.end(END_S)
            self._weights_file.unlink(missing_ok=True)
        self.run.samples = self._sampler.samples
        self.run.facts["host_bytes"] = max(self._sampler.host_bytes, self._switch.host_bytes) + self.run.facts.get("shm_bytes", 0)
        self.run.metrics = metrics.compute(self.run)
        return self.run

    def _start(self) -> None:
        self.run.facts["idle_mib"] = sampling.used_mib()
        with self._phase("start", None):
            if not self._switch.restarts:
                # Both import their libraries together; each takes its memory alone.
                self._train.launch()
                self._infer.start()
                self._meet(self._infer)
                self._switch.generator_started()
            self._train.start()
            self._meet(self._train)
        self._sampler.take("start")
        if self._sampler.samples:
            self._name_gpus()

    def _meet(self, team: Team) -> None:
        for rank, facts in team.facts.items():
            self._sampler.knows(team.pids[rank], facts["parts"], facts["gpu"]["context_bytes"])
            self.run.versions.update(facts["versions"])
            if "kv_bytes_per_token" in facts:
                self.run.facts["kv_bytes_per_token"] = facts["kv_bytes_per_token"]

    def _name_gpus(self) -> None:
        """Which uuid is the GPU of which rank: `sublet stats` says it of each process."""
        known = {pid: facts["gpu"] for team in (self._train, self._infer) for pid, facts in _by_pid(team)}
        for pid, uuid, own_bytes in sampling.places(sampling.look()):
            if own_bytes and pid in known:
                self.run.gpus[uuid] = {name: known[pid][name] for name in ("device", "name", "total_bytes")}

    def _steps(self) -> None:
        asked = self._work(0)
        while asked[0]["op"] == "rollout":
            step = asked[0]["step"]
            self._note(asked[0])
            groups = self._rollout(step, asked)
            every = self._options.rest_every
            if self._switch.can_rest and every and (step + 1) % every == 0:
                self._rest(step)
            self._train.tell("completions", groups=groups)
            asked = self._work(step)
            shares = metrics.seconds(self.run).get(step)
            lost = metrics.lost_share([shares]) if shares else 0.0
            self._progress.step(asked[0]["reward"], lost or 0.0)
        self._note(asked[0])
        (self.run.weights,) = self._train.ask("sha", ranks=[0])
        self._sampler.take("end")
        self._end()

    def _rest(self, step: int) -> None:
        """Both are paused deep and resumed, as by a user who lends the GPUs to somebody else for the night."""
        with self._phase("rest", step):
            self._switch.rest()
        self._sampler.take("rest")
        self.run.facts.setdefault("rest_mib", []).append(sampling.used_mib())
        with self._phase("end_rest", step):
            self._switch.end_rest()

    def _end(self) -> None:
        self._train.tell("exit")
        self._train.finish()
        if not self._switch.restarts:
            self._switch.trainer_ended()
            self._infer.tell("exit")
            self._infer.finish()

    def _work(self, step: int) -> list[dict[str, Any]]:
        """The trainer works until it asks for completions, or is done."""
        if self._switch.generator_leaves_meanwhile:
            due_s = self._generators_habits.due_s(self._clock()) if self._switch.generator_may_return else None
            acts = (self._switch.generator_leave, lambda: self._sampler.take("train"), self._switch.generator_arrive)
            self._absence = Absence(GENERATOR, *acts, due_s, self._clock)
            self._absence.begin()
        with self._phase("train", step) as turn:
            asked = self._train.said("a training step")
        self._generators_habits.worked(_length_s(turn))
        if self._absence is not None:
            with self._phase("to_generator", step):
                self._end_absence(step, self._absence, self._generators_habits)
        for rank, message in enumerate(asked):
            if message["op"] not in ("rollout", "done"):
                raise Problem(f"tenant 'train', process {rank}: {message.get('error', message)}")
            self._parts(self._train, rank, message)
        return asked

    def _parts(self, team: Team, rank: int, message: dict[str, Any]) -> None:
        if "parts" in message:
            self._sampler.knows(team.pids[rank], message["parts"], team.facts[rank]["gpu"]["context_bytes"])

    def _note(self, message: dict[str, Any]) -> None:
        """Reward and loss of the step before, and the weights that it left."""
        if self.run.steps:
            self.run.steps[-1].update(reward=message["reward"], loss=message["loss"], fingerprint=message["fingerprint"])

    def _rollout(self, step: int, asked: list[dict[str, Any]]) -> list[Any]:
        try:
            return self._turn(step, asked)
        except self._expected as error:
            # A switch fails too where a process of one side is dead.
            gone = error if isinstance(error, WorkerGone) else self._infer.dead()
            if gone is None or gone.role != "infer":
                raise
            raise Problem(self._rescue(step, gone)) from error

    def _turn(self, step: int, asked: list[dict[str, Any]]) -> list[Any]:
        was_back = self._switch.generator_is_back
        self._sampler.take("weights" if was_back else "train")
        with self._phase("to_generator", step) as change:
            self._switch.before()
        if not was_back:
            self._generators_habits.returned(_length_s(change))
        self._meet(self._infer)
        if self._switch.by_ipc:
            with self._phase("handover", step):
                handover.by_ipc(self._train, self._infer)
            # While the bucket is there too.
            self._sampler.take("handover")
            with self._phase("handover", step):
                handover.end_ipc(self._train)
        with self._phase("to_generator", step):
            self._switch.to_generator()
        if not self._switch.by_ipc:
            with self._phase("handover", step):
                away = self._switch.leaves_by_pause
                self.run.facts["shm_bytes"] = handover.from_host(self._train, self._infer, self._weights_file, away)
            self._sampler.take("handover")
        if self._switch.leaves_meanwhile:
            self._sampler.take("both")
        with self._phase("generate", step) as turn:
            answers = self._generate(step, asked)
        self._habits.worked(_length_s(turn))
        is_back = False
        if self._absence is not None:
            # During what is left of it, nobody works.
            with self._phase("to_trainer", step):
                is_back = self._end_absence(step, self._absence, self._habits)
        self._sampler.take("both" if is_back else "generate")
        given, found = [message["fingerprint"] for message in asked], [answer["fingerprint"] for answer in answers]
        handover.check(given, found, step)
        with self._phase("to_trainer", step) as change:
            self._switch.to_trainer()
        if not is_back:
            self._habits.returned(_length_s(change))
        self._sampler.take("back")
        tokens = sum(answer["tokens"] for answer in answers)
        self.run.steps.append({"step": step, "reward": None, "loss": None, "fingerprint": None, "tokens": tokens})
        return [answer["completions"] for answer in answers]

    def _generate(self, step: int, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        seed = self._options.seed + 1_000_003 * step
        each = [{"ids": message["ids"], "seed": seed + 7919 * rank} for rank, message in enumerate(asked)]
        self._infer.tell("generate", each, tokens=self._options.tokens)
        if self._switch.leaves_meanwhile:
            due_s = self._habits.due_s(self._clock()) if self._switch.may_return else None
            # What is left of the trainer is to be seen before it comes back.
            acts = (self._switch.leave, lambda: self._sampler.take("generate"), self._switch.arrive)
            self._absence = Absence(TRAINER, *acts, due_s, self._clock)
            self._absence.begin()
        return self._infer.answers("generate")

    def _end_absence(self, step: int, absence: Absence, habits: Habits) -> bool:
        """Whether the one who left is back, once what is under way has ended."""
        if absence.end(self._options.deadline_s):
            self._absence = None
        for act in absence.acts:
            self.run.phases.append({"phase": act.phase, "step": step, "begin_s": round(act.begin_s, 6), "end_s": round(act.end_s, 6)})
            self._switch.note(act.told)
            if act.phase == absence.side.arrives:
                habits.returned(act.end_s - act.begin_s)
        absence.check(self._options.deadline_s)
        return absence.state is State.BACK

    def _rescue(self, step: int, gone: WorkerGone) -> str:
        """The trainer's memory comes back, and it says whether that is as it was."""
        with self._phase("to_trainer", step):
            if self._absence is not None:
                # Whether it is away, back, or something failed: what follows brings it back where it is not, or says why not.
                with contextlib.suppress(*self._expected):
                    self._end_absence(step, self._absence, self._habits)
            self._switch.rescue()
            self._train.tell("completions", failed=True)
            (done, *_) = self._train.said("resuming")
        self._sampler.take("rescued")
        self._train.tell("exit")
        self._train.finish()
        intact = "its weights are as they were" if done.get("intact") else "its weights are NOT as they were"
        return f"the generator died in its turn, in step {step} ({ended(gone.status)}); the trainer has resumed, and {intact}"

    @contextlib.contextmanager
    def _phase(self, name: str, step: int | None) -> Iterator[dict[str, Any]]:
        """Its entry in the record, whole once it is over."""
        entry: dict[str, Any] = {"phase": name, "step": step, "begin_s": round(self._clock(), 6)}
        try:
            yield entry
        finally:
            entry["end_s"] = round(self._clock(), 6)
            self.run.phases.append(entry)
            self.run.commands += [{"step": step, **command} for command in self._switch.said]
            self._switch.said.clear()


def _length_s(phase: dict[str, Any]) -> float:
    return float(phase["end_s"] - phase["begin_s"])


def _by_pid(team: Team) -> list[tuple[int, dict[str, Any]]]:
    return [(team.pids[rank], team.facts[rank]) for rank in team.facts]
