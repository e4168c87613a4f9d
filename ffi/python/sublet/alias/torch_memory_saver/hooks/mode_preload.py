"""How processes are started with the object preloaded."""

from sublet.compat.torch_memory_saver.preload import configure_subprocess

__all__ = ["configure_subprocess"]
