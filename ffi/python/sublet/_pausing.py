"""Pausing and resuming from inside, and what this process holds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal, Optional, Union, cast

from sublet._adapter import answer_pauses
from sublet._errors import NotAttachedError, UsageError
from sublet._library import own_library
from sublet._native import WHOSE_PROCESS, WHOSE_TENANT, Library
from sublet._regions import checked_tag, refuse_open

Tags = Union[str, Iterable[str], None]
Whose = Literal["process", "tenant"]

_WHOSE: dict[str, int] = {"tenant": WHOSE_TENANT, "process": WHOSE_PROCESS}
_TIMEOUT_MS_MAX = 2**32 - 1


def tag_list(tags: Tags) -> Optional[list[str]]:
    """``tags`` as a list; ``None`` for none named."""
    if tags is None:
        return None
    if isinstance(tags, str):
        tags = [tags]
    listed = [checked_tag(tag) for tag in tags]
    if not listed:
        raise UsageError("no tag is named: give tags, or None for all")
    return listed


def timeout_ms(timeout: Optional[float]) -> int:
    """Seconds as the library takes them; 0 for its defaults."""
    if timeout is None:
        return 0
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise UsageError(f"timeout is a number of seconds above 0, or None, not {timeout!r}")
    return max(1, min(_TIMEOUT_MS_MAX, int(min(timeout, _TIMEOUT_MS_MAX / 1000) * 1000)))


def parsed(text: str) -> dict[str, Any]:
    """An answer of the library."""
    return cast("dict[str, Any]", json.loads(text))


def _whose(whose: str) -> int:
    if whose not in _WHOSE:
        raise UsageError(f"whose is 'process' or 'tenant', not {whose!r}")
    return _WHOSE[whose]


def _own_library() -> Library:
    library = own_library()
    answer_pauses(library)
    return library


def _not_with_together(tags: Optional[list[str]], timeout: Optional[float]) -> None:
    if tags is not None or timeout is not None:
        raise UsageError(
            "together=True means the whole tenant and has a limit of its own "
            "(SUBLET_WAIT): leave tags and timeout out"
        )


def pause(
    tags: Tags = None,
    *,
    whose: Whose = "process",
    timeout: Optional[float] = None,
    together: bool = False,
) -> dict[str, Any]:
    """Gives device memory back; returns when others can allocate it.

    Without tags the whole tenant is paused: every process of it stands still at its next use of a
    device until the resume. With tags only their memory leaves, and the processes run on; touching
    that memory before its resume is an illegal access. What is paused already stays so, and is a
    success, unless memory stays that should have gone. Memory that PyTorch has cached and no tensor
    uses is given back without being saved.

    Args:
        tags: a tag, several, or ``None`` for everything. ``"nccl"`` is NCCL's own memory in all
            processes of the tenant: calls into NCCL wait for the resume meanwhile. It goes in a call
            of its own, or with ``whose="tenant"``.
        whose: whose memory the tags mean: ``"process"``, the calling process's (and what other
            processes import of it), or ``"tenant"``, that of every process of the tenant.
        timeout: limit of each phase in seconds, up to the point of no return; by default those of
            ``sublet pause``.
        together: every process of the tenant makes this call, as ``ncclPause``, and it returns when
            all have.

    Returns:
        What was done: ``outcome`` is ``"completed"``, ``"already"``, ``"nothing"``: no process of
        the tenant has device memory yet, and none is paused; or ``"partial"``: processes
        were lost, or memory stays that the driver would not copy or let go (``stayed_bytes``; ``notes``
        name it, and a resume brings all back); durations end in ``_us`` (microseconds), sizes in
        ``_bytes``.

    Raises:
        UsageError: a tag is unknown (``tags`` lists those there are), a region of it is open, or an
            argument is wrong.
        NotAttachedError: this process is not under Sublet; or, with tags, holds no device memory yet.
        RetryError: not now, for example while a CUDA graph is captured; nothing has changed.
        RefusedError: the same call would fail again; nothing has changed.
        OutOfHostMemory: the contents do not fit into host memory; nothing has changed.
        LostError: end the processes that it names.

    Blocks, without the interpreter lock, and may be called from any thread. A signal that comes
    meanwhile is handled after it.

    >>> with sublet.region("kv", contents="discard"):
    ...     cache = allocate(4 << 20)
    >>> sublet.pause(tags=["kv"])["outcome"]
    'completed'
    >>> sublet.paused("kv")
    True
    >>> sublet.resume(tags=["kv"])["outcome"]
    'completed'
    """
    listed = tag_list(tags)
    limit_ms = timeout_ms(timeout)
    owner = _whose(whose)
    library = _own_library()
    if together:
        _not_with_together(listed, timeout)
        return parsed(library.pause_together())
    if listed is None:
        return parsed(library.pause_tenant(None, limit_ms))
    refuse_open(listed)
    return parsed(library.pause_tags(None, listed, owner, limit_ms))


def resume(
    tags: Tags = None,
    *,
    whose: Whose = "process",
    timeout: Optional[float] = None,
    together: bool = False,
) -> dict[str, Any]:
    """Brings device memory back to the same addresses, with the contents that were kept.

    Without tags on a paused tenant, what the whole pause took comes back, and tags that had been
    paused before stay away; on a tenant that runs, all tags of ``whose`` come back. With tags these come
    back, and a tenant that was paused as a whole runs again. What is resident already is a success.

    Args:
        tags: a tag, several, or ``None``.
        whose: as for :func:`pause`.
        timeout: limit of each phase in seconds; by default those of ``sublet resume``.
        together: every process of the tenant makes this call, as ``ncclResume``.

    Returns:
        As :func:`pause`.

    Raises:
        OutOfDeviceMemory: a device has too little free memory (``missing_bytes``, ``devices``). What
            was paused still is, and the same call works once memory is free.
        UsageError, NotAttachedError, RetryError, RefusedError, LostError: as for :func:`pause`.

    Blocks as :func:`pause` does.

    >>> sublet.pause()["outcome"], sublet.paused()
    ('completed', True)
    >>> sublet.resume()["outcome"], sublet.paused()
    ('completed', False)
    """
    listed = tag_list(tags)
    limit_ms = timeout_ms(timeout)
    owner = _whose(whose)
    library = _own_library()
    if together:
        _not_with_together(listed, timeout)
        return parsed(library.resume_together())
    if listed is not None:
        return parsed(library.resume_tags(None, listed, owner, limit_ms))
    if library.is_paused():
        return parsed(library.resume_tenant(None, limit_ms))
    try:
        return parsed(library.resume_tags(None, [], owner, limit_ms))
    except NotAttachedError:
        # A process without device memory, such as a launcher, can have paused its tenant all the same.
        return parsed(library.resume_tenant(None, limit_ms))


def paused(tag: Optional[str] = None) -> bool:
    """Is this process paused as a whole; or, with a tag, is some memory of that tag away?

    Raises:
        UsageError: the tag is unknown.
        NotAttachedError: this process is not under Sublet.

    >>> sublet.paused()
    False
    """
    library = _own_library()
    if tag is None:
        return library.is_paused()
    is_paused = library.tag_is_paused(checked_tag(tag))
    if is_paused is None:
        known = _known_tags(library)
        shown = ", ".join(known) or "none"
        raise UsageError(
            f"paused: this process has no memory with tag '{tag}'; its tags: {shown}", tags=known
        )
    return is_paused


def _known_tags(library: Library) -> list[str]:
    try:
        held = parsed(library.stats())
    except NotAttachedError:
        return []
    classes = (entry for device in held["pool"]["devices"] for entry in device["classes"])
    return sorted({entry["tag"] for entry in classes if entry["tag"]})


def stats() -> dict[str, Any]:
    """What this process holds on each device, and what its last pause and resume took.

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
