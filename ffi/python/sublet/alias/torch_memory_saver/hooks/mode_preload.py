"""The mode in which processes start with the object preloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sublet.compat.torch_memory_saver import preload
from ..utils import change_env, get_binary_path_from_package
from .base import HookUtilBase

__all__ = ["HookUtilModePreload", "change_env", "configure_subprocess", "get_binary_path_from_package"]


class HookUtilModePreload(HookUtilBase):
    """The mode in which the object is there from the start of the process."""

    def get_path_binary(self) -> str:
        """The entry of ``LD_PRELOAD`` that has the functions, or the package's: under ``sublet run`` there is no such entry."""
        entries = preload.preloaded()
        return entries[0] if entries else str(get_binary_path_from_package(preload.STEM))


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes started inside the ``with`` block have the object preloaded, before what is there.

    ``LD_PRELOAD`` is restored afterwards. It is not changed where the object is in it already.
    """
    with preload.preloading(str(get_binary_path_from_package(preload.STEM))):
        yield
