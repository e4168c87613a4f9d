"""``torch_memory_saver`` by Sublet: an alias of ``sublet.compat.torch_memory_saver``."""

from sublet.compat.torch_memory_saver import (
    TorchMemorySaver,
    configure_subprocess,
    torch_memory_saver,
)

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]
