"""vLLM's sleep mode on Sublet: its ``CuMemAllocator``, and how to have vLLM use it.

Start vLLM under Sublet with ``SUBLET_COMPAT=vllm``, and every process of it calls :func:`install` when
it imports torch, or loads its plugins::

    SUBLET_COMPAT=vllm sublet run --tenant infer -- vllm serve MODEL --enable-sleep-mode
"""

from sublet.compat.vllm.allocator import AllocationData, CuMemAllocator
from sublet.compat.vllm.binding import install, install_if_asked

__all__ = ["AllocationData", "CuMemAllocator", "install", "install_if_asked"]
