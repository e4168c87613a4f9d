"""The libsublet.so of this process, and that of the package."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from sublet._adapter import answer_later_pauses, answer_pauses, reserved_bytes
from sublet._errors import NotAttachedError, UsageError
from sublet._native import Library

_PACKAGE = Path(__file__).resolve().parent
_PRELOAD = "LD_PRELOAD"
_TENANT = "SUBLET_TENANT"

_HOW_TO_ATTACH = (
    "this process is not under Sublet: start it with `sublet run --tenant NAME -- ...` (or "
    "`python -m sublet run ...`), or call sublet.attach() before CUDA is used"
)


@dataclass(frozen=True)
class AttachReport:
    """What :func:`attach` found and did.

    Attributes:
        tenant: the tenant that was named; ``None`` when nothing names one.
        was_preloaded: the library was in the process from its start, so there was nothing to do, and
            the lists are empty.
        libraries: for each library that uses the driver, a dict with ``path``, ``state``
            (``"hooked"``, ``"late"`` or ``"unknown"``), ``why``, ``slots`` and ``exchanged``
            (how many of its calls lead to Sublet from now on).
        devices: for each device with a context already, a dict with ``device`` (its number) and
            ``used_bytes``, what all processes hold there.
        launches_are_held: a pause holds all launches; otherwise pause only while nothing runs.
        reserved_bytes: what PyTorch had reserved before, by device; it came too early and stays
            on the device at a pause.
    """

    tenant: Optional[str]
    was_preloaded: bool
    libraries: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    launches_are_held: bool
    reserved_bytes: dict[int, int]


class _Loaded:
    """The library that this process uses; found once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._preloaded: Optional[Library] = None
        self._opened: Optional[Library] = None
        self._report: Optional[AttachReport] = None

    def own(self) -> Optional[Library]:
        """Returns the library between this process and its driver, if there is one."""
        if self._preloaded is None:
            self._preloaded = Library.find()
        if self._preloaded is not None:
            return self._preloaded
        return self._opened if self._report is not None else None

    def any(self) -> Library:
        """A library that speaks to other processes. Before an attach it intercepts nothing."""
        library = self.own()
        if library is not None:
            return library
        with self._lock:
            if self._opened is None:
                self._opened = Library.open(library_path())
            return self._opened

    def report(self) -> Optional[AttachReport]:
        """Returns the report of the attach; ``None`` before an attach."""
        return self._report

    def attach(self, tenant: Optional[str], family: Optional[str]) -> AttachReport:
        library = self.any()
        with self._lock:
            if self._report is None and self._preloaded is not None:
                asked = os.environ.get(_TENANT)
                self._report = AttachReport(asked, True, [], [], True, {})
            # Before the family: a call that is refused lets nobody in.
            known = None if self._report is None else self._again(self._report, tenant)
            if family is not None:
                library.set_family(family)
            if known is not None:
                return known
            reserved = reserved_bytes()
            report = json.loads(library.attach(tenant))
            self._report = AttachReport(
                tenant=report["tenant"],
                was_preloaded=False,
                libraries=report["libraries"],
                devices=report["devices"],
                launches_are_held=report["launches_are_held"],
                reserved_bytes=reserved,
            )
            return self._report

    def _again(self, report: AttachReport, tenant: Optional[str]) -> AttachReport:
        if tenant is not None and report.tenant is not None and tenant != report.tenant:
            raise UsageError(
                f"attach: this process belongs to tenant '{report.tenant}' and cannot become one of "
                f"'{tenant}': a process has one tenant for its life"
            )
        return report


_loaded = _Loaded()


def attach(tenant: Optional[str] = None, family: Optional[str] = None) -> AttachReport:
    """Brings this process under Sublet without ``sublet run``. Call it before CUDA is used.

    Memory that exists already stays on the device; the report names it. A second call with the same
    tenant, and a call in a process that was started by ``sublet run``, change nothing.

    Args:
        tenant: the name of the tenant; by default what ``SUBLET_TENANT`` says.
        family: tenants that name the same family may open each other's CUDA IPC handles; by default what
            ``SUBLET_FAMILY`` says.

    Raises:
        UsageError: this process belongs to another tenant or family, or a name is not valid.
        RefusedError: libraries that are loaded already cannot be brought under Sublet.

    Safe from any thread. Does not block on other processes.
    """
    report = _loaded.attach(tenant, family)
    answer_pauses(own_library())
    return report


