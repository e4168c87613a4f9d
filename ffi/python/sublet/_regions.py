"""Regions: memory that is allocated inside one belongs to its tag."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from types import TracebackType
from typing import Any, Callable, Literal, Optional, TypeVar, Union, cast

from sublet import _paging_regions
from sublet._adapter import answer_pauses, torch_adapter
from sublet._errors import UsageError
from sublet._library import own_library
from sublet._native import CONTENTS_DISCARD, CONTENTS_FILE, CONTENTS_KEEP, RUNS_WITHOUT, Library

Contents = Literal["keep", "discard", "file"]
Home = Literal["device", "paged"]
CONTENTS: dict[str, int] = {
    "keep": CONTENTS_KEEP,
    "discard": CONTENTS_DISCARD,
    "file": CONTENTS_FILE,
}
TAG_BYTES_MAX = 128

_Function = TypeVar("_Function", bound=Callable[..., Any])


def checked_tag(tag: object) -> str:
    """``tag``, or the UsageError that says what is wrong with it."""
    if not isinstance(tag, str):
        raise UsageError(f"a tag is a str, not {type(tag).__name__}")
    length = len(tag.encode(errors="surrogatepass"))
    if not 1 <= length <= TAG_BYTES_MAX or "\0" in tag or not tag.isprintable():
        raise UsageError(f"a tag is 1 to {TAG_BYTES_MAX} bytes of printable text, not {tag!r}")
    return tag


class _Entry:
    """A region that a thread is in. Its thread's list alone keeps it, so it goes with the thread."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.task = _current_task()
        #: It has ended in another order, so that its thread is not in it any more once it is the innermost.
        self.is_over = False
        #: It has ended on another thread. Its own goes on to allocate in it until it looks.
        self.is_over_elsewhere = False
        self._begun: list[str] = []
        self._pool: Any = None
        self._end: Callable[[], None] = _nothing

    def begin(self, library: Library, adapter: Any, device: Optional[int]) -> None:
        """Begins it on this thread."""
        region = self.region
        if adapter is not None:
            # Around the driver's region: no allocation of another thread may get the tag while it is
            # served from PyTorch's default pool.
            self._pool = adapter.region_pool(region.tag, device, region.all_threads, plain=region.home == "paged")
            self._pool.__enter__()
        self._end = library.region_end_all_threads if region.all_threads else library.region_end
        agreed = RUNS_WITHOUT if region.runs_without else 0
        library.region_begin(region.tag, CONTENTS[region.contents] | agreed, device, self._begun, region.all_threads)
        with _open_lock:
            _open.add(self)
        _entered.entries.append(self)

    def end(self) -> None:
        """Ends the parts that have begun."""
        with _open_lock:
            _open.discard(self)
        if self in _entered.entries:
            _entered.entries.remove(self)
        self._let_go()

    def _let_go(self) -> None:
        """A second time does nothing."""
        pool, self._pool = self._pool, None
        try:
            if self._begun:
                self._begun.clear()
                self._end()
        finally:
            if pool is not None:
                pool.gen.close()

    def __del__(self) -> None:
        # Its thread has ended in it.
        with contextlib.suppress(Exception):
            self._let_go()


def _nothing() -> None:
    pass


def _current_task() -> Optional[weakref.ref[Any]]:
    """The asyncio task that this code runs in."""
    asyncio: Any = sys.modules.get("asyncio")
    try:
        task = None if asyncio is None else asyncio.current_task()
    except RuntimeError:
        return None
    return None if task is None else weakref.ref(task)


