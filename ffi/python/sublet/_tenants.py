"""Driving tenants from any process of the same user, under Sublet or not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Optional, Union

from sublet import _command, _report
from sublet._budgets import Budget, of_tenant
from sublet._contexts import context
from sublet._errors import UsageError
from sublet._library import any_library, command, own_tenant
from sublet._pausing import Tags, back_afterwards, or_by_command, pause_by, resume_by, tag_list, timeout_ms
from sublet._report import Report, SwapReport

#: What `tenants::identity::TenantName` takes.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,39}")


class Tenant:
    """A tenant by its name. Its processes may run or not; each method looks afresh.

    Methods that pause or resume are about all processes of the tenant. They block, without the interpreter lock, and raise what
    :func:`sublet.pause` and :func:`sublet.resume` raise. ``timeout`` is the limit of each phase in seconds, by default that of the
    ``sublet`` command.

    Args:
        name: 1 to 40 letters, digits, ``.``, ``_`` or ``-``; by default the tenant of this process.

    Raises:
        UsageError: the name is not valid, or no name is given and this process has none.
        NotAttachedError: none is given, and this process is not under Sublet.

    >>> with sublet.Tenant("train").paused() as report:
    ...     print(report.outcome)
    completed
    """

    def __init__(self, name: Optional[str] = None) -> None:
        name = own_tenant() if name is None else name
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"a tenant's name is 1 to 40 letters, digits, '.', '_' or '-', not starting with '.', not {name!r}"
            )
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

    def pause(
        self, tags: Tags = None, *, timeout: Optional[float] = None, deep: bool = False, leave_lent: bool = False
    ) -> Report:
        """Pauses the tenant; with tags, only their memory, in all its processes. The caller's own tenant runs on; another stands still,
        unless it has agreed.

        With ``deep`` the contexts of its processes leave too, and nothing of them is left on the GPUs. The package's ``sublet``
        command does it. A tenant that is paused already is paused deep then.

        With ``leave_lent`` what other tenants have open of its memory stays on the GPUs, and the rest leaves; the report counts it in ``stays``. Without
        it the pause waits until they close it.
        """
        return self._pause([], tag_list(tags), timeout, deep, leave_lent)

    def _pause(
        self, done: list[str], tags: Optional[list[str]], timeout: Optional[float], deep: bool, leave_lent: bool = False
    ) -> Report:
        return pause_by(any_library(), self._name, tags, timeout_ms(timeout), deep, done, leave_lent)

    def resume(
        self,
        tags: Tags = None,
        *,
        timeout: Optional[float] = None,
        queue: bool = False,
        wait: Optional[float] = None,
    ) -> Report:
        """Resumes the tenant, also from a deep pause; with tags, only their memory, in all its processes.

        While a device has too little free memory, tries again for ``wait`` seconds, by default not at all. With ``queue``,
        it waits in the queue for the GPUs, ``wait`` seconds at most. Tenants in the way are paused after their quantum. The report has
        the tenants that were paused for it in ``paused``, and the reasons in ``reasons``.

        Raises:
            RetryError: with ``queue``, somebody else comes first, whom the message names.
        """
        library = any_library()
        if queue:
            if tags is not None or timeout is not None:
                raise UsageError("a resume that queues is of the whole tenant: leave tags and timeout out")
            return _report.of(command(library, "resume_in_turn", tenant=self._name, wait_ms=timeout_ms(wait, "wait")))
        return resume_by(library, self._name, tag_list(tags), timeout_ms(timeout), wait)

    @context
    def paused(
        self,
        tags: Tags = None,
        *,
        timeout: Optional[float] = None,
        wait: Optional[float] = None,
        deep: bool = False,
    ) -> Iterator[Report]:
        """Paused inside the ``with`` block, and resumed after it, also if the block raises; as :func:`sublet.paused`."""
        listed = tag_list(tags)
        timeout_ms(wait, "wait")
        with back_afterwards(
            lambda done: self._pause(done, listed, timeout, deep),
            lambda: self.resume(listed, timeout=timeout, wait=wait),
        ) as report:
            yield report

    def prepare(self, *, wait: bool = True, timeout: Optional[float] = None) -> dict[str, Any]:
        """Allocates the host memory of the tenant's next pause while it runs.

        Blocks until all is allocated or cannot be, for ``timeout`` seconds at most; with ``wait=False`` not at all. The
        rest follows later. Returns what each process
        holds and wants; ``"outcome"`` is ``"completed"`` when all is there, else ``"partial"``.

        Raises:
            OutOfHostMemory: a pause would be refused now, for the same reason.
            UsageError: there is no such tenant, or ``timeout`` is no time.
        """
        if not wait and timeout is not None:
            raise UsageError("wait=False does not wait: leave timeout out")
        limit_ms = timeout_ms(timeout) or (2**32 - 1)
        return command(any_library(), "prepare", tenant=self._name, wait_ms=limit_ms if wait else 0)

    def budget(self, budget: Optional[Budget] = None) -> dict[str, Any]:
        """Returns how much GPU memory its processes may hold together; with ``budget``, changes it.

        As :func:`sublet.budget`.

        Raises:
            UsageError: it is no budget, or there is no such tenant.
        """
        return of_tenant(any_library(), self._name, budget)

    def stats(self) -> dict[str, Any]:
        """Returns the memory that its processes hold, as ``sublet stats --json`` prints it in ``tenants``.

        Raises:
            UsageError: there is no such tenant.
        """
        return command(any_library(), "stats", tenant=self._name)

    @property
    def state(self) -> str:
        """``"active"``, ``"paused"`` or another state of ``sublet ps --json``; ``"mixed"`` if its processes are in several, or none answers.

        Raises:
            UsageError: there is no such tenant.
        """
        states: set[str] = {process["member"]["state"] for process in self.stats()["members"]}
        return states.pop() if len(states) == 1 else "mixed"

    def switch(self, *, wait: Optional[float] = None) -> Report:
        """Gives the tenant its GPUs: pauses the tenants in the way there, and resumes it.

        Args:
            wait: while somebody in the way is in a turn, how long to wait, in seconds; by default not at all.

        Returns:
            Its ``outcome`` is ``"already"`` when the tenant had them; ``paused`` says who was paused, and ``reasons`` why.

        Raises:
            RetryError: somebody in the way is in a turn, which the message names.
            OutOfDeviceMemory: the tenant would not fit even if all others were paused.
            UsageError: there is no such tenant.
        """
        return _report.of(command(any_library(), "switch", tenant=self._name, wait_ms=timeout_ms(wait, "wait")))

    def swap_to(
        self,
        other: Union[Tenant, str],
        tags: Tags = None,
        *,
        out_tags: Tags = None,
        in_tags: Tags = None,
        timeout: Optional[float] = None,
        deep: bool = False,
    ) -> SwapReport:
        """Pauses this tenant and resumes the other, simultaneously; as :func:`sublet.swap`."""
        return swap(self, other, tags, out_tags=out_tags, in_tags=in_tags, timeout=timeout, deep=deep)


def swap(
    from_tenant: Union[Tenant, str],
    to_tenant: Union[Tenant, str],
    tags: Tags = None,
    *,
    out_tags: Tags = None,
    in_tags: Tags = None,
    timeout: Optional[float] = None,
    deep: bool = False,
) -> SwapReport:
    """Pauses one tenant and resumes another, simultaneously and in bounded device memory.

    With tags, only memory of these tags leaves or returns, in all processes of its tenant, as by ``Tenant.pause(tags)``. A
    tenant without tags of its own is
    swapped whole. The processes of the second stand still while its memory comes.

    Args:
        from_tenant, to_tenant: by name, or as :class:`sublet.Tenant`.
        tags: of both.
        out_tags: of the first, in addition to ``tags``.
        in_tags: of the second, in addition to ``tags``.
        timeout: limit of each phase in seconds.
        deep: the contexts of the first leave too, once the second runs; the first has no tags then.

    Returns the reports of both, and raises what :func:`sublet.pause` and :func:`sublet.resume` do. When
    the second cannot be resumed, the first runs again, with its tags.

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
    both = tag_list(tags) or []
    out = both + (tag_list(out_tags) or [])
    back = both + (tag_list(in_tags) or [])
    limit_ms = timeout_ms(timeout)
    library = any_library()
    options = [f"--out-tag={tag}" for tag in out] + [f"--in-tag={tag}" for tag in back]

    def by_command() -> dict[str, Any]:
        deepened = ["--deep"] if deep else []
        return _command.run("swap", *names, *options, *deepened, timeout_ms=limit_ms)

    def by_library() -> dict[str, Any]:
        return command(library, "swap", tenant=names[0], out_tags=out, to=names[1], in_tags=back, timeout_ms=limit_ms)

    done = by_command() if deep else or_by_command(by_library, library, names[1], by_command)
    return _report.of_swap(done)


def tenants() -> list[str]:
    """The names of the tenants of this user on this machine, sorted.

    >>> "train" in sublet.tenants()
    True
    """
    return sorted(json.loads(any_library().command("tenants", '{"tenants": {}}')))
