"""What a framework moves to host memory and back, moved by tag in place.

The framework's own code says which tensors go. The first time it takes them to host memory itself, and brings
them back inside a region: so exactly what it moves has a tag, whatever the model, the optimizer or the version.
From then on they leave and return by that tag, at link speed and to the same addresses. Where the
framework has made other tensors since, as by loading a checkpoint, it moves them itself once more.

Errors of a pause or resume change nothing here: the same call can be made again.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional

from sublet._errors import UsageError
from sublet._library import own_library
from sublet._paging_refusals import moved_by
from sublet._pausing import pause, resume
from sublet._regions import region

_log = logging.getLogger("sublet")

#: Finds the tensors that are meant; asked when they are resident.
Tensors = Callable[[], Iterable[Any]]


class _Where(enum.Enum):
    """The place of the tensors, and the caller that moved them there."""

    #: On their device, without a tag.
    THEIRS = enum.auto()
    #: In host memory of the framework's.
    HOST = enum.auto()
    #: On their device, with the tag.
    TAGGED = enum.auto()
    #: Paused by the tag.
    AWAY = enum.auto()


class Moved:
    """One model, or one optimizer's state. Its methods are called from one thread at a time.

    Args:
        tag: the tag that its memory gets.
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self._where = _Where.THEIRS
        self._addresses: frozenset[tuple[int, int]] = frozenset()
        self._regions_work = True
        self._holds = 0
        #: What the end of the last hold does.
        self._then: Optional[Callable[[], None]] = None
        self._lock = threading.RLock()

    @property
    def is_away(self) -> bool:
        """Is it paused by tag?"""
        return self._where is _Where.AWAY

    @property
    def is_tagged(self) -> bool:
        """Does it leave and return by tag?"""
        return self._where in (_Where.TAGGED, _Where.AWAY)

    def offload(self, theirs: Callable[[], object], tensors: Tensors) -> None:
        """Takes it off its device: by tag, or as ``theirs`` does. Away already is a success."""
        with self._lock:
            if self._holds:
                self._then = functools.partial(self.offload, theirs, tensors)
                return
            if self._where is _Where.AWAY:
                return
            if self._where is _Where.TAGGED and _addresses(tensors()) == self._addresses:
                self._leave()
                return
            if self._where is _Where.TAGGED:
                _log.info("%s: its tensors are others than before, and are moved once more", self.tag)
            theirs()
            self._where = _Where.HOST
            if own_library().tag_is_paused(self.tag) is False:
                # What they had is cached unused by torch, which keeps pools of tags: it goes unsaved.
                pause(self.tag)

    def load(self, theirs: Callable[[], object], tensors: Tensors) -> None:
        """Brings it back to its device. Resident already is a success."""
        with self._lock:
            self._then = None
            if self._where is _Where.AWAY:
                self.stay()
            elif self._where is _Where.HOST:
                self._load_tagged(theirs, tensors)
            else:
                theirs()

    def stay(self) -> None:
        """Resumes it if it is paused, for a caller that reads it at a point where it was left paused."""
        with self._lock:
            if self._where is _Where.AWAY:
                resume(self.tag)
                self._where = _Where.TAGGED

    def renew(self) -> None:
        """Brings it back, and leaves the next move to the framework: its tensors may become others."""
        with self._lock:
            self.stay()
            if self._where is _Where.TAGGED:
                self._where = _Where.THEIRS

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Inside, it is readable; afterwards it is away again if it was, or if that was requested inside."""
        hold = self.hold()
        try:
            yield
        finally:
            hold.release()

    def hold(self) -> Hold:
        """As :meth:`resident`, until the hold is released or forgotten."""
        with self._lock:
            if self.is_away:
                self.stay()
                self._then = self._leave
            self._holds += 1
            return Hold(self)

    def end_holds(self) -> None:
        """The holder is done with it."""
        with self._lock:
            self._holds, self._then = 0, None

    def end_hold(self) -> None:
        """One of those who hold it is done with it."""
        with self._lock:
            if not self._holds:
                return
            self._holds -= 1
            if not self._holds and self._then is not None:
                then, self._then = self._then, None
                then()

    def _leave(self) -> None:
        pause(self.tag)
        self._where = _Where.AWAY

    def _load_tagged(self, theirs: Callable[[], object], tensors: Tensors) -> None:
        library = own_library()
        if library.tag_is_paused(self.tag):
            resume(self.tag)
        with contextlib.ExitStack() as stack:
            if self._regions_work:
                try:
                    stack.enter_context(region(self.tag, runs_without=True))
                except UsageError as error:
                    self._regions_work = False
                    _log.warning("%s: moved as without Sublet: %s", self.tag, error)
            theirs()
        is_known = library.tag_is_paused(self.tag) is not None
        self._addresses = _addresses(tensors())
        self._where = _Where.TAGGED if is_known and self._regions_work else _Where.THEIRS


class Hold:
    """Keeps something resident until it is released; forgetting it releases it too."""

    def __init__(self, moved: Moved) -> None:
        self._moved: Optional[Moved] = moved

    def release(self) -> None:
        """Ends the hold; a second time does nothing."""
        moved, self._moved = self._moved, None
        if moved is not None:
            moved.end_hold()

    def __del__(self) -> None:
        try:
            self.release()
        except Exception as error:
            _log.warning("%s", error)


class Movables:
    """What one framework moves in this process, by the object that has it.

    Args:
        prefix: what all tags begin with.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._of: weakref.WeakKeyDictionary[Any, dict[str, Moved]] = weakref.WeakKeyDictionary()

    def of(self, owner: object, kind: str) -> Moved:
        """What of ``owner`` is moved as ``kind``; its tag is made of the prefix, the kind and a number."""
        with self._lock:
            kinds = self._of.setdefault(owner, {})
            if kind not in kinds:
                if kind == "optimizer":
                    moved_by(owner, f"sublet.compat.{self._prefix}")
                kinds[kind] = Moved(f"{self._prefix}/{kind}/{next(self._numbers)}")
            return kinds[kind]

    def bring_back(self) -> None:
        """Resumes all that is paused."""
        with self._lock:
            found = [moved for kinds in self._of.values() for moved in kinds.values()]
        for moved in found:
            moved.end_holds()
            moved.stay()


