"""The needs of a hook mode: an object to preload, and in the mode ``torch`` an allocator."""

from __future__ import annotations

from typing import Any, Literal, Optional

from sublet._errors import UsageError

__all__ = ["HookMode", "HookUtilBase"]

HookMode = Literal["preload", "torch"]


class HookUtilBase:
    """One hook mode. Sublet's modes differ in how a process comes under it, and in nothing here that it uses itself."""

    @staticmethod
    def create(hook_mode: HookMode) -> HookUtilBase:
        """The mode by its name.

        Raises:
            UsageError: it is none.
        """
        from .mode_preload import HookUtilModePreload
        from .mode_torch import HookUtilModeTorch

        modes: dict[str, type[HookUtilBase]] = {"preload": HookUtilModePreload, "torch": HookUtilModeTorch}
        if hook_mode not in modes:
            raise UsageError(f"hook_mode is 'preload' or 'torch', not {hook_mode!r}")
        return modes[hook_mode]()

    def get_path_binary(self) -> str:
        """The object that has the C functions."""
        raise NotImplementedError

    def get_allocator(self) -> Optional[Any]:
        """Returns the allocator for a ``torch.cuda.MemPool``; ``None`` for torch's own."""
        return None
