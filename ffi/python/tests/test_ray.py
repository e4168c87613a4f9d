"""Tenants of a Ray cluster: two nodes on this machine, each with a run directory of its own, on the simulated driver."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
import sublet.ray
from package_stage import TIMEOUT_S, Stage
from simdriver import MIB
from worker import Worker

HELD = 8 * MIB
START_ATTEMPTS = 3


# ---------------------------------------------------------------- no cluster is needed


def test_environment_is_merged_with_what_is_given() -> None:
    given: dict[str, Any] = {
        "env_vars": {"HF_HOME": "/data", "LD_PRELOAD": "libtcmalloc.so:" + sublet.library_path()},
        "pip": ["einops"],
    }
    made = sublet.ray.env("train", family="rl", budget={1: "2GiB", 0: "60GiB"}, compat="verl", runtime_env=given)
    assert made == {
        "pip": ["einops"],
        "env_vars": {
            "HF_HOME": "/data",
            "LD_PRELOAD": sublet.library_path() + ":libtcmalloc.so",
            "SUBLET_TENANT": "train",
            "SUBLET_FAMILY": "rl",
            "SUBLET_BUDGET": "0=60GiB,1=2GiB",
            "SUBLET_COMPAT": "verl",
        },
    }
    assert given["env_vars"]["HF_HOME"] == "/data" and len(given["env_vars"]) == 2
    plain = sublet.ray.env("infer", budget="0=1GiB", compat=["slime", "verl"])["env_vars"]
    assert plain["SUBLET_BUDGET"] == "0=1GiB" and plain["SUBLET_COMPAT"] == "slime,verl"
    assert "SUBLET_FAMILY" not in plain


def test_environment_that_contradicts_is_refused() -> None:
    with pytest.raises(sublet.UsageError, match="SUBLET_TENANT to 'infer'"):
        sublet.ray.env("train", runtime_env={"env_vars": {"SUBLET_TENANT": "infer"}})
    with pytest.raises(sublet.UsageError, match="no 'nobody'"):
        sublet.ray.env("train", compat="nobody")
    with pytest.raises(sublet.UsageError, match="a tenant's name is"):
        sublet.ray.env("")


def test_package_and_environment_need_no_ray() -> None:
    code = "import sys, sublet.ray; sublet.ray.env('train'); assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_switch_without_a_cluster_is_refused() -> None:
    with pytest.raises(sublet.UsageError, match=r"ray.init|pip install"):
        sublet.ray.switch("train", "infer")
    with pytest.raises(sublet.UsageError, match="both tenants"):
        sublet.ray.switch("train", "train")


def test_rays_cancellation_has_a_late_node_put_its_part_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_RUN_DIR", stage.run_dir)
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(8 * MIB, fill=7)")
    real = sublet.ray._done

    def cancelled(act: str, *rest: Any) -> Any:
        if act == "pause":
            # As Ray does it: noted alone, and no wait is woken.
            subprocess.run([sys.executable, "-c", f"import os; os.kill({os.getpid()}, 2)"], check=True)
        return real(act, *rest)

    monkeypatch.setattr(sublet.ray, "_done", cancelled)
    said = sublet.ray._act(("pause", ("train",), None, 60.0, 60.0))
    assert said["outcome"] == "undone"
    assert sublet.Tenant("train").state == "active"
    assert worker.do("memory.read() == b'\\x07' * 8 * MIB") is True


def test_node_that_is_too_late_puts_its_part_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBLET_RUN_DIR", stage.run_dir)
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(2 * MIB)")
    late = sublet.ray._act(("pause", ("train",), None, TIMEOUT_S, -TIMEOUT_S))
    assert late == {"outcome": "undone", "error": "too late"}
    assert worker.do("sublet.is_paused()") is False
    assert sublet.ray._act(("pause", ("train",), None, TIMEOUT_S, 0.0))["outcome"] == "completed"
    assert sublet.ray._look(("train", "infer")) == {"train": "paused"}
    # What was done already is not put back.
    again = sublet.ray._act(("pause", ("train",), None, TIMEOUT_S, -TIMEOUT_S))
    assert again["outcome"] == "already"
    assert sublet.ray._act(("resume", ("nobody",), None, 1.0, 0.0))["outcome"] == "failed"
    sublet.Tenant("train").resume()


# ---------------------------------------------------------------- a cluster of two nodes


class Machine:
    """One node of Ray's, and the tenants that meet there."""

    def __init__(self) -> None:
        # A socket's path has to be short.
        self.stage = Stage(tempfile.mkdtemp(prefix="sublet-"))
        self.node: Any = None
        self.id = ""
        self.workers: dict[str, Worker] = {}

    def start(self, *tenants: str) -> None:
        """A process of each of these tenants, with memory."""
        for tenant in tenants:
            worker = self.workers[tenant] = self.stage.worker(tenant)
            worker.tell(f"memory = simdriver.allocate({HELD}, fill={len(tenant)})")
        for tenant in tenants:
            self.workers[tenant].answer()

    def is_paused(self, tenant: str) -> bool:
        """Is it, by its own word?"""
        found: bool = self.workers[tenant].do("sublet.is_paused()")
        return found

    def standing(self) -> dict[str, bool]:
        """Which tenants are paused."""
        return {tenant: self.is_paused(tenant) for tenant in self.workers}

    def raylet(self) -> int:
        """The process id of the node's own process."""
        pid: int = self.node.all_processes["raylet"][0].process.pid
        return pid

    def close(self) -> None:
        """Ends the tenants."""
        self.stage.close()
        shutil.rmtree(self.stage.run_dir, ignore_errors=True)


