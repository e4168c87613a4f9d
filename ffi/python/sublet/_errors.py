"""The exceptions: one class for each thing that a caller can do about a failure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from sublet._native import (
    ERROR_ARGUMENT,
    ERROR_LOST,
    ERROR_NOT_JOINED,
    ERROR_OUT_OF_DEVICE_MEMORY,
    ERROR_OUT_OF_HOST_MEMORY,
    ERROR_RETRY,
    __version__,
)


class Error(RuntimeError):
    """Why something was refused or failed. Each subclass says what can be done about it.

    A ``RuntimeError``, as programs catch for what their own allocator or torch's cannot do.
    """


class UsageError(Error, ValueError):
    """The call is wrong: fix the call. Nothing has changed.

    A ``ValueError`` too, as programs catch for wrong arguments.

    Attributes:
        tags: the known tags, if the call named an unknown one.
    """

    def __init__(self, message: str, *, tags: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.tags: tuple[str, ...] = tuple(tags)


class NotAttachedError(UsageError):
    """This process is not under Sublet: start it with ``sublet run``, or call ``sublet.attach()``.

    Or it has no device memory yet: the message says which.
    """


class RetryError(Error):
    """Refused or failed, and the tenant is as it was before: the same call can succeed later."""


class RefusedError(Error):
    """Refused or failed, and the tenant is as it was before: the same call would fail again."""


class OutOfDeviceMemory(Error):
    """A device cannot hold the memory of a resume: free memory there, then make the same call again.

    That memory is still paused, with its contents kept.

    Attributes:
        missing_bytes: the bytes that the fullest device lacks; ``None`` when that is not known.
        devices: for each device that is short, a dict with ``uuid`` (as in ``sublet.stats()``),
            ``needed_bytes``, ``free_bytes``, ``total_bytes``, ``holders`` (other tenants, each with
            ``tenant``, ``active`` and ``bytes``) and ``outside_bytes`` (held by nobody's tenant).
    """

    def __init__(
        self,
        message: str,
        *,
        missing_bytes: Optional[int] = None,
        devices: Sequence[dict[str, Any]] = (),
    ) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.devices: list[dict[str, Any]] = list(devices)


class OutOfHostMemory(Error):
    """The host cannot hold what is to be saved: free host memory or disk, then make the same call again.

    The tenant runs on as before.

    Attributes:
        missing_bytes: how many bytes are missing; ``None`` when that is not known.
    """

    def __init__(self, message: str, *, missing_bytes: Optional[int] = None) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class LostError(Error):
    """Something is lost for good: end the processes that the message names."""


def from_code(what: str, code: int, message: str, report: Optional[str]) -> Error:
    """The exception for a failure of ``libsublet.so``.

    Args:
        what: the operation, such as ``"pause"``.
        code: a ``SUBLET_ERROR_`` code.
        message: the library's own line, used where there is no report.
        report: the library's answer in JSON (``sublet_last_error_json``).
    """
    fields: dict[str, Any] = json.loads(report) if report else {}
    # ncclPause and ncclResume return codes of NCCL's; the report has ours.
    return _made(what, fields.get("code") or code, fields.get("message") or message, fields)


#: Numbers of the words of the command's documents, as ``Code::number`` in Rust has them. All others say whether a try can succeed later.
_NUMBERS = {
    "usage": ERROR_ARGUMENT,
    "no-such-tenant": ERROR_ARGUMENT,
    "unknown-tag": ERROR_ARGUMENT,
    "gpu-full": ERROR_OUT_OF_DEVICE_MEMORY,
    "host-full": ERROR_OUT_OF_HOST_MEMORY,
    "lost": ERROR_LOST,
}


def from_document(what: str, document: dict[str, Any]) -> Error:
    """The exception for a failure of the ``sublet`` command.

    Args:
        what: the operation, such as ``"pause"``.
        document: what the command printed with ``--json``: its fields ``error``, ``code`` and ``retryable``.
    """
    code = _NUMBERS.get(document.get("code") or "", ERROR_RETRY if document.get("retryable") else 0)
    fields = {"devices": document.get("shortages"), "missing_bytes": document.get("missing_device_bytes")}
    return _made(what, code, document.get("error") or "", fields)


def _made(what: str, code: int, message: str, fields: dict[str, Any]) -> Error:
    """The exception for a number of ``libsublet.so``."""
    text = f"{what}: {message or f'failed with code {code}'}"
    missing_bytes = fields.get("missing_bytes")
    if code == ERROR_ARGUMENT:
        return UsageError(text, tags=fields.get("tags") or ())
    if code == ERROR_OUT_OF_DEVICE_MEMORY:
        return OutOfDeviceMemory(text, missing_bytes=missing_bytes, devices=fields.get("devices") or ())
    if code == ERROR_OUT_OF_HOST_MEMORY:
        return OutOfHostMemory(text, missing_bytes=missing_bytes)
    kinds: dict[int, type[Error]] = {ERROR_NOT_JOINED: NotAttachedError, ERROR_RETRY: RetryError, ERROR_LOST: LostError}
    return kinds.get(code, RefusedError)(text)


def missing_function(name: str, version: str) -> RefusedError:
    """The exception for a library that lacks a function of this package's."""
    return RefusedError(
        f"libsublet.so {version} in this process has no {name}: it is older than the package, "
        f"{__version__}; preload the one at sublet.library_path()"
    )
