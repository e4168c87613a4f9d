"""vLLM's sleep-mode backend ``sublet``: ``vllm serve MODEL --enable-sleep-mode --sleep-mode-backend sublet``.

vLLM imports this when the backend is chosen. What sleeps with which level and tag is vLLM's own code, of whatever version; it
finds Sublet's allocator, which :func:`sublet.compat.vllm.load_plugin` has put there.
"""

from __future__ import annotations

from sublet._library import attached

from vllm.device_allocator.sleep_mode_backend import (  # type: ignore[import-not-found]
    CuMemBackend,
)

__all__ = ["SubletBackend"]


class SubletBackend(CuMemBackend):  # type: ignore[misc]
    """Sleeps and wakes up by Sublet. What it says of itself holds for what stays in the process as well as for what sleeps."""

    @classmethod
    def is_supported(cls) -> bool:
        """Is this process under Sublet?"""
        return attached()

    @classmethod
    def preserves_communicators(cls) -> bool:
        """They stay, also through a pause of the whole tenant."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """The process and its context stay."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Addresses and communicators are the same afterwards."""
        return True