class RayCluster:
    """Two machines, and Ray connected to both; all of it on the loopback device."""

    def __init__(self, folder: str) -> None:
        os.environ.update(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0")
        self.ray: Any = importlib.import_module("ray")
        self._services: Any = importlib.import_module("ray._private.services")
        self._resolve = self._services.resolve_ip_for_localhost
        self.machines = [Machine(), Machine()]
        self._processes: set[int] = set()
        self._cluster: Any = importlib.import_module("ray.cluster_utils").Cluster()
        # The dashboard's server takes as long to start as all else, and nothing here asks it.
        node: Any = importlib.import_module("ray._private.node").Node
        node.start_api_server = lambda self, **_: None

    def start(self) -> None:
        """Starts the nodes, and connects to them."""
        # Ray takes the machine's address in the place of this one, and nobody shall listen there.
        self._services.resolve_ip_for_localhost = lambda host: host
        for machine in self.machines:
            machine.node = self._cluster.add_node(
                node_ip_address="127.0.0.1",
                num_cpus=1,
                num_gpus=0,
                object_store_memory=80 * MIB,
                include_log_monitor=False,
                no_monitor=True,
                env_vars={
                    "SUBLET_RUN_DIR": machine.stage.run_dir,
                    "LD_LIBRARY_PATH": os.environ["SUBLET_TEST_SIMCUDA_DIR"],
                },
            )
            machine.id = machine.node.node_id
        self._cluster.wait_for_nodes(timeout=TIMEOUT_S)
        self.ray.init(
            address=self._cluster.address,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            logging_level="ERROR",
        )
        # The first is the one that this process is connected through, and ends with.
        own = self.ray.get_runtime_context().get_node_id()
        self.machines.sort(key=lambda machine: bool(machine.id != own))

    def note_processes(self) -> None:
        """Remembers all processes of Ray's that have been started, to end them by their ids."""
        self._processes |= {pid for pid in descendants(os.getpid()) if is_of_ray(pid)}

    def close(self) -> None:
        """Ends everything."""
        self.note_processes()
        with contextlib.suppress(Exception):
            self.ray.shutdown()
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
        self._services.resolve_ip_for_localhost = self._resolve
        for pid in self._processes:
            # A number that has been given to another process since is not Ray's.
            if is_of_ray(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for machine in self.machines:
            machine.close()


def descendants(pid: int) -> set[int]:
    """The process ids of its children, and of theirs."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
    found: set[int] = set()
    fresh = {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def is_of_ray(pid: int) -> bool:
    """Is it a process of Ray's?"""
    with contextlib.suppress(OSError):
        return b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """The two nodes, each with the tenants train, which runs, and infer, which is paused."""
    pytest.importorskip("ray", reason="Ray cannot be installed for this Python")
    before = dict(os.environ)
    folder = tempfile.mkdtemp(prefix="ray-")
    made = None
    try:
        made = started(folder)
        for machine in made.machines:
            machine.start("train", "infer")
        sublet.ray.pause("infer")
        yield made
    finally:
        if made is not None:
            made.close()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


def started(folder: str) -> RayCluster:
    """A cluster that runs. Ray gives a node 30 s to start, which a machine under load may not keep to: where it fails each
    time, the tests that need it are skipped, and the summary of the run says why."""
    for attempt in range(START_ATTEMPTS):
        made = RayCluster(os.path.join(folder, str(attempt)))
        try:
            made.start()
        except Exception as error:
            made.close()
            last = f"Ray did not start in {attempt + 1} attempts: {error}"
        else:
            return made
    pytest.skip(last)


#: Who is paused before and after each test.
USUAL = {"train": False, "infer": True}


def outcomes(nodes: tuple[sublet.ray.NodeOutcome, ...], cluster: RayCluster) -> list[str]:
    """The outcome on each machine, in their order."""
    found = {node.node: node.outcome for node in nodes}
    return [found[machine.id] for machine in cluster.machines]


def test_tenants_are_switched_on_every_node(cluster: RayCluster) -> None:
    nodes = sublet.ray.switch("train", sublet.Tenant("infer"))
    assert outcomes(nodes, cluster) == ["completed"] * 2
    for node in nodes:
        assert node.address == "127.0.0.1" and node.error is None and node.reports is not None
        assert node.reports["train"].outcome == node.reports["infer"].outcome == "completed"
    for machine in cluster.machines:
        assert machine.standing() == {"train": True, "infer": False}
        assert machine.workers["infer"].do(f"memory.read() == bytes([5]) * {HELD}") is True
    assert outcomes(sublet.ray.pause("train"), cluster) == ["already"] * 2
    one = cluster.machines[0]
    sublet.ray.switch("infer", "train", nodes=[one.id], timeout=TIMEOUT_S)
    assert [machine.is_paused("train") for machine in cluster.machines] == [False, True]
    sublet.ray.switch("infer", "train", nodes=[cluster.machines[1].id])
    assert [machine.standing() for machine in cluster.machines] == [USUAL] * 2


def test_actor_with_the_environment_is_of_the_tenant(cluster: RayCluster) -> None:
    class Actor:
        def allocate(self) -> bool:
            import simdriver

            import sublet

            self.memory = simdriver.allocate(4 << 20, fill=9)
            return sublet.attached()

        def holds(self) -> tuple[bool, bool]:
            import sublet

            return sublet.is_paused(), sublet.is_paused() or self.memory.read()[:1] == b"\t"

    one = cluster.machines[0]
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    options = {
        "num_cpus": 0,
        "runtime_env": sublet.ray.env("actors", family="rl", runtime_env=environment),
        "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(one.id, soft=False),
    }
    actor = cluster.ray.remote(Actor).options(**options).remote()
    get = cluster.ray.get
    assert get(actor.allocate.remote(), timeout=TIMEOUT_S) is True
    # The other node has no such tenant, and is left alone.
    assert outcomes(sublet.ray.pause("actors"), cluster) == ["completed", "absent"]
    assert get(actor.holds.remote(), timeout=TIMEOUT_S) == (True, True)
    sublet.ray.resume("actors")
    assert get(actor.holds.remote(), timeout=TIMEOUT_S) == (False, True)
    with pytest.raises(sublet.UsageError, match="no tenant 'actors'.*nothing has changed"):
        sublet.ray.switch("train", "actors")
    with pytest.raises(sublet.UsageError, match="no tenant 'actors'"):
        sublet.ray.pause("actors", nodes=[cluster.machines[1].id])
    cluster.ray.kill(actor)
    assert [machine.standing() for machine in cluster.machines] == [USUAL] * 2


def test_tenant_that_is_nowhere_and_node_that_is_not_there_are_named(cluster: RayCluster) -> None:
    with pytest.raises(sublet.UsageError, match="no node has such a tenant.*SUBLET_RUN_DIR"):
        sublet.ray.pause("nobody")
    with pytest.raises(sublet.UsageError, match="node 0123 is not in the cluster"):
        sublet.ray.pause("train", nodes=["0123"])
    with pytest.raises(sublet.UsageError, match="timeout"):
        sublet.ray.pause("train", timeout=-1)


def test_node_that_fails_has_the_others_put_back(cluster: RayCluster) -> None:
    other = cluster.machines[1]
    # No pause comes between the beginning and the end of a capture.
    other.workers["train"].do("capture = simdriver.Capture(); capture.__enter__()")
    calls: list[Callable[[], object]] = [
        lambda: sublet.ray.switch("train", "infer", timeout=5),
        lambda: sublet.ray.pause("train", timeout=5),
    ]
    for call in calls:
        with pytest.raises(sublet.ray.ClusterError) as caught:
            call()
        assert outcomes(caught.value.nodes, cluster) == ["undone", "failed"]
        failed = next(node for node in caught.value.nodes if node.outcome == "failed")
        assert failed.node == other.id and "RetryError" in str(failed.error)
        assert failed.states is not None and failed.states["train"] == "active"
        assert f"({other.id[:12]}): failed (train active" in str(caught.value)
    other.workers["train"].do("capture.__exit__()")
    assert [machine.standing() for machine in cluster.machines] == [USUAL] * 2


def test_node_that_does_not_answer_is_named_before_anything_changes(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = cluster.machines[1]
    monkeypatch.setattr(sublet.ray, "GRACE_S", 5.0)
    os.kill(other.raylet(), signal.SIGSTOP)
    try:
        with pytest.raises(sublet.ray.ClusterError, match="not begun") as caught:
            sublet.ray.switch("train", "infer")
    finally:
        os.kill(other.raylet(), signal.SIGCONT)
    assert {node.node: node.outcome for node in caught.value.nodes}[other.id] == "unknown"
    assert [machine.standing() for machine in cluster.machines] == [USUAL] * 2


def test_node_that_is_lost_in_a_switch_is_named_and_the_others_are_put_back(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = cluster.machines
    # Who is lost cannot be asked how it stands; that is not waited for long.
    monkeypatch.setattr(sublet.ray, "GRACE_S", 8.0)
    # Its switch waits for the end of the capture until the node is gone.
    other.workers["train"].do("capture = simdriver.Capture(); capture.__enter__()")
    errors: list[BaseException] = []

    def switch() -> None:
        try:
            sublet.ray.switch("train", "infer", timeout=TIMEOUT_S)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=switch)
    thread.start()
    deadline = time.monotonic() + TIMEOUT_S
    while not one.is_paused("train"):
        assert time.monotonic() < deadline and thread.is_alive(), errors
    cluster.note_processes()
    node = [other.raylet(), *descendants(other.raylet())]
    os.kill(node[0], signal.SIGKILL)
    thread.join(TIMEOUT_S)
    # A machine that is lost takes all of Ray's with it.
    for pid in filter(is_of_ray, node):
        os.kill(pid, signal.SIGKILL)
    other.workers["train"].do("capture.__exit__()")
    assert not thread.is_alive() and isinstance(errors[0], sublet.ray.ClusterError), errors
    assert outcomes(errors[0].nodes, cluster) == ["undone", "unknown"]
    lost = next(node for node in errors[0].nodes if node.node == other.id)
    assert "lost" in str(lost.error)
    assert one.standing() == USUAL
    # Who led the switch there is gone; the tenants settle it among themselves, and nothing is lost.
    for command in (["pause", "infer"], ["resume", "train"]):
        ran = other.stage.run("-m", "sublet", *command)
        assert ran.returncode == 0, ran.stderr
    assert other.workers["train"].do(f"memory.read() == bytes([5]) * {HELD}") is True
    assert other.standing() == USUAL
