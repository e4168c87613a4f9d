"""slime, miles and vime: their process groups stay, and NCCL's memory leaves.

These frameworks destroy their process groups before they sleep and build them again when they wake up, since
NCCL's memory would stay otherwise. With :func:`install` the groups stay as they are, their memory leaves at the
same moment, and returns to the same addresses.

The trainer's processes are a tenant of their own, in one family with the engine's: NCCL's memory leaves in
all processes of a tenant.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable

from sublet._errors import UsageError
from sublet._library import attached
from sublet.compat._binding import Framework, Installed, Target
from sublet.compat._moving import Nccl

__all__ = ["install", "uninstall"]

PACKAGES = ("slime", "miles", "vime")
#: 0 has slime leave groups that hold no device memory alone: it need not be able to rebuild them.
DESTROY_WORLD = "SLIME_DESTROY_WORLD_PROCESS_GROUP"

_nccl = Nccl()


def _destroy(theirs: Callable[..., Any]) -> Callable[..., Any]:
    package = theirs.__module__.partition(".")[0]

    def destroy_process_groups() -> None:
        if not _nccl.is_away:
            # All ranks first: one that still waits for a collective needs NCCL.
            _meet(package)
            _nccl.leave()

    return destroy_process_groups


def _reload(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def reload_process_groups() -> None:
        _nccl.come_back()

    return reload_process_groups


def _meet(package: str) -> None:
    """Waits for all ranks, over the group that has no device memory."""
    torch: Any = sys.modules["torch"]
    if not torch.distributed.is_initialized():
        return
    utilities: Any = sys.modules.get(f"{package}.utils.distributed_utils")
    group_of = getattr(utilities, "get_gloo_group", None)
    if group_of is None:
        raise UsageError(
            f"destroy_process_groups: {package}.utils.distributed_utils has no get_gloo_group, by which "
            "all ranks could meet"
        )
    torch.distributed.barrier(group=group_of())


def _targets() -> tuple[Target, ...]:
    return (
        Target("destroy_process_groups", _destroy, everywhere=True),
        Target("reload_process_groups", _reload, everywhere=True),
    )


_framework = Framework(
    "slime",
    PACKAGES,
    {f"{package}.utils.reloadable_process_group": _targets() for package in PACKAGES},
    _nccl.come_back,
)


def install() -> Installed:
    """Has slime, miles and vime pause NCCL's memory where they would destroy their groups.

    Call it in each process of the trainer, before or after the framework is imported; or set
    ``SUBLET_COMPAT=slime``. Sets ``SLIME_DESTROY_WORLD_PROCESS_GROUP`` to 0 where it is not set. In a
    process that is not under Sublet it warns and does nothing.

    Raises:
        UsageError: the framework that is imported lacks a function that is to be replaced.
    """
    installed = _framework.install(stacklevel=3)
    if attached():
        os.environ.setdefault(DESTROY_WORLD, "0")
    return installed


def uninstall() -> None:
    """Brings NCCL's memory back, and puts the framework's own functions back."""
    _framework.uninstall()
