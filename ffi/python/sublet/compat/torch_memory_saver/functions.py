"""The C functions of the interface, which libsublet.so has, as ``ctypes`` finds them."""

from __future__ import annotations

import ctypes
import json
import os
from typing import Optional

from sublet._errors import NotAttachedError
from sublet._library import attached

_TEXT, _BOOL, _NUMBER, _U64 = ctypes.c_char_p, ctypes.c_bool, ctypes.c_int, ctypes.c_uint64
_BYTES = ctypes.POINTER(ctypes.c_uint8)
#: Of each function: what it takes, and what it returns.
_SIGNATURES: dict[str, tuple[list[type], Optional[type]]] = {
    "tms_set_current_tag": ([_TEXT], None),
    "tms_get_current_tag": ([], _TEXT),
    "tms_set_interesting_region": ([_BOOL], None),
    "tms_get_interesting_region": ([], _BOOL),
    "tms_set_enable_cpu_backup": ([_BOOL], None),
    "tms_get_enable_cpu_backup": ([], _BOOL),
    "tms_set_cpu_backup_backend": ([_TEXT], None),
    "tms_get_cpu_backup_backend": ([], _TEXT),
    "tms_set_enable_disk_backup": ([_BOOL], None),
    "tms_get_enable_disk_backup": ([], _BOOL),
    "tms_set_disk_backup_dir": ([_TEXT], None),
    "tms_pause": ([_TEXT], _NUMBER),
    "tms_resume": ([_TEXT], _NUMBER),
    "tms_tags_json": ([_TEXT, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int64),
    "set_memory_margin_bytes": ([_U64], None),
    "tms_set_retain_cpu_backup": ([_BOOL], None),
    "tms_get_retain_cpu_backup": ([], _BOOL),
    "tms_get_cpu_backup_pointer": ([_BYTES, _U64], _BYTES),
}


class BinaryWrapper:
    """The functions, as the attribute ``cdll`` that callers reach for.

    Args:
        path_binary: the object that has them; they are libsublet.so's, whichever it was.

    Raises:
        NotAttachedError: libsublet.so is not in this process.
    """

    def __init__(self, path_binary: Optional[str] = None) -> None:
        # A process that drives other tenants has loaded it too, and it stands in nobody's way there.
        if not attached():
            raise NotAttachedError(
                "torch_memory_saver: this process is not under Sublet: start it inside "
                "`with torch_memory_saver.configure_subprocess():` or by `sublet run`, or set "
                "`torch_memory_saver.hook_mode = 'torch'` before CUDA is used"
            )
        # By the name that the library has in itself, wherever it lies: nothing is loaded.
        self.cdll = ctypes.CDLL("libsublet.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(self.cdll, name)
            function.argtypes, function.restype = arguments, result

    def tags(self, tag: Optional[str]) -> list[str]:
        """Sublet's tags for the memory of ``tag``, or of all tags of this interface."""
        asked = None if tag is None else tag.encode()
        size = 4096
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self.cdll.tms_tags_json(asked, buffer, size)
            if length < size:
                return [str(name) for name in json.loads(buffer.value)]
            size = length + 1

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: Optional[str] = None,
        enable_disk_backup: bool = False,
    ) -> None:
        """Sets what the calling thread asks for from now on."""
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_interesting_region(interesting_region)
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        if cpu_backup_backend is not None:
            self.cdll.tms_set_cpu_backup_backend(cpu_backup_backend.encode())
        self.cdll.tms_set_enable_disk_backup(enable_disk_backup)
