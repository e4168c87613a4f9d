"""The names by which programs import torch_memory_saver's parts, and what they do."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

import sublet
from sublet.compat import alias_path
from sublet.compat.torch_memory_saver import preload

STEM = preload.STEM


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of the alias by its name."""
    monkeypatch.syspath_prepend(alias_path())
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_memory_saver"]:
        del sys.modules[name]


def torch_of(cuda: Optional[str] = None, hip: Optional[str] = None, xpu: bool = False) -> Any:
    """As much of torch as says what it was built for."""
    torch = types.ModuleType("torch")
    used = {"mem_get_info": lambda device: (3 << 30, 4 << 30), "empty_cache": lambda: None}
    setattr(torch, "version", types.SimpleNamespace(cuda=cuda, hip=hip))
    setattr(torch, "xpu", types.SimpleNamespace(is_available=lambda: xpu, **used))
    setattr(torch, "cuda", types.SimpleNamespace(is_available=lambda: False, **used))
    return torch


def signature(function: Any) -> list[tuple[str, Any]]:
    """Names and defaults of the arguments."""
    return [(name, given.default) for name, given in inspect.signature(function).parameters.items()]


def test_every_module_has_its_names(find: Any) -> None:
    wanted = {
        "torch_memory_saver": ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"],
        "torch_memory_saver.binary_wrapper": ["BinaryWrapper"],
        "torch_memory_saver.entrypoint": ["TorchMemorySaver", "_TorchMemorySaverImpl", "is_xpu"],
        "torch_memory_saver.hooks.base": ["HookMode", "HookUtilBase"],
        "torch_memory_saver.hooks.mode_torch": ["HookUtilModeTorch"],
        "torch_memory_saver.hooks.mode_preload": [
            "HookUtilModePreload",
            "configure_subprocess",
            "get_binary_path_from_package",
        ],
        "torch_memory_saver.testing_utils": [
            "empty_cache",
            "get_and_print_gpu_memory",
            "get_device",
            "is_xpu",
        ],
        "torch_memory_saver.utils": ["change_env", "get_binary_path_from_package", "is_xpu"],
    }
    for module, names in wanted.items():
        assert [name for name in names if not hasattr(find(module), name)] == []


def test_the_class_is_one_whoever_imports_it_and_takes_what_theirs_takes(find: Any) -> None:
    package = find("torch_memory_saver")
    saver = find("torch_memory_saver.entrypoint").TorchMemorySaver
    assert package.TorchMemorySaver is saver and isinstance(package.torch_memory_saver, saver)
    empty = inspect.Parameter.empty
    backups = [("tag", "default"), ("enable_cpu_backup", False)]
    assert signature(saver.region) == [
        ("self", empty),
        *backups,
        ("enable_disk_backup", False),
        ("cpu_backup_backend", None),
    ]
    capture = [("pool", None), ("stream", None), ("capture_error_mode", "global")]
    assert signature(saver.cuda_graph) == [
        ("self", empty),
        ("cuda_graph", empty),
        *capture,
        *backups,
        ("cpu_backup_backend", None),
    ]
    assert signature(saver.pause) == signature(saver.resume) == [("self", empty), ("tag", None)]
    assert signature(saver.get_cpu_backup) == [("self", empty), ("x", empty), ("zero_copy", False)]
    assert signature(saver.set_disk_backup_dir) == [("self", empty), ("path", empty)]


