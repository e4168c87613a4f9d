"""Pausing and resuming from inside, and what this process holds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional, Union, cast

from sublet import _command, _report
from sublet._adapter import answer_pauses
from sublet._contexts import context
from sublet._errors import NotAttachedError, OutOfDeviceMemory, RefusedError, UsageError
from sublet._library import command, own_library, own_tenant
from sublet._native import Library
from sublet._paging_regions import refuse_paged
from sublet._regions import checked_tag, refuse_open
from sublet._report import Report

Tags = Union[str, Iterable[str], None]

_TIMEOUT_MS_MAX = 2**32 - 1
#: Between two tries of a resume that waits for device memory, in seconds; the first and the longest.
_BACK_OFF_S = (0.05, 1.0)


def tag_list(tags: Tags) -> Optional[list[str]]:
    """``tags`` as a list; ``None`` for none named."""
    if tags is None:
        return None
    if isinstance(tags, str):
        tags = [tags]
    if not isinstance(tags, Iterable):
        raise UsageError(f"tags are a str, several, or None for all, not {tags!r}")
    listed = [checked_tag(tag) for tag in tags]
    if not listed:
        raise UsageError("no tag is named: give tags, or None for all")
    return listed


def timeout_ms(timeout: Optional[float], name: str = "timeout") -> int:
    """Seconds as the library takes them; 0 for its defaults. ``name`` is the argument's."""
    if timeout is None:
        return 0
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise UsageError(f"{name} is a number of seconds above 0, or None, not {timeout!r}")
    return max(1, min(_TIMEOUT_MS_MAX, int(min(timeout, _TIMEOUT_MS_MAX / 1000) * 1000)))


def parsed(text: str) -> dict[str, Any]:
    """An answer of the library."""
    return cast("dict[str, Any]", json.loads(text))


def _own_library() -> Library:
    library = own_library()
    answer_pauses(library)
    return library


def _not_with_together(**others: object) -> None:
    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(
            f"together=True means the whole tenant and has a limit of its own (SUBLET_WAIT): leave {given[0]} out"
        )


def waiting(resumes: Callable[[], Report], wait: Optional[float]) -> Report:
    """The result of ``resumes``, which is tried again for ``wait`` seconds while a device is too full."""
    timeout_ms(wait, "wait")
    until = time.monotonic() + (wait or 0)
    pause_s, longest_s = _BACK_OFF_S
    while True:
        try:
            return resumes()
        except OutOfDeviceMemory:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, longest_s)


