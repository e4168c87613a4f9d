"""Do the drop-ins have what released engines and frameworks ask for, by what interfaces/releases.json has of each release?"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import sublet
from standins import FOLDER
from sublet.compat import _binding, _tried, alias_path, torch_memory_saver, vllm
from sublet.compat._importing import forget
from sublet.compat.torch_memory_saver import TorchMemorySaver
from sublet.compat.vllm import binding

sys.path.insert(0, str(FOLDER))
from record_releases import FIELD, expanded  # noqa: E402

RECORD: dict[str, Any] = json.loads((FOLDER / "releases.json").read_text())
#: Those whose functions ours stand in for.
REPLACED = ("areal", "nemo_rl", "openrlhf", "slime", "verl")
CUMEM = binding.MODULES[0]


def releases(*frameworks: str) -> list[Any]:
    """Each recorded release."""
    return [
        pytest.param(name, version, release, id=f"{name}-{version}")
        for name in frameworks
        for version, release in expanded(RECORD[name]).items()
    ]


def names(text: str) -> list[str]:
    """The names of recorded parameters."""
    function = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def module_of(name: str, record: dict[str, str], without: str = "") -> types.ModuleType:
    """A module with the names and parameters that are recorded, less one."""
    lines: dict[str, list[str]] = {}
    for full, text in record.items():
        holder, _, last = full.rpartition(".")
        if full == without or text == FIELD:
            continue
        given = names(text)
        first = given[0] if given else None
        kind = {"self": "", "cls": "@classmethod\n "}.get(first or "", "@staticmethod\n ") if holder else ""
        # Defaults do not matter, and may be names.
        signature = ", ".join(f"{each}=None" if number else each for number, each in enumerate(given))
        lines.setdefault(holder, []).append(f"{kind}def {last}({signature}): ...")
    source = "".join(f"{line}\n" for line in lines.pop("", []))
    source += "".join(f"class {holder}:\n " + "\n ".join(body) + "\n" for holder, body in lines.items())
    module = types.ModuleType(name)
    exec(source, vars(module))
    return module


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """vLLM's modules may be put in place; afterwards nothing waits for them."""
    monkeypatch.setattr(binding, "attached", lambda: True)
    monkeypatch.setattr(_binding, "attached", lambda: True)
    monkeypatch.setattr(_tried, "_noted", set())
    yield monkeypatch
    for name in binding.MODULES:
        forget(name, binding._bind)


@pytest.mark.parametrize(("framework", "version", "release"), releases(*REPLACED))
def test_release_is_served_and_one_that_lacks_a_name_is_left_alone(
    framework: str, version: str, release: dict[str, Any], plugged: pytest.MonkeyPatch
) -> None:
    served = importlib.import_module(f"sublet.compat.{framework}")._framework
    everywhere = {name: text for record in release.values() for name, text in record.items()}
    for name, targets in served.modules.items():
        if name not in RECORD[framework]["modules"]:
            continue
        # What a module has taken from another has its record there.
        record = {target.name: everywhere[target.name] for target in targets if target.name in everywhere}
        needed = [target.name for target in targets if not target.optional]
        assert set(needed) <= set(record)
        for without in needed:
            theirs = module_of(name, record, without)
            plugged.setitem(sys.modules, name, theirs)
            before = dict(vars(theirs))
            with pytest.raises(sublet.UsageError, match=f"has (no|a) {name}.{without}[: ]"):
                served.install()
            assert vars(theirs) == before
        plugged.setitem(sys.modules, name, module_of(name, record))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert set(needed) <= {each[len(name) + 1 :] for each in served.install().replaced if each.startswith(name)}
            served.uninstall()
        # No version of these was tried.
        assert [each for each in said if "was not tried" in str(each.message)], version
        plugged.setattr(_tried, "_noted", set())
        plugged.delitem(sys.modules, name)


@pytest.mark.parametrize(("framework", "version", "release"), releases("vllm"))
def test_vllms_allocator_gives_way_to_ours(
    framework: str, version: str, release: dict[str, Any], plugged: pytest.MonkeyPatch
) -> None:
    package = types.ModuleType("vllm")
    setattr(package, "__version__", f"{version}+cu130")
    plugged.setitem(sys.modules, "vllm", package)
    record = release[CUMEM]
    for without in binding.NEEDED[CUMEM]:
        theirs = module_of(CUMEM, record, without)
        kept = vars(theirs)["CuMemAllocator"]
        plugged.setitem(sys.modules, CUMEM, theirs)
        # In one's own code an error; where vLLM would die of it a warning.
        with pytest.raises(sublet.UsageError, match=f"vLLM {version}.* has no {CUMEM}.{without}: its own sleep stays"):
            binding.install()
        plugged.setenv(sublet.compat.VARIABLE, "vllm")
        for act in (binding.load_plugin, lambda module=theirs: binding._bind(module)):
            with pytest.warns(RuntimeWarning, match=f"has no {CUMEM}.{without}"):
                act()
        assert vars(theirs)["CuMemAllocator"] is kept and "create_and_map" not in vars(theirs)
    theirs = module_of(CUMEM, record)
    plugged.setitem(sys.modules, CUMEM, theirs)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        binding.install()
        binding.install()
    assert vars(theirs)["CuMemAllocator"] is vllm.CuMemAllocator
    told = [str(each.message) for each in said]
    assert len(told) == (version not in _tried.TRIED["vLLM"]), told
    assert all(f"vLLM {version}+cu130 is served" in each and "tried was 0.24.0 (H200)" in each for each in told)
    for place in (CUMEM, "vllm.device_allocator"):
        fields = {name.partition(".")[2] for name in release.get(place, ()) if name.startswith("AllocationData.")}
        assert fields <= set(vllm.AllocationData.__dataclass_fields__)


