"""Do the drop-ins have what released frameworks ask for, by the parameters that interfaces/releases.json has of each release?"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from typing import Any

import pytest

from standins import FOLDER
from sublet.compat import vllm
from sublet.compat.torch_memory_saver import TorchMemorySaver
from sublet.compat.vllm.binding import BACKENDS, WORKER

RECORD: dict[str, Any] = json.loads((FOLDER / "releases.json").read_text())
#: Those whose functions ours stand in for.
REPLACED = ("areal", "nemo_rl", "openrlhf", "slime", "verl")


def releases(*frameworks: str) -> list[Any]:
    """Each recorded release."""
    return [
        pytest.param(name, release, id=f"{name}-{version}")
        for name in frameworks
        for version, release in RECORD[name]["releases"].items()
    ]


def names(text: str) -> list[str]:
    """The names of recorded parameters."""
    function = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


@pytest.mark.parametrize(("framework", "release"), releases(*REPLACED))
def test_release_has_every_function_that_is_needed(framework: str, release: dict[str, Any]) -> None:
    modules = importlib.import_module(f"sublet.compat.{framework}")._framework.modules
    found = {module: targets for module, targets in modules.items() if module in release}
    assert found
    for module, targets in found.items():
        for target in targets:
            # What a module has taken from another has its record there.
            places = [release[module], *(other for other in release.values() if isinstance(other, dict))]
            theirs = next((place[target.name] for place in places if target.name in place), None)
            if theirs is None:
                assert target.optional, f"{module} has no {target.name}"
                continue
            assert set(target.parameters) <= set(names(theirs)), target.name


@pytest.mark.parametrize(("framework", "release"), releases("vllm"))
def test_vllms_allocator_has_every_public_name(framework: str, release: dict[str, Any]) -> None:
    for name, text in release["vllm.device_allocator.cumem"].items():
        last = name.partition(".")[2]
        if last.startswith("_"):
            continue
        ours = getattr(vllm.CuMemAllocator, last)
        if callable(ours):
            assert list(inspect.signature(ours).parameters) == names(text), name
    fields = {name.partition(".")[2] for name in release["vllm.device_allocator"] if name.startswith("AllocationData.")}
    assert fields <= set(vllm.AllocationData.__dataclass_fields__)
    # What the backend stands on.
    backends = release[BACKENDS]
    assert backends["SleepModeBackendFactory.register_backend"] == "cls, name, module_path, class_name"
    assert "CuMemBackend.suspend" in backends and "vllm_config" in names(release[WORKER]["Worker.__init__"])


@pytest.mark.parametrize(("framework", "release"), releases("torch_memory_saver"))
def test_saver_takes_what_theirs_takes(framework: str, release: dict[str, Any]) -> None:
    for name, text in release["torch_memory_saver.entrypoint"].items():
        holder, _, last = name.partition(".")
        if holder == "TorchMemorySaver" and not last.startswith("_"):
            ours = getattr(TorchMemorySaver, last)
            if callable(ours):
                assert list(inspect.signature(ours).parameters) == names(text), name


@pytest.mark.parametrize(("framework", "release"), releases("sglang"))
def test_saver_has_what_sglangs_adapter_hands_on(framework: str, release: dict[str, Any]) -> None:
    asked = {name.partition(".")[2] for name in release["sglang.srt.utils.torch_memory_saver_adapter"]}
    of_the_package = {"check_validity", "create", "configure_subprocess"}
    assert [name for name in asked - of_the_package if not hasattr(TorchMemorySaver, name)] == []