class _Entered(threading.local):
    """The regions that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def look(self) -> list[_Entry]:
        """The same, after what is over has ended."""
        while self.entries and (self.entries[-1].is_over or self.entries[-1].is_over_elsewhere):
            self.entries[-1].end()
        return self.entries


_entered = _Entered()
#: The regions that any thread is in.
_open: weakref.WeakSet[_Entry] = weakref.WeakSet()
_open_lock = threading.Lock()


def _all_open() -> list[_Entry]:
    with _open_lock:
        return list(_open)
#: Where memory of each tag is: its first region has said it.
_homes: dict[str, str] = {}


def refuse_open(tags: Optional[list[str]]) -> None:
    """Raises UsageError where a region of one of `tags` (of all for None) is open on some thread.

    What is allocated in it after the pause could be memory that PyTorch has cached, and that is away.
    """
    _entered.look()
    opened = [entry for entry in _all_open() if not entry.is_over and (tags is None or entry.region.tag in tags)]
    if not opened:
        return
    tag = opened[0].region.tag
    if opened[0].is_over_elsewhere:
        raise UsageError(
            f"pause: a region of tag '{tag}' was left on another thread, and the thread that entered it may still allocate in it: enter "
            "any region there once, or end that thread",
            tags=[tag],
        )
    raise UsageError(
        f"pause: a region of tag '{tag}' is open: memory allocated in it could then be memory "
        "that is away; leave the region first",
        tags=sorted({entry.region.tag for entry in opened}),
    )


class Region:
    """A region to enter by ``with`` or to decorate a function with; made by :func:`region`.

    One object may be entered many times, also nested, and by several threads.
    """

    def __init__(
        self,
        tag: str,
        contents: str,
        device: Optional[int],
        all_threads: bool,
        home: str = "device",
        frames: Union[int, str, None] = None,
        runs_without: bool = False,
    ) -> None:
        self.tag = tag
        self.contents = contents
        self.device = device
        self.all_threads = all_threads
        self.home = home
        self.frames = frames
        self.runs_without = runs_without

    def __repr__(self) -> str:
        return f"sublet.region({self.tag!r}, {self.contents!r})"

    def __enter__(self) -> Region:
        library = own_library()
        if library.tag_is_paused(self.tag):
            raise UsageError(
                f"region: tag '{self.tag}' is paused, and memory allocated now could be memory that "
                f"is away: call sublet.resume(tags=['{self.tag}']) first"
            )
        answer_pauses(library)
        adapter = torch_adapter()
        if adapter is not None:
            adapter.check_supported()
        around = _entered.look()[-1:]
        entry = _Entry(self)
        if around and around[0].task not in (None, entry.task):
            raise UsageError(
                f"region: '{self.tag}' begins while another asyncio task of this thread is in region '{around[0].region.tag}', and would "
                "get memory of that one: leave regions before `await`"
            )
        device = self._prepare_home()
        try:
            entry.begin(library, adapter, device)
            return self
        except BaseException:
            entry.end()
            raise

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        mine = _entered.look()
        if mine and mine[-1].region is self:
            mine[-1].end()
            _entered.look()
            return
        # It ends all the same, as soon as it can: nobody could end it later.
        for entry in reversed([*(entry for entry in _all_open() if entry not in mine), *mine]):
            if entry.region is self and not (entry.is_over or entry.is_over_elsewhere):
                entry.is_over, entry.is_over_elsewhere = entry in mine, entry not in mine
                break
        raise UsageError(
            f"region: '{self.tag}' is not the innermost region of this thread: regions end in "
            "reverse order, on the thread that entered them"
        )

    def __call__(self, function: _Function) -> _Function:
        """The function, run inside the region."""
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            name = getattr(function, "__qualname__", repr(function))
            raise UsageError(
                f"region: {name} is a coroutine or generator function, whose body runs after the "
                "call has returned: use `with sublet.region(...)` inside it"
            )

        @functools.wraps(function)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast(_Function, in_region)

    def _prepare_home(self) -> Optional[int]:
        """Has memory of the region where it belongs. The device that the region is about."""
        home = _homes.get(self.tag, self.home)
        if home != self.home:
            raise UsageError(
                f"region: the home of tag '{self.tag}' is '{home}' in this process and cannot be '{self.home}' too: use another tag"
            )
        device = self.device
        if self.home == "paged":
            device = _paging_regions.current_device(self.tag) if device is None else device
            _paging_regions.page(self.tag, device, self.frames)
        _homes.setdefault(self.tag, self.home)
        return device


def region(
    tag: str,
    contents: Contents = "keep",
    *,
    device: Optional[int] = None,
    all_threads: bool = False,
    home: Home = "device",
    frames: Union[int, str, None] = None,
    runs_without: bool = False,
) -> Region:
    """Device memory allocated inside belongs to ``tag``, and can be paused and resumed by it.

    Use it by ``with`` or as a decorator. Regions nest, and the innermost counts. A region is the
    calling thread's; memory that NCCL, cuBLAS and cuDNN ask for belongs to no tag.

    Args:
        tag: 1 to 128 bytes of printable text. A tag has one ``contents`` for the life of the process.
        contents: what a pause does with the bytes: ``"keep"`` saves them to host memory, ``"file"``
            to a file, ``"discard"`` does not save them, and they are undefined after the resume.
        device: number of the one device that is meant; memory on others belongs to no tag. By
            default all devices.
        all_threads: also for threads that are in no region of their own, such as those of PyTorch's backward pass. One such
            region at a time in a process; with PyTorch 2.10 and later, begun before other threads' regions and captures.
        home: where its memory is. ``"paged"``: in host memory, with a part on the device when it is used, as for a module
            that :func:`paged` was given. It is for all memory that ``cudaMalloc`` allocates inside. Such a region is for
            one device, the current one by default. :func:`set_frames`, :func:`plan` and :func:`report` know it by its tag.
        frames: of ``"paged"``, the most device memory for all of its tag, as for :func:`paged`. The first region of the tag
            says it; :func:`set_frames` changes it.
        runs_without: the process runs on while somebody else has the tag paused, because it does not use that memory then. Else the
            whole tenant stands still until the resume. A pause by :func:`pause` never stops its own process.

    Raises:
        UsageError: the tag or ``contents`` is not valid, the tag is paused, or the tag has another ``contents`` or
            ``home`` already. Raised on entry, but for the first.
        NotAttachedError: this process is not under Sublet. Raised on entry.

    >>> with sublet.region("kv", contents="discard"):
    ...     cache = allocate(4 << 20)
    >>> @sublet.region("weights")
    ... def load():
    ...     return allocate(2 << 20)
    >>> weights = load()
    """
    checked_tag(tag)
    if contents not in CONTENTS:
        known = ", ".join(repr(word) for word in CONTENTS)
        raise UsageError(f"region: contents is one of {known}, not {contents!r}")
    if device is not None and (isinstance(device, bool) or not isinstance(device, int) or device < 0):
        raise UsageError(f"region: device is the number of a device, not {device!r}")
    if home not in ("device", "paged"):
        raise UsageError(f"region: home is 'device' or 'paged', not {home!r}")
    if home == "paged" and contents != "keep":
        raise UsageError(f"region: paged memory keeps its contents, which {contents!r} does not")
    if home == "device" and frames is not None:
        raise UsageError("region: frames are for home='paged'")
    return Region(tag, contents, device, all_threads, home, frames, runs_without)
