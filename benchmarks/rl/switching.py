"""How the GPUs go from one tenant to the other: one class a mode.

A step of a run, as the conductor plays it:

    trainer works -> before -> [hand-over by CUDA IPC] -> to_generator -> [hand-over from the host] -> generator works -> to_trainer

Where `to_generator` says `leaves_meanwhile`, the conductor calls `leave` in a thread while the generator works, and with
`may_return` later `arrive`. Where `to_trainer` says `generator_leaves_meanwhile`, it does the same with the generator while the trainer works.
"""

from __future__ import annotations

import importlib
from typing import Any, Optional

from rl.problem import Problem
from rl.teams import Team

#: What a generator holds, in the order in which it takes it.
WEIGHTS, REST = "weights", ["graphs", "kv"]


class Switch:
    """Keeps both where they are; what all modes have in common."""

    #: Whether the trainer's weights are away while the generator works, for the hand-over from the host.
    leaves_by_pause = False
    #: Whether a generator is started for each of its turns.
    restarts = False
    #: Whether both can leave the GPUs with their contexts.
    can_rest = False
    #: What its acts raise in addition to Problem.
    errors: tuple[type[Exception], ...] = ()

    def __init__(self, train: Team, infer: Team, handover: str, timeout_s: float) -> None:
        self.train, self.infer, self.timeout_s = train, infer, timeout_s
        self.by_ipc = handover == "ipc"
        #: Whether the trainer is still to leave, while the generator works; and whether it may come back meanwhile.
        self.leaves_meanwhile = self.may_return = False
        #: The same of the generator, while the trainer works; and whether it has come back already.
        self.generator_leaves_meanwhile = self.generator_may_return = self.generator_is_back = False
        #: Bytes of host memory that hand-written copies hold, at most.
        self.host_bytes = 0
        #: What `sublet` has said of its commands, until it is taken.
        self.said: list[dict[str, Any]] = []

    def generator_started(self) -> None:
        """The generator has all its memory, and the trainer is not there yet."""

    def before(self) -> None:
        """The trainer has requested completions: what the hand-over by CUDA IPC needs."""

    def to_generator(self) -> None:
        """The trainer's memory goes, the generator's comes."""

    def leave(self) -> Any:
        """The trainer's memory goes while the generator works: called in another thread."""

    def arrive(self) -> Any:
        """The trainer's memory comes while the generator still works: called in another thread. None where there is no room for
        it: then nothing has changed."""

    def generator_leave(self) -> Any:
        """The generator's memory goes while the trainer works: called in another thread."""

    def generator_arrive(self) -> Any:
        """The generator's memory comes, but its cache, while the trainer still works: called in another thread. None where there is
        no room for it: then nothing has changed."""

    def note(self, told: Any) -> None:
        """What one of these has returned, once that thread has ended."""

    def to_trainer(self) -> None:
        """The generator's memory goes, the trainer's comes."""

    def rest(self) -> None:
        """Both leave the GPUs, contexts too, in a mode that `can_rest`."""

    def end_rest(self) -> None:
        """Both come back, each as it was before `rest`."""

    def rescue(self) -> None:
        """The generator is dead: the trainer's memory comes, wherever it stood."""

    def trainer_ended(self) -> None:
        """What the generator needs to end by itself."""


class KeepBoth(Switch):
    """Both stay on the device: what fits when it is shared."""