def or_by_command(
    by_library: Callable[[], dict[str, Any]], library: Library, tenant: Optional[str], by_command: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The answer of the library; or of the command, if the library refuses because the processes of ``tenant`` are frozen."""
    try:
        return by_library()
    except RefusedError:
        # Not this process: the command alone can have the driver thaw them.
        if not _command.is_deep(library, tenant):
            raise
    return by_command()


def pause_by(
    library: Library,
    tenant: Optional[str],
    tags: Optional[list[str]],
    limit_ms: int,
    deep: bool,
    done: list[str],
    leave_lent: bool = False,
) -> Report:
    """Pauses a tenant; ``None`` is the caller's own, and of that with tags what the process owns. ``done`` has the answer before any signal is handled."""
    if deep and tags is not None:
        raise UsageError("pause: deep=True means the whole tenant, since a process that runs on needs its context: leave tags out")
    if deep and leave_lent:
        raise UsageError("pause: deep=True takes all of a process off the GPUs: leave leave_lent out")
    if deep:
        return _report.of(_command.run("pause", "--deep", tenant or own_tenant(), timeout_ms=limit_ms, done=done))
    is_own = tenant is None and tags is not None
    said = command(library, "pause", done, tenant=tenant, tags=tags, is_own=is_own, leave_lent=leave_lent, timeout_ms=limit_ms)
    return _report.of(said)


def resume_by(
    library: Library,
    tenant: Optional[str],
    tags: Optional[list[str]],
    limit_ms: int,
    wait: Optional[float],
) -> Report:
    """Resumes a tenant, ``None`` as for :func:`pause_by`, by the command if it must; tried again for ``wait`` seconds."""

    def of_tags(tags: Optional[list[str]]) -> dict[str, Any]:
        is_own = tenant is None and tags is not None
        return command(library, "resume", tenant=tenant, tags=tags, is_own=is_own, timeout_ms=limit_ms)

    def by_library() -> dict[str, Any]:
        if tenant is not None or tags is not None or library.is_paused():
            return of_tags(tags)
        try:
            return of_tags([])
        except NotAttachedError:
            # A process without device memory, such as a launcher, can have paused its tenant all the same.
            return of_tags(None)

    def by_command() -> dict[str, Any]:
        named = [f"--tag={tag}" for tag in tags or ()]
        return _command.run("resume", tenant or own_tenant(), *named, timeout_ms=limit_ms)

    return waiting(lambda: _report.of(or_by_command(by_library, library, tenant, by_command)), wait)


def pause(
    tags: Tags = None,
    *,
    timeout: Optional[float] = None,
    together: bool = False,
    deep: bool = False,
) -> Report:
    """Gives device memory back; returns when others can allocate it.

    Without tags all memory of the whole tenant leaves: every process stands still at its next use of a device until the
    resume, since one that ran on would wait for the others. With tags their memory in the calling process leaves, and
    all processes run on. Before its resume, copies and fills of that memory are refused, and a kernel that touches it ends the
    context. (The memory of tags in all processes: ``sublet.Tenant().pause(tags)``.) Memory that is paused already counts as a success,
    unless memory stays that should have gone. Memory that PyTorch has cached and no tensor uses is given back without being saved.

    Args:
        tags: a tag, several, or ``None`` for everything. ``"nccl"`` is NCCL's own memory in all processes of the tenant: calls
            into NCCL wait for the resume meanwhile. It goes in a call of its own.
        timeout: limit of each phase in seconds, up to the point of no return; by default those of ``sublet pause``.
        together: every process of the tenant makes this call, as ``ncclPause``, and it returns when all have.
        deep: the contexts leave too, so that nothing is left on the GPUs. A process cannot freeze itself: the package's
            ``sublet`` command does it, and this waits for it. Until the resume no thread of the tenant may wait for the driver.

    Returns:
        What was done (:class:`sublet.Report`).

    Raises:
        UsageError: a tag is unknown (``tags`` lists those there are), a region of it is open, or an argument is wrong.
        NotAttachedError: this process is not under Sublet; or, with tags, holds no device memory yet.
        RetryError: not now, for example while a CUDA graph is captured; nothing has changed.
        RefusedError: the same call would fail again; nothing has changed.
        OutOfHostMemory: the contents do not fit into host memory; nothing has changed.
        LostError: end the processes that the message names.

    Blocks, without the interpreter lock, and may be called from any thread. A signal that comes meanwhile is handled after it.

    >>> with sublet.region("kv", contents="discard"):
    ...     cache = allocate(4 << 20)
    >>> sublet.pause("kv").freed_bytes
    4194304
    >>> sublet.is_paused("kv")
    True
    >>> sublet.resume("kv").outcome
    'completed'
    """
    return pause_noting([], tags, timeout, together, deep)


def pause_noting(
    done: list[str], tags: Tags = None, timeout: Optional[float] = None, together: bool = False, deep: bool = False
) -> Report:
    """As :func:`pause`. ``done`` has the answer as soon as memory is away, also when a signal's handler then raises."""
    listed = tag_list(tags)
    limit_ms = timeout_ms(timeout)
    if together:
        _not_with_together(tags=listed, timeout=timeout, deep=deep)
    library = _own_library()
    if together:
        return _report.of(command(library, "pause_together", done))
    if listed is not None:
        refuse_open(listed)
        refuse_paged(listed)
    return pause_by(library, None, listed, limit_ms, deep, done)


def resume(
    tags: Tags = None,
    *,
    timeout: Optional[float] = None,
    wait: Optional[float] = None,
    together: bool = False,
) -> Report:
    """Brings device memory back to the same addresses, with the contents that were kept.

    Without tags on a paused tenant, the memory of the whole pause returns, and tags that had been paused before stay away; on a
    tenant that runs, all tags of the calling process return. With tags their memory returns, and a tenant that was
    paused as a whole runs again. Memory that is on the device already counts as a success.

    Args:
        tags: a tag, several, or ``None``.
        timeout: limit of each phase in seconds; by default those of ``sublet resume``.
        wait: while a device has too little free memory, try again for so many seconds; by default not at all.
        together: every process of the tenant makes this call, as ``ncclResume``.

    Returns:
        As :func:`pause`.

    Raises:
        OutOfDeviceMemory: a device has too little free memory (``missing_bytes``, ``devices``). The memory stays paused,
            and the same call works once memory is free.
        UsageError, NotAttachedError, RetryError, RefusedError, LostError: as for :func:`pause`.

    Blocks as :func:`pause` does.

    >>> sublet.pause().outcome, sublet.is_paused()
    ('completed', True)
    >>> sublet.resume().outcome, sublet.is_paused()
    ('completed', False)
    """
    listed = tag_list(tags)
    limit_ms = timeout_ms(timeout)
    if together:
        _not_with_together(tags=listed, timeout=timeout, wait=wait)
    library = _own_library()
    if together:
        return _report.of(command(library, "resume_together"))
    return resume_by(library, None, listed, limit_ms, wait)


@context
def back_afterwards(pauses: Callable[[list[str]], Report], resumes: Callable[[], Report]) -> Iterator[Report]:
    """Pauses memory with ``pauses`` inside the block. Afterwards it is resumed, unless it was paused before.

    The same holds if a signal's handler raises during the pause.
    """
    done: list[str] = []
    try:
        yield pauses(done)
    finally:
        if any(parsed(answer).get("outcome") in ("completed", "partial") for answer in done):
            resumes()


@context
def paused(
    tags: Tags = None,
    *,
    timeout: Optional[float] = None,
    wait: Optional[float] = None,
    deep: bool = False,
) -> Iterator[Report]:
    """Device memory is away inside the ``with`` block, and back after it, also if the block raises.

    Memory that was away before stays away. Is something paused? :func:`is_paused` says.

    Args:
        tags, timeout, deep: see :func:`pause`.
        wait: see :func:`resume`.

    Yields:
        The report of the pause.

    Raises:
        What :func:`pause` and :func:`resume` raise.

    >>> with sublet.region("kv", contents="discard"):
    ...     cache = allocate(4 << 20)
    >>> with sublet.paused("kv") as report:
    ...     print(report.freed_bytes)
    4194304
    >>> sublet.is_paused("kv")
    False
    """
    listed = tag_list(tags)
    timeout_ms(wait, "wait")
    with back_afterwards(
        lambda done: pause_noting(done, listed, timeout, deep=deep), lambda: resume(listed, timeout=timeout, wait=wait)
    ) as report:
        yield report


def is_paused(tag: Optional[str] = None) -> bool:
    """Is this process paused as a whole; or, with a tag, is some memory of that tag away?

    Raises:
        UsageError: the tag is unknown.
        NotAttachedError: this process is not under Sublet.

    >>> sublet.is_paused()
    False
    """
    library = _own_library()
    if tag is None:
        return library.is_paused()
    found = library.tag_is_paused(checked_tag(tag))
    if found is None:
        known = _known_tags(library)
        shown = ", ".join(known) or "none"
        raise UsageError(
            f"is_paused: this process has no memory with tag '{tag}'; its tags: {shown}", tags=known
        )
    return found


def _known_tags(library: Library) -> list[str]:
    try:
        held = parsed(library.stats())
    except NotAttachedError:
        return []
    classes = (entry for device in held["pool"]["devices"] for entry in device["memory"])
    return sorted({entry["tag"] for entry in classes if entry["tag"]})


def stats() -> dict[str, Any]:
    """Memory of this process on each device, and the times of its last pause and resume.

    Returns:
        A plain dict: ``member`` (who this is, and its state), ``pool`` (``devices``, each with
        ``classes`` by library, tag and contents, and ``pinned``: what stays and why), ``pauses``,
        ``resumes``, ``last_pause``, ``last_resume`` (phases with ``elapsed_us`` and ``bytes``),
        ``communicators`` and ``notes``. Sizes end in ``_bytes``.

    Raises:
        NotAttachedError: this process is not under Sublet, or holds no device memory yet.

    Safe from any thread.

    >>> sublet.stats()["member"]["state"]
    'active'
    """
    return parsed(_own_library().stats())
