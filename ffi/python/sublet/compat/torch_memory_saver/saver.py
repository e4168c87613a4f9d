"""The object that programs use: regions, pausing and resuming by tag."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Optional

import sublet
from sublet._adapter import torch_adapter
from sublet._errors import UsageError
from sublet.compat._tried import note_untried
from sublet.compat.torch_memory_saver import preload
from sublet.compat.torch_memory_saver.functions import BinaryWrapper
from sublet.compat.torch_memory_saver.preload import is_xpu

__all__ = ["BinaryWrapper", "Implementation", "TorchMemorySaver", "is_xpu", "missing"]

#: Whose names are here.
_VERSION = "0.0.10"
_DEFAULT_TAG = "default"
_MODES = ("preload", "torch")
_BACKENDS = ("pinned", "mmap")


class TorchMemorySaver:
    """Memory allocated in a region can be paused and resumed by the region's tag.

    One object serves a process. Regions are the calling thread's. Nothing happens before the first
    call.
    """

    def __init__(self) -> None:
        self._hook_mode = "preload"
        self._starting = threading.Lock()
        #: None until the first call that needs it; programs look at this.
        self._impl: Optional[Implementation] = None

    @contextlib.contextmanager
    def region(
        self,
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: Optional[str] = None,
    ) -> Iterator[None]:
        """Device memory that this thread asks for inside belongs to ``tag``.

        Args:
            tag: 1 to 100 bytes of text. A tag may have memory with and without backups.
            enable_cpu_backup: a pause saves the contents to host memory; otherwise they are lost.
            enable_disk_backup: contents are saved to a file (:meth:`set_disk_backup_dir`).
            cpu_backup_backend: ``"pinned"`` or ``"mmap"``. Host memory is pinned in either case; once
                memory was allocated with ``"mmap"``, each resume gives back what holds no backup.

        Raises:
            ValueError: a backend without a backup in host memory, or one that there is not.
            UsageError: both kinds of backup together.
            NotAttachedError: this process is not under Sublet.
        """
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        if enable_cpu_backup and enable_disk_backup:
            raise UsageError(
                f"region '{tag}': choose a backup in host memory or one on disk, not both"
            )
        with self._started().region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: Optional[str] = None,
    ) -> Iterator[None]:
        """As ``torch.cuda.graph``, with the graph's own memory belonging to ``tag``.

        Addresses stay, so the graph replays after a resume. The instantiated graph itself stays on
        the device: the driver's memory for it cannot be given back.

        Args:
            cuda_graph, pool, stream, capture_error_mode: as of ``torch.cuda.graph``.
            tag, enable_cpu_backup, cpu_backup_backend: as of :meth:`region`.
        """
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        implementation = self._started()
        torch: Any = importlib.import_module("torch")
        adapter = torch_adapter()
        if adapter is not None:
            adapter.follow_graphs()
        capture = torch.cuda.graph(
            cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode
        )
        with capture, implementation.settings(tag, enable_cpu_backup, False, cpu_backup_backend):
            if adapter is not None:
                adapter.capture_belongs(f"tms/{tag}/{'keep' if enable_cpu_backup else 'discard'}")
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Memory allocated inside belongs to no tag; what torch has cached of it goes at the end.

        Raises:
            UsageError: this thread is in no region.
        """
        with self._started().disable():
            yield

    def pause(self, tag: Optional[str] = None) -> None:
        """Gives the device memory of ``tag``, or of all tags, back to the driver.

        A tag without memory, and one that is paused, are successes. The process runs on; touching
        that memory is an illegal access until the resume.

        Raises:
            RetryError, RefusedError, OutOfHostMemory: nothing has changed.
        """
        self._started().change(sublet.pause, tag)

    def resume(self, tag: Optional[str] = None) -> None:
        """Brings the memory of ``tag``, or of all tags, back to the same addresses.

        Raises:
            OutOfDeviceMemory: what was paused still is, with its backups; call again when memory is
                free.
            RetryError, RefusedError: as above.
        """
        self._started().change(sublet.resume, tag)

    @property
    def enabled(self) -> bool:
        """Always true; for programs that ask."""
        return True

    @property
    def hook_mode(self) -> str:
        """Write-only: ``"preload"`` (the default) or ``"torch"``, before the first other call.

        In the mode ``"torch"`` a process that was started without Sublet is brought under it then
        (``sublet.attach``).
        """
        raise AttributeError("hook_mode can be set, not read")

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        if mode not in _MODES:
            raise UsageError(f"hook_mode is 'preload' or 'torch', not {mode!r}")
        if self._impl is not None and mode != self._hook_mode:
            raise UsageError("hook_mode: set it before the first region, pause or resume")
        self._hook_mode = mode

    @property
    def memory_margin_bytes(self) -> int:
        """Write-only: free device memory that allocations in regions must leave; 0 for none.

        One that would leave less is answered as out of memory, upon which torch frees what it has
        cached and asks again.
        """
        raise NotImplementedError("memory_margin_bytes can be set, not read")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._started().functions.set_memory_margin_bytes(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Are backups in host memory kept after a resume? A change applies from the next resume on.

        Then :meth:`get_cpu_backup` answers also for memory that is back, with the bytes as they were
        paused, until the next pause of it, whose bytes come to the same place. A resume while this is
        false forgets the backups of what it brings back.
        """
        return bool(self._started().functions.tms_get_retain_cpu_backup())

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._started().functions.tms_set_retain_cpu_backup(value)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """The saved contents of a CUDA tensor that is paused, or was when backups are kept.

        Args:
            x: a contiguous tensor of a region with a backup in host memory.
            zero_copy: the tensor lies over the backup itself, valid as long as that; otherwise a
                copy. Of more than 256 MiB it may lie over a copy all the same.

        Returns:
            A CPU tensor of the same shape and type; ``None`` when ``x`` has no backup, or is not
            paused and :attr:`retain_cpu_backup` was not set.

        Raises:
            UsageError: ``x`` is not on a CUDA device or not contiguous.
        """
        return self._started().get_cpu_backup(x, zero_copy)

    def set_disk_backup_dir(self, path: str) -> None:
        """Makes the folder, and has later pauses save disk backups there; by default in ``/tmp``.

        Raises:
            UsageError: no file can be made in it.
        """
        os.makedirs(path, exist_ok=True)
        self._started()
        sublet.set_file_dir(path)

    def _ensure_initialized(self) -> None:
        self._started()

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            # A property that may not be read: its own message.
            return object.__getattribute__(self, name)
        raise AttributeError(missing(f"TorchMemorySaver.{name}"))

    def _started(self) -> Implementation:
        with self._starting:
            if self._impl is None:
                self._impl = Implementation(self._hook_mode)
            return self._impl


class Implementation:
    """The state that exists after the first call."""

    def __init__(self, hook_mode: str) -> None:
        preload.check()
        if hook_mode == "torch":
            sublet.attach()
        if "sglang" in sys.modules:
            note_untried("SGLang", ("sglang",))
        self._binary_wrapper = BinaryWrapper()
        self.functions = self._binary_wrapper.cdll

    @contextlib.contextmanager
    def region(
        self,
        tag: str,
        enable_cpu_backup: bool,
        enable_disk_backup: bool,
        cpu_backup_backend: Optional[str],
    ) -> Iterator[None]:
        """As of :meth:`TorchMemorySaver.region`, checked."""
        adapter = torch_adapter()
        with contextlib.ExitStack() as stack:
            if adapter is not None:
                # Blocks of what is kept and what is not never share memory, so pools differ too.
                policy = "keep" if enable_cpu_backup else "file" if enable_disk_backup else "discard"
                stack.enter_context(adapter.region_pool(f"tms/{tag}/{policy}", None, False))
            backups = (enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
            stack.enter_context(self.settings(tag, *backups))
            yield

    @contextlib.contextmanager
    def settings(
        self,
        tag: str,
        enable_cpu_backup: bool,
        enable_disk_backup: bool,
        cpu_backup_backend: Optional[str],
    ) -> Iterator[None]:
        """The thread's settings for the length of the block; restored afterwards."""
        functions = self.functions
        before = {
            "tag": functions.tms_get_current_tag().decode(),
            "interesting_region": functions.tms_get_interesting_region(),
            "enable_cpu_backup": functions.tms_get_enable_cpu_backup(),
            "cpu_backup_backend": functions.tms_get_cpu_backup_backend().decode(),
            "enable_disk_backup": functions.tms_get_enable_disk_backup(),
        }
        self._binary_wrapper.set_config(
            tag=tag,
            interesting_region=True,
            enable_cpu_backup=enable_cpu_backup,
            cpu_backup_backend=cpu_backup_backend,
            enable_disk_backup=enable_disk_backup,
        )
        try:
            yield
        finally:
            self._binary_wrapper.set_config(**before)

    #: By the name that tests of programs reach for.
    def _with_region_config(
        self,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: Optional[str],
        enable_disk_backup: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        return self.settings(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """As of :meth:`TorchMemorySaver.disable`."""
        if not self.functions.tms_get_interesting_region():
            raise UsageError("disable() is for code inside a region, or with TMS_INIT_ENABLE=1")
        adapter = torch_adapter()
        self.functions.tms_set_interesting_region(False)
        try:
            with contextlib.ExitStack() as stack:
                if adapter is not None:
                    stack.enter_context(_passing_pool(adapter))
                yield
        finally:
            self.functions.tms_set_interesting_region(True)

    def change(self, act: Any, tag: Optional[str]) -> None:
        """Pauses or resumes this process's memory of ``tag``."""
        tags = self._binary_wrapper.tags(tag or None)
        if tags:
            act(tags)
            # Called with nothing, it frees what it has made for backups that there are no more.
            self.functions.tms_get_cpu_backup_pointer(None, 0)

    def get_cpu_backup(self, x: Any, zero_copy: bool) -> Any:
        """As of :meth:`TorchMemorySaver.get_cpu_backup`."""
        torch: Any = sys.modules["torch"]
        if not x.is_cuda or not x.is_contiguous():
            raise UsageError(
                f"get_cpu_backup: a contiguous CUDA tensor is wanted, not {x.device} {x.stride()}"
            )
        size_bytes = int(x.nbytes)
        if not size_bytes:
            return torch.empty(x.shape, dtype=x.dtype)
        address = ctypes.cast(int(x.data_ptr()), ctypes.POINTER(ctypes.c_uint8))
        host = self.functions.tms_get_cpu_backup_pointer(address, size_bytes)
        if not host:
            return None
        saved = (ctypes.c_uint8 * size_bytes).from_address(ctypes.addressof(host.contents))
        backup = torch.frombuffer(saved, dtype=torch.uint8).view(x.dtype).view(x.shape)
        return backup if zero_copy else backup.clone()


def missing(name: str) -> str:
    """Returns the message about a name that does not exist here."""
    return (
        f"Sublet's torch_memory_saver has no {name}: it has what {_VERSION} has; leave Sublet's alias out of PYTHONPATH "
        "to have the original's sleep"
    )


#: By the name that programs and tests reach for.
_TorchMemorySaverImpl = Implementation


@contextlib.contextmanager
def _passing_pool(adapter: Any) -> Iterator[None]:
    """torch allocates from a pool that goes at the end, whichever region is open."""
    torch: Any = sys.modules["torch"]
    pool = torch.cuda.MemPool()
    with adapter.region_pool(None, None, False), torch.cuda.use_mem_pool(pool):
        yield
    del pool


def _check_backend(enable_cpu_backup: bool, backend: Optional[str]) -> None:
    if backend is None:
        return
    if backend not in _BACKENDS:
        raise ValueError(f"cpu_backup_backend is 'pinned' or 'mmap', not {backend!r}")
    if not enable_cpu_backup:
        raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
    if is_xpu():
        raise ValueError("cpu_backup_backend is not supported on XPU, nor is Sublet")
    version: Any = getattr(sys.modules.get("torch"), "version", None)
    if backend == "mmap" and getattr(version, "hip", None) is not None:
        raise ValueError("cpu_backup_backend='mmap' is not supported on ROCm, nor is Sublet")