class BySublet(Switch):
    """Both tenants are paused and resumed from outside, by `sublet`; their processes know nothing of it."""

    leaves_by_pause = can_rest = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        sublet = importlib.import_module("sublet")
        self.errors = (sublet.Error,)
        self._does_not_fit: type[Exception] = sublet.OutOfDeviceMemory
        # Not in the first step: there the generator takes memory to work in, which comes back with it from then on.
        self._may_overlap, self._is_first = self.by_ipc, True
        self.may_return, self._is_back = self._may_overlap, False
        self.generator_may_return = self._may_overlap
        #: Whether the trainer gives up what it has cached before the generator's cache comes next to it.
        self._trims = False
        self._trainer, self._generator = sublet.Tenant("train"), sublet.Tenant("infer")

    def generator_started(self) -> None:
        if self.by_ipc:
            self.note(self._generator.pause(tags="kv", timeout=self.timeout_s))
        self.note(self._generator.pause(timeout=self.timeout_s))

    def before(self) -> None:
        # Weights and graphs alone: what was paused by tag stays away until it is resumed by tag.
        if self.by_ipc and not self.generator_is_back:
            self._resume_beside_trainer()
        self.generator_is_back = False

    def _resume_beside_trainer(self, tags: Optional[str] = None) -> None:
        """The generator, or its cache, comes while the trainer is there. If that lacks room, the trainer gives up what it has
        cached, in this step and all later ones."""
        if self._trims:
            self.train.ask("trim")
        try:
            about = {} if tags is None else {"tags": tags}
            self.note(self._generator.resume(timeout=self.timeout_s, **about))
        except self._does_not_fit:
            if self._trims:
                raise
            self._trims = True
            self._resume_beside_trainer(tags)

    def to_generator(self) -> None:
        self.leaves_meanwhile = self._may_overlap and not self._is_first and self._fits()
        self._is_first = False
        if self.leaves_meanwhile:
            return
        if self.by_ipc:
            self.note(self._trainer.pause(timeout=self.timeout_s))
            self.note(self._generator.resume(tags="kv", timeout=self.timeout_s))
        else:
            self.note(self._trainer.swap_to(self._generator, timeout=self.timeout_s))

    def _fits(self) -> bool:
        """The cache comes while the trainer is still there. If there is no room, that is not tried again."""
        try:
            self._resume_beside_trainer("kv")
        except self._does_not_fit:
            self._may_overlap = False
        return self._may_overlap

    def leave(self) -> Any:
        return self._trainer.pause(timeout=self.timeout_s)

    def arrive(self) -> Any:
        try:
            told = self._trainer.resume(timeout=self.timeout_s)
        except self._does_not_fit:
            self.may_return = False
            return None
        self._is_back = True
        return told

    def to_trainer(self) -> None:
        # Not where the trainer emptied its cache to make room: it may want more memory immediately.
        self.generator_leaves_meanwhile = self._is_back and not self._trims
        if self._is_back and not self.generator_leaves_meanwhile:
            self.note(self.generator_leave())
        elif not self._is_back:
            if self.by_ipc:
                self.note(self._generator.pause(tags="kv", timeout=self.timeout_s))
            self.note(self._generator.swap_to(self._trainer, timeout=self.timeout_s))
        self._is_back = False

    def generator_leave(self) -> Any:
        return [self._generator.pause(tags="kv", timeout=self.timeout_s), self._generator.pause(timeout=self.timeout_s)]

    def generator_arrive(self) -> Any:
        try:
            told = self._generator.resume(timeout=self.timeout_s)
        except self._does_not_fit:
            self.generator_may_return = False
            return None
        self.generator_is_back = True
        return told

    def rest(self) -> None:
        for tenant in (self._trainer, self._generator):
            self.note(tenant.pause(deep=True, timeout=self.timeout_s))

    def end_rest(self) -> None:
        self.note(self._generator.resume(timeout=self.timeout_s))
        if not self.generator_leaves_meanwhile:
            self.note(self._generator.pause(timeout=self.timeout_s))
        self.note(self._trainer.resume(timeout=self.timeout_s))

    def rescue(self) -> None:
        if not self._is_back:
            self.note(self._trainer.resume(timeout=self.timeout_s))
        self._is_back = False

    def trainer_ended(self) -> None:
        self.note(self._generator.resume(timeout=self.timeout_s))

    def note(self, told: Any) -> None:
        if isinstance(told, list):
            for each in told:
                self.note(each)
            return
        halves = (told.paused, told.resumed) if hasattr(told, "resumed") else (told,)
        self.said += [command(half.details) for half in halves if "phases" in half.details]


def command(report: dict[str, Any]) -> dict[str, Any]:
    """What a record keeps of a report of `sublet`."""
    phases = {phase["phase"]: round(phase["wall_us"] / 1000, 3) for phase in report["phases"]}
    members = [member["report"] for phase in report["phases"] for member in phase["members"]]
    saved = sum((member.get("kept") or {}).get("copied_bytes", 0) for member in members)
    about = {"action": report["action"], "tenant": report["tenant"], "wall_ms": round(report["wall_us"] / 1000, 3)}
    return {**about, "phases": phases, "saved_bytes": saved}


class ByHand(Switch):
    """Tensors of model and optimizer to the CPU and back, as frameworks do it, and caches emptied."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._is_away = False

    def generator_started(self) -> None:
        self.infer.ask("leave", parts=[*REST, WEIGHTS])

    def before(self) -> None:
        if self.by_ipc:
            # What PyTorch has cached after a step can leave no room for the generator's weights: 7B on 80 GB.
            self.train.ask("trim")
            self.infer.ask("arrive", parts=[WEIGHTS])

    def to_generator(self) -> None:
        self.host_bytes = max(self.host_bytes, sum(self.train.ask("leave")))
        self._is_away = True
        self.infer.ask("arrive", parts=REST if self.by_ipc else [WEIGHTS, *REST])

    def to_trainer(self) -> None:
        self.infer.ask("leave", parts=[*REST, WEIGHTS])
        self.rescue()

    def rescue(self) -> None:
        if self._is_away:
            self.train.ask("arrive")
        self._is_away = False


class DestroyGroups(ByHand):
    """As by hand, and the trainer's process groups are destroyed with each switch and rebuilt."""

    def to_generator(self) -> None:
        self.train.ask("leave_groups")
        super().to_generator()

    def rescue(self) -> None:
        was_away = self._is_away
        super().rescue()
        if was_away:
            self.train.ask("join_groups")


class Restart(Switch):
    """The trainer stays; a generator is started for each of its turns and ends with it."""

    restarts = True

    def before(self) -> None:
        self.infer.start()

    def to_trainer(self) -> None:
        self.infer.tell("exit")
        self.infer.finish()


MODES: dict[str, type[Switch]] = {
    "sublet": BySublet, "cpu": ByHand, "keep-both": KeepBoth, "restart": Restart, "destroy-groups": DestroyGroups,
}  # fmt: skip


def make(mode: str, train: Team, infer: Team, handover: str, timeout_s: float) -> Switch:
    """The switch of a mode."""
    if mode not in MODES:
        raise Problem(f"there is no mode '{mode}': use one of {', '.join(MODES)}")
    return MODES[mode](train, infer, handover, timeout_s)
