"""Device functions that tests and examples of programs with this interface call."""

from __future__ import annotations

import sys
from typing import Any

from .utils import is_xpu

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device", "is_xpu"]


def get_device() -> str:
    """Returns torch's name of the device: ``"cuda"``, or ``"xpu"`` if torch sees an Intel GPU."""
    return "xpu" if is_xpu() else "cuda"


def _device_module() -> Any:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise RuntimeError("import torch first")
    return torch.xpu if is_xpu() else torch.cuda


def empty_cache() -> None:
    """Makes torch return cached memory to the driver."""
    _device_module().empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Bytes in use on a device, by whatever process; printed with ``message``."""
    free_bytes, total_bytes = _device_module().mem_get_info(gpu_id)
    used_bytes = int(total_bytes - free_bytes)
    print(f"GPU {gpu_id} memory: {used_bytes / 2**30:.2f} GiB ({message})")
    return used_bytes
