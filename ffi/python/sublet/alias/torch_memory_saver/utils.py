"""Where launchers find the object to preload."""

from sublet.compat.torch_memory_saver.preload import get_binary_path_from_package

__all__ = ["get_binary_path_from_package"]
