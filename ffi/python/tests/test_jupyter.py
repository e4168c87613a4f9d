"""Jupyter kernels that share a GPU, started by the kernelspec that the repository ships."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import sublet
from package_stage import FOLDER, TIMEOUT_S, Stage, simulated_node
from simdriver import MIB

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")
kernelspec = pytest.importorskip("jupyter_client.kernelspec", reason="jupyter_client is not installed")

SPECS = FOLDER.parents[2] / "deploy/jupyter"
GPU_BYTES = 64 * MIB
#: Most of the GPU, so that two kernels that hold so much do not fit together.
HELD_BYTES = 48 * MIB
TENANT = re.compile(r"nb-notebook-[0-9a-z_]{4}")


class Kernel:
    """A kernel that runs, and the client that sends it cells."""

    def __init__(self, environment: dict[str, str]) -> None:
        specs = kernelspec.KernelSpecManager(kernel_dirs=[str(SPECS)])
        self._manager = manager.KernelManager(kernel_name="sublet", kernel_spec_manager=specs)
        self._manager.start_kernel(env=environment, cwd=str(FOLDER))
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=TIMEOUT_S)
        self.cell("import os, simdriver; from simdriver import MIB")
        self.tenant = self.value("os.environ['SUBLET_TENANT']").strip("'")

    def cell(self, code: str, **expressions: str) -> dict[str, Any]:
        """Runs a cell to its end, and gives what its expressions are then."""
        content = self._client.execute(code, user_expressions=expressions, reply=True, timeout=TIMEOUT_S)["content"]
        assert content["status"] == "ok", content
        found: dict[str, Any] = content["user_expressions"]
        return found

    def value(self, expression: str) -> str:
        """An expression, as the notebook would show it."""
        answer = self.cell("", value=expression)["value"]
        assert answer["status"] == "ok", answer
        return str(answer["data"]["text/plain"])

    def begin(self, code: str) -> None:
        """Has it run a cell, whose end nobody waits for."""
        self._client.execute(code)

    def wait_for_line(self, part: str) -> str:
        """The next line of a cell's standard error that has this in it."""
        while True:
            said = self._client.get_iopub_msg(timeout=TIMEOUT_S)["content"]
            if said.get("name") == "stderr" and part in said["text"]:
                return str(said["text"])

    def close(self) -> None:
        """Ends it."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def environment(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """As a user has it who starts Jupyter: the command and Python on the path, and one small GPU."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))  # the client's own
    programs = [Path(sublet.__file__).parent / "bin", Path(sys.executable).parent]
    path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
    node = simulated_node(tmp_path / "node", GPU_BYTES)
    private = {"JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "IPYTHONDIR": str(tmp_path / "ipython")}
    return {**stage.environment(), **node, **private, "PATH": path}


@pytest.fixture
def kernels(environment: dict[str, str]) -> Iterator[tuple[Kernel, Kernel]]:
    """Two of one user."""
    with ExitStack() as stack:
        first = Kernel(environment)
        stack.callback(first.close)
        second = Kernel(environment)
        stack.callback(second.close)
        yield first, second


def states(environment: dict[str, str]) -> dict[str, set[str]]:
    """Where the processes of each tenant stand."""
    command = [sys.executable, "-m", "sublet", "ps", "--json"]
    ran = subprocess.run(command, env=environment, text=True, capture_output=True, check=True, timeout=TIMEOUT_S)
    tenants = json.loads(ran.stdout)["tenants"]
    return {tenant["tenant"]: {process["member"]["state"] for process in tenant["members"]} for tenant in tenants}


def test_two_kernels_take_turns_on_a_gpu_that_holds_one(
    environment: dict[str, str], kernels: tuple[Kernel, Kernel]
) -> None:
    first, second = kernels
    assert first.tenant != second.tenant
    assert TENANT.fullmatch(first.tenant) and TENANT.fullmatch(second.tenant)

    first.cell(f"memory = simdriver.allocate({HELD_BYTES}, fill=7)")
    assert states(environment) == {first.tenant: {"active"}}
    # No command is given: the cell of the one waits until the other is idle, and has it make way.
    second.cell(f"memory = simdriver.allocate({HELD_BYTES}, fill=9)")
    assert states(environment) == {first.tenant: {"paused"}, second.tenant: {"active"}}

    for kernel, other, byte in [(first, second, 7), (second, first, 9), (first, second, 7)]:
        assert kernel.value(f"memory.read() == bytes([{byte}]) * {HELD_BYTES}") == "True"
        assert states(environment) == {kernel.tenant: {"active"}, other.tenant: {"paused"}}


def test_cell_that_waits_says_so(environment: dict[str, str], tmp_path: Path) -> None:
    # Under pytest a kernel leaves what is written to its descriptors to the terminal.
    environment = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
    with ExitStack() as stack:
        # While it works it is paused for its own class alone.
        first, second = Kernel({**environment, "SUBLET_TURNS": "class=guaranteed"}), Kernel(environment)
        stack.callback(first.close)
        stack.callback(second.close)
        first.cell(f"memory = simdriver.allocate({HELD_BYTES}, fill=7)")
        first.begin(f"while not os.path.exists({str(tmp_path / 'end')!r}): memory.read()")
        second.begin(f"memory = simdriver.allocate({HELD_BYTES}, fill=9)")
        assert "`sublet turns`" in second.wait_for_line("waiting for GPU memory")
        (tmp_path / "end").touch()
        assert second.value(f"memory.read() == bytes([9]) * {HELD_BYTES}") == "True"


def test_kernel_has_the_name_of_its_notebook(environment: dict[str, str]) -> None:
    kernel = Kernel({**environment, "JPY_SESSION_NAME": "/home/u/My runs/7B sweep.ipynb"})
    try:
        assert re.fullmatch(r"nb-7B-sweep-[0-9a-z_]{4}", kernel.tenant)
    finally:
        kernel.close()


def test_kernel_that_ends_leaves_the_gpu_to_the_other(
    environment: dict[str, str], kernels: tuple[Kernel, Kernel]
) -> None:
    first, second = kernels
    first.cell(f"memory = simdriver.allocate({HELD_BYTES}, fill=7)")
    second.cell(f"memory = simdriver.allocate({HELD_BYTES}, fill=9)")
    second.close()
    assert first.value(f"memory.read() == bytes([7]) * {HELD_BYTES}") == "True"
    assert states(environment) == {first.tenant: {"active"}}
