"""``torch_memory_saver`` by Sublet: an alias of ``sublet.compat.torch_memory_saver``."""

from sublet.compat.torch_memory_saver import torch_memory_saver
from .entrypoint import TorchMemorySaver
from .hooks.mode_preload import configure_subprocess

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]
