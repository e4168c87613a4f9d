"""The mode in which a process attaches itself to Sublet (``sublet.attach``)."""

from __future__ import annotations

import importlib
from typing import Any

from ..utils import get_binary_path_from_package
from .base import HookUtilBase

__all__ = ["HookUtilModeTorch"]


class HookUtilModeTorch(HookUtilBase):
    """For programs that make pools of their own: an allocator over the C functions. Regions use torch's."""

    def __init__(self) -> None:
        memory: Any = importlib.import_module("torch.cuda.memory")
        self.allocator = memory.CUDAPluggableAllocator(self.get_path_binary(), "tms_torch_malloc", "tms_torch_free")

    def get_path_binary(self) -> str:
        """The object of the mode ``preload``: there is one for both."""
        return str(get_binary_path_from_package("torch_memory_saver_hook_mode_torch"))

    def get_allocator(self) -> Any:
        """The allocator, as ``torch.cuda.MemPool`` takes it."""
        return self.allocator.allocator()