@pytest.mark.parametrize(("framework", "version", "release"), releases("vllm"))
def test_vllms_socket_for_backends_is_used_if_it_is_whole(
    framework: str, version: str, release: dict[str, Any], plugged: pytest.MonkeyPatch
) -> None:
    assert (binding.BACKENDS in release) == (version >= "0.25")
    for name, act in ((binding.BACKENDS, binding._offer), (binding.WORKER, binding._follow)):
        if name not in release:
            continue
        for without in binding.NEEDED[name]:
            theirs = module_of(name, release[name], without)
            before = {each: dict(vars(value)) for each, value in vars(theirs).items() if isinstance(value, type)}
            with pytest.warns(RuntimeWarning, match=f"has (no|a) {name}.{without}[: ]"):
                act(theirs)
            assert before == {each: dict(vars(vars(theirs)[each])) for each in before}
            # Who does not use Sublet is told nothing.
            with plugged.context() as elsewhere, warnings.catch_warnings():
                elsewhere.setattr(binding, "attached", lambda: False)
                warnings.simplefilter("error")
                act(theirs)
        act(module_of(name, release[name]))


def test_an_allocator_that_can_more_than_ours_stays(plugged: pytest.MonkeyPatch) -> None:
    newest = list(expanded(RECORD["vllm"]).values())[-1][CUMEM]
    for more in ({"CuMemAllocator.hibernate": "self"}, {"CuMemAllocator.sleep": "self, offload_tags=None, depth=1"}):
        theirs = module_of(CUMEM, {**newest, **more})
        with pytest.warns(RuntimeWarning, match="CuMemAllocator.(hibernate|sleep with 'depth'), which Sublet's allocator lacks"):
            binding._bind(theirs)
        assert vars(theirs)["CuMemAllocator"] is not vllm.CuMemAllocator


@pytest.mark.parametrize(("framework", "version", "release"), releases("torch_memory_saver"))
def test_saver_takes_what_theirs_takes(framework: str, version: str, release: dict[str, Any]) -> None:
    for name, text in release["torch_memory_saver.entrypoint"].items():
        holder, _, last = name.partition(".")
        if holder == "TorchMemorySaver" and not last.startswith("_"):
            ours = getattr(TorchMemorySaver, last)
            if callable(ours):
                assert list(inspect.signature(ours).parameters) == names(text), name


@pytest.mark.parametrize(("framework", "version", "release"), releases("sglang"))
def test_saver_takes_what_sglangs_adapter_asks_of_it(
    framework: str, version: str, release: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = release["sglang.srt.utils.torch_memory_saver_adapter"]
    calls = {name.partition("->")[::2]: names(text) for name, text in record.items() if "->" in name}
    assert len(calls) == 6
    for (variable, method), given in calls.items():
        holder: Any = TorchMemorySaver if variable == "_memory_saver" else torch_memory_saver
        # SGLang hands on what the caller of its `cuda_graph` gives.
        given = given or (["cuda_graph", "pool", "stream", "tag", "enable_cpu_backup"] if method == "cuda_graph" else [])
        assert set(given) <= set(inspect.signature(getattr(holder, method)).parameters), method
        if holder is TorchMemorySaver:
            with monkeypatch.context() as lacking:
                lacking.delattr(holder, method)
                with pytest.raises(AttributeError, match=f"has no TorchMemorySaver.{method}.*out of PYTHONPATH"):
                    getattr(TorchMemorySaver(), method)
    # A property that may not be read says so itself.
    assert hasattr(TorchMemorySaver(), "enabled")
    with pytest.raises(AttributeError, match="can be set, not read"):
        getattr(TorchMemorySaver(), "hook_mode")


def test_alias_says_whose_it_is_where_a_name_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(alias_path())
    module: Any = importlib.import_module("torch_memory_saver")
    with pytest.raises(AttributeError, match="Sublet's torch_memory_saver has no hibernate"):
        module.hibernate()
    assert not hasattr(module, "hibernate")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_memory_saver"]:
        del sys.modules[name]


@pytest.mark.parametrize(("framework", "version", "release"), releases("trl"))
def test_trls_trainer_takes_a_callback_and_a_rollout(framework: str, version: str, release: dict[str, Any]) -> None:
    given = names(release["trl.trainer.grpo_trainer"]["GRPOTrainer.__init__"])
    assert {"callbacks", "rollout_func"} <= set(given)