def test_object_to_preload_is_named_for_the_runtime_of_torch(
    find: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    utils = find("torch_memory_saver.utils")
    package = tmp_path / "torch_memory_saver"
    monkeypatch.setattr(utils, "__file__", str(package / "utils.py"))
    plain, twelve = tmp_path / f"{STEM}.abi3.so", tmp_path / f"{STEM}_cu12.abi3.so"
    with pytest.raises(sublet.UsageError, match="not installed from a wheel"):
        utils.get_binary_path_from_package(STEM)
    twelve.touch()
    monkeypatch.setitem(sys.modules, "torch", torch_of(cuda="12.9"))
    assert utils.get_binary_path_from_package(STEM) == twelve
    plain.touch()
    for torch, path in [
        (torch_of(cuda="12.9"), twelve),
        (torch_of(cuda="14.0"), plain),
        (torch_of(hip="7.2.0"), plain),
        (torch_of(xpu=True), plain),
    ]:
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert utils.get_binary_path_from_package(STEM) == path
    assert utils.get_binary_path_from_package("torch_memory_saver_hook_mode_torch") == plain


@pytest.mark.parametrize("before", [None, "/other/lib.so"])
def test_subprocess_gets_the_object_that_the_module_finds(
    find: Any, monkeypatch: pytest.MonkeyPatch, before: Optional[str]
) -> None:
    module = find("torch_memory_saver.hooks.mode_preload")
    fake = "/fake/torch_memory_saver_hook_mode_preload.so"
    monkeypatch.setattr(module, "get_binary_path_from_package", lambda stem: fake)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    if before is not None:
        monkeypatch.setenv("LD_PRELOAD", before)
    with module.configure_subprocess():
        assert os.environ["LD_PRELOAD"].split(":") == [fake, *([before] if before else [])]
    assert os.environ.get("LD_PRELOAD") == before


def test_variable_is_changed_for_the_block_alone(find: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    change_env = find("torch_memory_saver.utils").change_env
    monkeypatch.setenv("SUBLET_TEST_THERE", "old")
    with change_env("SUBLET_TEST_THERE", "new"), change_env("SUBLET_TEST_AWAY", "1"):
        assert (os.environ["SUBLET_TEST_THERE"], os.environ["SUBLET_TEST_AWAY"]) == ("new", "1")
    assert os.environ["SUBLET_TEST_THERE"] == "old" and "SUBLET_TEST_AWAY" not in os.environ
    with pytest.raises(ZeroDivisionError), change_env("SUBLET_TEST_THERE", "new"):
        _ = 1 // 0
    assert os.environ["SUBLET_TEST_THERE"] == "old"


def test_kinds_of_backup_that_a_device_lacks_are_refused_before_anything_starts(
    find: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entrypoint = find("torch_memory_saver.entrypoint")
    tms = entrypoint.TorchMemorySaver()
    with pytest.raises(ValueError, match="requires enable_cpu_backup"), tms.region(
        cpu_backup_backend="mmap"
    ):
        pass
    monkeypatch.setattr(entrypoint, "is_xpu", lambda: True)
    for backend in ("pinned", "mmap"):
        with pytest.raises(ValueError, match="not supported on XPU"), tms.region(
            enable_cpu_backup=True, cpu_backup_backend=backend
        ):
            pass
    monkeypatch.setattr(entrypoint, "is_xpu", lambda: False)
    monkeypatch.setitem(sys.modules, "torch", torch_of(hip="6.2.0"))
    with pytest.raises(ValueError, match="not supported on ROCm"), tms.region(
        enable_cpu_backup=True, cpu_backup_backend="mmap"
    ):
        pass
    assert tms._impl is None


def test_tests_of_programs_ask_which_device_there_is_and_what_it_holds(
    find: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    utils = find("torch_memory_saver.testing_utils")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert utils.get_device() == "cuda" and not utils.is_xpu()
    with pytest.raises(RuntimeError, match="import torch first"):
        utils.empty_cache()
    for xpu in (False, True):
        monkeypatch.setitem(sys.modules, "torch", torch_of(xpu=xpu))
        assert utils.get_device() == ("xpu" if xpu else "cuda")
        utils.empty_cache()
        assert utils.get_and_print_gpu_memory("now", gpu_id=1) == 1 << 30
        assert capsys.readouterr().out == "GPU 1 memory: 1.00 GiB (now)\n"


def test_hook_modes_name_the_object_and_an_allocator_over_its_functions(
    find: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = find("torch_memory_saver.hooks.base")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    by_preload = base.HookUtilBase.create("preload")
    assert by_preload.get_path_binary() == str(preload.get_binary_path_from_package(STEM))
    assert by_preload.get_allocator() is None
    monkeypatch.setenv("LD_PRELOAD", f"/other.so:/copied/{STEM}.so")
    assert by_preload.get_path_binary() == f"/copied/{STEM}.so"

    made: list[tuple[str, ...]] = []
    memory = types.ModuleType("torch.cuda.memory")

    def allocator(*given: str) -> Any:
        made.append(given)
        return types.SimpleNamespace(allocator=lambda: "an allocator")

    setattr(memory, "CUDAPluggableAllocator", allocator)
    monkeypatch.setitem(sys.modules, "torch.cuda.memory", memory)
    by_torch = base.HookUtilBase.create("torch")
    assert made == [(by_torch.get_path_binary(), "tms_torch_malloc", "tms_torch_free")]
    assert by_torch.get_allocator() == "an allocator"
    with pytest.raises(ValueError, match="'preload' or 'torch', not 'sublet'"):
        base.HookUtilBase.create("sublet")
