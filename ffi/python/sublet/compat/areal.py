"""AReaL: NCCL's memory leaves and returns with the engine's.

AReaL's training engines take their memory off the device by ``torch_memory_saver``, for which Sublet has a
drop-in, and leave NCCL's where it is. With :func:`install`, ``offload()`` and ``onload()`` take that along.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from sublet.compat._binding import Framework, Target
from sublet.compat._moving import Nccl

__all__ = ["install", "uninstall"]

ENGINES = {
    "areal.engine.fsdp_engine": "FSDPEngine",
    "areal.engine.megatron_engine": "MegatronEngine",
    "areal.experimental.engine.archon_engine": "ArchonEngine",
}

_nccl = Nccl()


def _offload(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def offload(engine: Any) -> Any:
        # That adapter goes on working on the device while the engine is away.
        if getattr(engine, "_awex_adapter", None) is not None:
            return theirs(engine)
        # All ranks first: one that still waits for a collective needs NCCL.
        torch: Any = sys.modules["torch"]
        torch.distributed.barrier(group=engine.cpu_group)
        _nccl.leave()
        try:
            return theirs(engine)
        except BaseException:
            _nccl.come_back()
            raise

    return offload


def _onload(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def onload(engine: Any) -> Any:
        # Before theirs, which ends with all ranks meeting: afterwards every rank may use it.
        _nccl.come_back()
        return theirs(engine)

    return onload


def _targets(engine: str) -> tuple[Target, ...]:
    return (Target(f"{engine}.offload", _offload), Target(f"{engine}.onload", _onload))


_framework = Framework(
    "AReaL",
    ("areal",),
    {module: _targets(engine) for module, engine in ENGINES.items()},
    _nccl.come_back,
)

install, uninstall = _framework.install, _framework.uninstall
