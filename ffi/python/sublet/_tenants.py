"""Driving tenants from any process of the same user, under Sublet or not."""

from __future__ import annotations

import json
from typing import Any, Optional, Union

from sublet._errors import UsageError
from sublet._library import any_library
from sublet._native import WHOSE_TENANT
from sublet._pausing import Tags, parsed, tag_list, timeout_ms


class Tenant:
    """A tenant by its name. Its processes may run or not; each method looks afresh.

    Methods that pause or resume block, without the interpreter lock, and raise what
    :func:`sublet.pause` and :func:`sublet.resume` raise. ``timeout`` is the limit of each phase in
    seconds, by default that of the ``sublet`` command.

    >>> train = sublet.Tenant("train")
    >>> train.pause()["outcome"]
    'completed'
    >>> train.resume()["outcome"]
    'completed'
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise UsageError(f"a tenant has a name, not {name!r}")
        self._name = name

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    def __repr__(self) -> str:
        return f"sublet.Tenant({self._name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tenant) and other._name == self._name

    def __hash__(self) -> int:
        return hash((Tenant, self._name))

    def pause(self, tags: Tags = None, *, timeout: Optional[float] = None) -> dict[str, Any]:
        """Pauses the tenant; with tags, that memory of all its processes, which run on."""
        listed = tag_list(tags)
        limit_ms = timeout_ms(timeout)
        library = any_library()
        if listed is None:
            return parsed(library.pause_tenant(self._name, limit_ms))
        return parsed(library.pause_tags(self._name, listed, WHOSE_TENANT, limit_ms))

    def resume(self, tags: Tags = None, *, timeout: Optional[float] = None) -> dict[str, Any]:
        """Resumes the tenant; with tags, that memory of all its processes."""
        listed = tag_list(tags)
        limit_ms = timeout_ms(timeout)
        library = any_library()
        if listed is None:
            return parsed(library.resume_tenant(self._name, limit_ms))
        return parsed(library.resume_tags(self._name, listed, WHOSE_TENANT, limit_ms))

    def prepare(self, *, wait: bool = True, timeout: Optional[float] = None) -> dict[str, Any]:
        """Brings in, while the tenant runs, the host memory that its next pause takes.

        Blocks until all is there or will not be; with ``timeout``, for as many seconds at most, and
        with ``wait=False`` not at all: what is missing comes in afterwards. Returns what each process
        holds and wants; ``"outcome"`` is ``"completed"`` when all is there, else ``"partial"``.

        Raises:
            OutOfHostMemory: a pause of now would be refused for the same.
            UsageError: there is no such tenant, or ``timeout`` is no time.
        """
        if not wait and timeout is not None:
            raise UsageError("wait=False does not wait: leave timeout out")
        limit_ms = timeout_ms(timeout) or (2**32 - 1)
        return parsed(any_library().prepare_tenant(self._name, limit_ms if wait else 0))

    def stats(self) -> dict[str, Any]:
        """What its processes hold, as ``sublet stats --json`` says in ``tenants``.

        Raises:
            UsageError: there is no such tenant.
        """
        return parsed(any_library().tenant_stats(self._name))

    def switch(self, *, wait: Optional[float] = None) -> dict[str, Any]:
        """Has the tenant get its GPUs: pauses what is in the way there, and resumes it.

        Args:
            wait: while somebody in the way is in a turn, how long to wait, in seconds; by default not at all.

        Returns:
            ``outcome`` (``"already"`` when it had them), ``paused`` (who was paused) and ``reasons``.

        Raises:
            RetryError: somebody in the way is in a turn, which the message names.
            OutOfDeviceMemory: the tenant does not fit, whoever makes way.
            UsageError: there is no such tenant.
        """
        return parsed(any_library().switch_tenant(self._name, timeout_ms(wait)))

    def swap_to(
        self, other: Union[Tenant, str], *, timeout: Optional[float] = None
    ) -> dict[str, Any]:
        """Pauses this tenant and resumes the other, both at once."""
        return swap(self, other, timeout=timeout)


def swap(
    from_tenant: Union[Tenant, str],
    to_tenant: Union[Tenant, str],
    *,
    timeout: Optional[float] = None,
) -> dict[str, Any]:
    """Pauses one tenant and resumes another, both at once and in bounded device memory.

    Returns the reports of both as ``paused`` and ``resumed``, and raises what :func:`sublet.pause` and
    :func:`sublet.resume` do. When the second cannot be resumed, the first runs again.

    >>> sublet.swap("train", "train")
    Traceback (most recent call last):
        ...
    sublet.UsageError: swap: 'train' is both tenants
    """
    names = [
        tenant.name if isinstance(tenant, Tenant) else Tenant(tenant).name
        for tenant in (from_tenant, to_tenant)
    ]
    if names[0] == names[1]:
        raise UsageError(f"swap: '{names[0]}' is both tenants")
    return parsed(any_library().swap_tenants(names[0], names[1], timeout_ms(timeout)))


def tenants() -> list[str]:
    """The names of the tenants of this user on this machine, sorted.

    >>> "train" in sublet.tenants()
    True
    """
    return sorted(json.loads(any_library().tenants()))
