"""Budgets: shown, and changed while the tenant's processes run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional, Union

from sublet._errors import UsageError
from sublet._library import command, own_library

if TYPE_CHECKING:
    from sublet._native import Library

#: Budgets as the command takes them, such as ``"0=40GiB"``, or sizes by the GPU's number or identity.
Budget = Union[str, Mapping[int, str], Mapping[str, str]]


def budget_text(budget: Budget) -> str:
    """Budgets as the command takes them."""
    if isinstance(budget, str):
        return budget
    if not isinstance(budget, Mapping) or not budget:
        raise UsageError(
            f"a budget is text such as '0=40GiB', or a dict of sizes by GPU, such as {{0: '40GiB'}}, not {budget!r}"
        )
    return ",".join(f"{gpu}={size}" for gpu, size in sorted(budget.items(), key=lambda item: str(item[0])))


def of_tenant(library: Library, tenant: Optional[str], budget: Optional[Budget]) -> dict[str, Any]:
    """Shows a tenant's budgets, or changes them; ``None`` for the library's own tenant."""
    budgets = None if budget is None else budget_text(budget)
    return command(library, "budget", tenant=tenant, budgets=budgets)


def budget(budget: Optional[Budget] = None) -> dict[str, Any]:
    """How much GPU memory the tenant of this process may hold; with ``budget``, changes it.

    A budget is of all processes of the tenant together, and of each GPU by itself. A change counts at
    once. A budget below the memory in use takes nothing away: new allocations fail as out of memory until they fit.

    Args:
        budget: ``"40GiB"`` for every GPU, ``"0=40GiB,1=none"`` or ``{0: "40GiB", 1: "none"}`` for GPUs by
            the numbers that ``nvidia-smi`` shows, ``"none"`` to take it back. ``None`` shows it.

    Returns:
        ``tenant``; ``budgets``, as they were given (``""`` for none); ``gpus`` that its processes see,
        each with ``uuid``, ``index``, ``budget_bytes`` (``None`` for none), ``held_bytes`` and
        ``total_bytes``; and ``failures``, the processes that do not count. After a change also
        ``outcome``: ``"completed"``, or ``"partial"`` when there are such.

    Raises:
        UsageError: the budget is not valid, or the tenant has no process with device memory yet.
        NotAttachedError: this process is not under Sublet.

    Blocks for moments, without the interpreter lock.

    >>> sublet.budget("0=4GiB")["outcome"]
    'completed'
    >>> sublet.budget()["budgets"]
    '0=4GiB'
    >>> sublet.budget("none")["budgets"]
    'none'
    """
    return of_tenant(own_library(), None, budget)
