"""What holds of the package before there is any device memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sublet
from package_stage import Stage


def test_importing_needs_no_torch_and_no_driver() -> None:
    code = "import sys, sublet; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert ran.stdout == "[]\n"


def test_every_public_name_is_the_packages_and_documented() -> None:
    for name in sublet.__all__:
        thing = getattr(sublet, name)
        assert thing.__module__ == "sublet", name
        assert thing.__doc__, name


def test_carried_files_are_there() -> None:
    assert Path(sublet.library_path()).name == "libsublet.so"
    assert Path(sublet.nccl_library_path()).is_file()


class ArrayLike:
    """Shows memory that nobody has."""

    __cuda_array_interface__: dict[str, Any] = {
        "shape": (4,),
        "typestr": "|u1",
        "data": (4096, False),
        "version": 3,
    }


def test_process_without_sublet_is_told_both_ways_in() -> None:
    assert not sublet.attached()
    calls: list[Callable[[], object]] = [
        sublet.pause,
        sublet.resume,
        sublet.is_paused,
        sublet.stats,
        sublet.region("kv").__enter__,
        lambda: sublet.host_copy(ArrayLike()),
    ]
    for call in calls:
        with pytest.raises(sublet.NotAttachedError, match="sublet run.*sublet.attach()"):
            call()


@pytest.mark.tenant("train")
def test_process_without_device_memory_is_told_so() -> None:
    assert sublet.attached()
    assert not sublet.is_paused()
    with pytest.raises(sublet.NotAttachedError, match="this process of tenant 'train' has no GPU memory yet"):
        sublet.stats()
    for call in (sublet.pause, sublet.resume):
        assert call() == call(together=True) == sublet.Report("nothing")
    assert not sublet.is_paused()
    with pytest.raises(sublet.UsageError, match="there is no tenant 'other'"):
        sublet.Tenant("other").pause()


@pytest.mark.parametrize("tag", ["", "x" * 129, "a\0b", "a\nb", 7, None])
def test_bad_tag_is_refused_where_it_is_named(tag: object) -> None:
    with pytest.raises(sublet.UsageError, match="tag"):
        sublet.region(tag)  # type: ignore[arg-type]
    if tag is not None:
        with pytest.raises(sublet.UsageError, match="tag"):
            sublet.pause(tags=[tag])  # type: ignore[list-item]


def test_bad_arguments_are_refused_before_anything_is_done() -> None:
    with pytest.raises(sublet.UsageError, match="'keep', 'discard', 'file', not 'drop'"):
        sublet.region("kv", contents="drop")  # type: ignore[arg-type]
    for device in (-1, "0", True):
        with pytest.raises(sublet.UsageError, match="number of a device"):
            sublet.region("kv", device=device)  # type: ignore[arg-type]
    for timeout in (0, -1.0, "1", float("nan"), True):
        with pytest.raises(sublet.UsageError, match="seconds"):
            sublet.pause(timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(sublet.UsageError, match="no tag"):
        sublet.pause(tags=[])
    with pytest.raises(sublet.UsageError, match="not 3"):
        sublet.pause(3)  # type: ignore[arg-type]
    with pytest.raises(sublet.UsageError, match="wait is a number of seconds"):
        sublet.Tenant("a").resume(wait=-1)
    with pytest.raises(sublet.UsageError, match="leave tags out"):
        sublet.Tenant("a").pause("kv", deep=True)
    with pytest.raises(sublet.UsageError, match="leave leave_lent out"):
        sublet.Tenant("a").pause(deep=True, leave_lent=True)
    for name in ("", "a b", ".a", "no/name", "x" * 41, 7):
        with pytest.raises(ValueError, match="a tenant's name is 1 to 40"):
            sublet.Tenant(name)  # type: ignore[arg-type]
    with pytest.raises(sublet.UsageError, match="both"):
        sublet.swap("a", sublet.Tenant("a"))


def test_coroutines_and_generators_are_not_decorated() -> None:
    region = sublet.region("kv")

    async def later() -> None: ...

    def generate() -> object:
        yield 1

    for function in (later, generate):
        with pytest.raises(sublet.UsageError, match="inside it"):
            region(function)


def test_exceptions_keep_their_fields_between_processes() -> None:
    error = sublet.OutOfDeviceMemory("short", missing_bytes=5, devices=[{"device": 0}])
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, sublet.OutOfDeviceMemory)
    assert (str(again), again.missing_bytes, again.devices) == ("short", 5, [{"device": 0}])
    usage = pickle.loads(pickle.dumps(sublet.UsageError("which", tags=["kv"])))
    assert usage.tags == ("kv",)


def test_tenants_are_values() -> None:
    assert sublet.Tenant("a") == sublet.Tenant("a") != sublet.Tenant("b")
    assert len({sublet.Tenant("a"), sublet.Tenant("a")}) == 1
    assert repr(sublet.Tenant("a")) == "sublet.Tenant('a')"


def test_subprocesses_are_configured_and_the_environment_restored(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBLET_TENANT", "before")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    code = "import os, sublet; print(sublet.attached(), os.environ['SUBLET_TENANT'])"
    with sublet.configure_subprocess("infer"):
        ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert ran.stdout == "True infer\n"
    assert "LD_PRELOAD" not in os.environ
    assert os.environ["SUBLET_TENANT"] == "before"


def test_command_of_the_package_runs_with_its_own_exit_codes(stage: Stage) -> None:
    ran = stage.run("-m", "sublet", "ps")
    assert ran.returncode == 0, ran.stderr
    program = "import os; print(os.environ['SUBLET_TENANT'], flush=True); os._exit(7)"
    ran = stage.run("-c", program, tenant="a")
    assert (ran.stdout, ran.returncode) == ("a\n", 7)
    ran = stage.run("-m", "sublet", "no-such-command")
    assert ran.returncode == 2 and "no-such-command" in ran.stderr