def attached() -> bool:
    """Is this process under Sublet, by ``sublet run`` or by :func:`attach`?

    >>> sublet.attached()
    True
    """
    return _loaded.own() is not None


def answer_pauses_of_a_tenant() -> None:
    """Pauses of this process ask PyTorch from now on, where it is one of a tenant."""
    library = _loaded.own()
    if library is not None:
        answer_later_pauses(library)


def own_library() -> Library:
    """Returns the library between this process and its driver.

    Raises:
        NotAttachedError: there is none.
    """
    library = _loaded.own()
    if library is None:
        raise NotAttachedError(_HOW_TO_ATTACH)
    return library


def own_tenant() -> str:
    """The tenant that this process was started for.

    Raises:
        NotAttachedError: this process is not under Sublet.
        UsageError: nothing names the tenant.
    """
    own_library()
    report = _loaded.report()
    name = (report.tenant if report is not None else None) or os.environ.get(_TENANT)
    if not name:
        raise UsageError("this process was not told the name of its tenant: `sublet ps` shows it; use sublet.Tenant(NAME)")
    return name


def any_library() -> Library:
    """A library to drive other tenants with: this process's own, or else the package's."""
    return _loaded.any()


def command(library: Library, name: str, done: Optional[list[str]] = None, **fields: object) -> dict[str, Any]:
    """The report of ``library`` about this command of ``sublet_command``. ``done`` has the report before any signal is handled."""
    report: dict[str, Any] = json.loads(library.command(name.partition("_")[0], json.dumps({name: fields}), done))
    return report


def library_path() -> str:
    """The path of the ``libsublet.so`` that the package carries, for ``LD_PRELOAD``."""
    return _carried("lib/libsublet.so")


def nccl_library_path() -> str:
    """The path of a library with NCCL's functions and ``ncclPause`` side by side.

    For programs that open NCCL by a path they are told, as vLLM by ``VLLM_NCCL_SO_PATH``, in a process
    that is under Sublet. NCCL itself is the library that is loaded already, that of the pip package
    ``nvidia-nccl``, or what the loader finds.
    """
    return _carried("lib/libsublet_nccl.so")


def command_path() -> str:
    """The path of the ``sublet`` command that the package carries."""
    return _carried("bin/sublet")


def _carried(name: str) -> str:
    path = _PACKAGE / name
    if not path.is_file():
        raise UsageError(
            f"the package has no {name}: it was not installed from a wheel; build one with "
            "`cargo xtask wheel` and install that"
        )
    return str(path)


def preload_with(others: str) -> str:
    """A value of ``LD_PRELOAD`` with the package's library before the entries of ``others``.

    Raises:
        UsageError: the library's path cannot be preloaded, because it holds a blank or a colon.
    """
    library = library_path()
    if ":" in library or any(character.isspace() for character in library):
        raise UsageError(
            f"{library} cannot be preloaded, because its path holds a blank or a colon: "
            "install the package elsewhere"
        )
    entries = others.replace(":", " ").split()
    return ":".join([library, *(name for name in entries if name != library)])


@contextlib.contextmanager
def configure_subprocess(tenant: Optional[str] = None) -> Iterator[None]:
    """Processes started inside the ``with`` block are under Sublet from their start.

    Sets ``LD_PRELOAD`` (the library goes before what is there) and ``SUBLET_TENANT`` in ``os.environ``,
    and restores both. Processes that other threads start meanwhile get them too.

    Args:
        tenant: the tenant of those processes; by default what ``SUBLET_TENANT`` says.

    Raises:
        UsageError: the library's path cannot be preloaded, because it holds a blank or a colon.

    >>> with sublet.configure_subprocess("infer"):
    ...     subprocess.run([sys.executable, "-c", "import sublet; print(sublet.attached())"])
    CompletedProcess(...)
    """
    changed = {_PRELOAD: preload_with(os.environ.get(_PRELOAD, ""))}
    if tenant is not None:
        changed[_TENANT] = tenant
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
