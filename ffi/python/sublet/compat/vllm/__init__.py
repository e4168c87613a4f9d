"""vLLM's sleep mode on Sublet: its ``CuMemAllocator``, its sleep-mode backend, and how to have vLLM use them.

Start vLLM under Sublet, with its own option (0.33 and later) or with a variable (any version)::

    sublet run --tenant infer -- vllm serve MODEL --enable-sleep-mode --sleep-mode-backend sublet
    SUBLET_COMPAT=vllm sublet run --tenant infer -- vllm serve MODEL --enable-sleep-mode
"""

from sublet.compat.vllm.allocator import AllocationData, CuMemAllocator
from sublet.compat.vllm.binding import install, load_plugin

__all__ = ["AllocationData", "CuMemAllocator", "install", "load_plugin"]
