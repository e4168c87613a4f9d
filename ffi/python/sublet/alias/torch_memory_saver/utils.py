"""The functions by which launchers find the object to preload."""

from pathlib import Path

from sublet.compat.torch_memory_saver.preload import binary_beside, change_env, is_xpu

__all__ = ["change_env", "get_binary_path_from_package", "is_xpu"]


def get_binary_path_from_package(stem: str) -> Path:
    """Returns the object to preload next to this package, named for the CUDA runtime of the process."""
    return binary_beside(Path(__file__).parent, stem)
