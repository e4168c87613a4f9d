"""``torch_memory_saver`` by Sublet: an alias of ``sublet.compat.torch_memory_saver``."""

from typing import NoReturn

from sublet.compat.torch_memory_saver import torch_memory_saver
from sublet.compat.torch_memory_saver.saver import missing
from .entrypoint import TorchMemorySaver
from .hooks.mode_preload import configure_subprocess

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(missing(name))
