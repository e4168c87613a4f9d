"""The saved bytes of paused memory."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, Union

from sublet._adapter import torch_adapter
from sublet._errors import UsageError
from sublet._library import own_library


def host_copy(tensor: Any) -> Any:
    """The saved bytes of a CUDA tensor whose memory is paused, where they lie in host memory.

    Args:
        tensor: a ``torch.Tensor`` on a CUDA device, or an object with ``__cuda_array_interface__``,
            or one with ``data_ptr()`` and ``nbytes``, contiguous. Its contents must be kept in host
            memory (``contents="keep"``).

    Returns:
        For a ``torch.Tensor`` a CPU tensor of the same shape and type; otherwise a read-only
        ``memoryview`` of its bytes. Nothing is copied where the bytes lie in one piece. It is valid until
        the resume of that memory begins, and not in a forked child; copy what must live longer.

    Raises:
        UsageError: not a CUDA tensor, not contiguous, not paused, or its contents are not kept.
        NotAttachedError: this process is not under Sublet.

    >>> with sublet.region("weights"):
    ...     weights = allocate(2 << 20, fill=7)
    >>> report = sublet.pause(tags="weights")
    >>> bytes(sublet.host_copy(weights)[:4])
    b'\\x07\\x07\\x07\\x07'
    >>> report = sublet.resume(tags="weights")
    """
    torch: Any = sys.modules.get("torch")
    adapter = torch_adapter()
    if adapter is not None and isinstance(tensor, torch.Tensor):
        return adapter.host_tensor(tensor)
    address, size_bytes = _extent(tensor)
    return host_bytes(address, size_bytes)


def set_file_dir(path: Union[str, os.PathLike[str]]) -> None:
    """Names the folder in which pauses save memory of regions with ``contents="file"``.

    Each process has one file there, without a name, so nothing is left behind when it is killed. Counts
    from the next pause on that finds nothing saved in the old folder. The default is what
    ``SUBLET_FILE_DIR`` says, else ``/tmp``. Choose a local disk with as many free bytes as such regions
    have.

    Raises:
        UsageError: there is no such folder, or no file can be made in it.
        NotAttachedError: this process is not under Sublet.

    >>> sublet.set_file_dir("/var/tmp")
    """
    own_library().set_file_dir(os.fspath(path))


def host_bytes(address: int, size_bytes: int) -> memoryview:
    """The saved bytes of ``size_bytes`` at the device address ``address``, read-only.

    Raises:
        UsageError: some of it is not away, or its contents are not kept in host memory.
    """
    library = own_library()
    if size_bytes == 0:
        return memoryview(b"")
    try:
        host = library.host_copy(address, size_bytes)
    except UsageError:
        # The bytes may lie in two pieces; whatever else is wrong is wrong with a copy too.
        return memoryview(library.host_copy_out(address, size_bytes))
    view = memoryview((ctypes.c_ubyte * size_bytes).from_address(host))
    return view.cast("B").toreadonly()


def _extent(tensor: Any) -> tuple[int, int]:
    """Device address and size in bytes."""
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if isinstance(interface, dict):
        item_bytes = int(interface["typestr"][2:])
        strides = interface.get("strides")
        size_bytes = item_bytes
        for length, stride in zip(
            reversed(interface["shape"]), reversed(strides or [None] * len(interface["shape"]))
        ):
            if stride is not None and length > 1 and stride != size_bytes:
                raise UsageError("host_copy: the tensor is not contiguous: copy it on the device first")
            size_bytes *= length
        return int(interface["data"][0]), size_bytes
    is_on_device = getattr(tensor, "is_cuda", True)
    if is_on_device and callable(getattr(tensor, "data_ptr", None)) and hasattr(tensor, "nbytes"):
        return int(tensor.data_ptr()), int(tensor.nbytes)
    raise UsageError(f"host_copy: {type(tensor).__name__} is no CUDA tensor")