class Nccl:
    """NCCL's memory in this process, which leaves and returns as a whole."""

    def __init__(self) -> None:
        self.is_away = False

    def leave(self) -> None:
        """It leaves. All ranks have met before: until then one may need it."""
        if not self.is_away:
            pause("nccl")
            self.is_away = True

    def come_back(self) -> None:
        """Resumes it. The first rank does so for all."""
        if self.is_away:
            resume("nccl")
            self.is_away = False


def states(state: Any) -> Iterator[Any]:
    """The values of an optimizer's state, which has a mapping of names for each parameter."""
    for _, of_parameter in state.items():
        yield from of_parameter.values()


def of_module(module: Any) -> Iterator[Any]:
    """The tensors of a torch module that moving it moves."""
    handles = getattr(module, "_all_handles", None)
    if handles:
        # FSDP's first version: parameters are views of these.
        yield from (handle.flat_param for handle in handles)
    else:
        yield from module.parameters()
    yield from module.buffers()


def empty_cache() -> None:
    """Makes torch free cached memory without a tag, once."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()


def _addresses(tensors: Iterable[Any]) -> frozenset[tuple[int, int]]:
    """Returns the addresses and bytes of tensors on their devices."""
    found = set()
    for tensor in tensors:
        # A DTensor's own part.
        local = getattr(tensor, "_local_tensor", tensor)
        if getattr(local, "is_cuda", False):
            found.add((int(local.data_ptr()), int(local.nbytes)))
    return frozenset(found)
