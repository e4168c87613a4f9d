"""Tenants of a Ray cluster: their workers' environment, and switches on every node.

Ray is imported at the first call about a cluster.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

from sublet._budgets import Budget, budget_text
from sublet._errors import Error, UsageError
from sublet._library import preload_with
from sublet._pausing import Tags, tag_list, timeout_ms
from sublet._report import Report
from sublet._tenants import Tenant, swap, tenants
from sublet.compat import FRAMEWORKS, VARIABLE

__all__ = ["ClusterError", "NodeOutcome", "env", "pause", "resume", "switch"]

#: Seconds that each phase on a node may take.
TIMEOUT_S = 120.0
#: Seconds that a node has in addition, for Ray to start a worker and to bring the answer.
GRACE_S = 30.0

#: How often it is looked whether nodes are alive that have not answered.
_LOOK_EVERY_S = 2.0
#: How often a task looks whether Ray has called it off.
_CANCELLED_EVERY_S = 0.25
#: Outcomes for which a call fails.
_FAILURES = ("failed", "undone", "unknown", "standing")

#: What one node is asked to do: the act, its tenants, tags, seconds of a phase, and additional seconds.
_Order = tuple[str, tuple[str, ...], Optional[list[str]], float, float]


@dataclass(frozen=True)
class NodeOutcome:
    """The state of one node of the cluster.

    Attributes:
        node: Ray's id of it.
        address: its IP address.
        outcome: ``"completed"``; ``"already"``, when there was nothing to do; ``"absent"``, when it has no
            such tenant; ``"failed"``, as ``error`` says; ``"undone"``, when it did its part and undid it because another
            node failed; ``"unchanged"``, when it was not asked; ``"unknown"``, when
            it did not answer; ``"standing"``, when it did its part and could not undo it.
        error: why, where something failed.
        states: the state of each tenant there, where it was asked after a failure.
        reports: what the node's own call returned, by tenant, where it completed.
    """

    node: str
    address: str
    outcome: str
    error: Optional[str] = None
    states: Optional[dict[str, str]] = None
    reports: Optional[dict[str, Report]] = None

    def __str__(self) -> str:
        said = f"node {self.address} ({self.node[:12]}): {self.outcome}"
        if self.states:
            said += " (" + ", ".join(f"{name} {state}" for name, state in self.states.items()) + ")"
        return f"{said}: {self.error}" if self.error else said


class ClusterError(Error):
    """Some node failed. The other nodes were switched back if possible.

    Attributes:
        nodes: a :class:`NodeOutcome` for each node.
    """

    def __init__(self, what: str, nodes: Iterable[NodeOutcome]) -> None:
        self.nodes: tuple[NodeOutcome, ...] = tuple(nodes)
        super().__init__(f"{what}: " + "; ".join(str(node) for node in self.nodes))


def env(
    tenant: str,
    *,
    family: Optional[str] = None,
    budget: Optional[Budget] = None,
    compat: Union[str, Iterable[str], None] = None,
    runtime_env: Optional[Mapping[str, Any]] = None,
) -> dict[str, Any]:
    """A ``runtime_env`` for Ray's ``init``, or ``options`` of an actor or task: its workers are of ``tenant``.

    Args:
        tenant: the tenant's name.
        family: tenants that name the same family may open each other's CUDA IPC handles.
        budget: how much of each GPU the tenant's processes on a node may hold, as ``sublet run --budget``
            takes it, such as ``"0=60GiB"``, or ``{0: "60GiB"}``.
        compat: frameworks whose functions Sublet serves (``sublet.compat.FRAMEWORKS``): a name, or several.
        runtime_env: what else the workers get. Of ``env_vars``, entries of ``LD_PRELOAD`` come after
            Sublet's library; what this function sets otherwise must not be set there to something else.

    The package lies at the same path on all nodes; where it does not, nodes have a ``runtime_env`` each.

    Raises:
        UsageError: a name or budget is not valid, ``runtime_env`` names another tenant, or the library's path
            cannot be preloaded.

    >>> options = sublet.ray.env("train", family="rl", runtime_env={"env_vars": {"HF_HOME": "/data"}})
    >>> sorted(options["env_vars"])
    ['HF_HOME', 'LD_PRELOAD', 'SUBLET_FAMILY', 'SUBLET_TENANT']
    """
    merged = dict(runtime_env or {})
    theirs = dict(merged.get("env_vars") or {})
    ours = {"SUBLET_TENANT": Tenant(tenant).name}
    if family is not None:
        ours["SUBLET_FAMILY"] = family
    if budget is not None:
        ours["SUBLET_BUDGET"] = budget_text(budget)
    if compat is not None:
        names = [compat] if isinstance(compat, str) else list(compat)
        unknown = [name for name in names if name not in FRAMEWORKS]
        if unknown:
            raise UsageError(f"env: there is no {unknown[0]!r}: use {', '.join(FRAMEWORKS)}")
        ours[VARIABLE] = ",".join(names)
    for name, value in ours.items():
        if theirs.get(name, value) != value:
            raise UsageError(
                f"env: runtime_env sets {name} to {theirs[name]!r}, and this call to {value!r}: leave one out"
            )
    ours["LD_PRELOAD"] = preload_with(str(theirs.get("LD_PRELOAD", "")))
    merged["env_vars"] = {**theirs, **ours}
    return merged


def switch(
    from_tenant: Union[Tenant, str],
    to_tenant: Union[Tenant, str],
    *,
    timeout: Optional[float] = None,
    nodes: Optional[Iterable[str]] = None,
) -> tuple[NodeOutcome, ...]:
    """Pauses one tenant and resumes another on all nodes of the cluster simultaneously.

    A task without CPUs runs on each node and calls :func:`sublet.swap` there. Before anything changes, all nodes are
    asked. A node with neither tenant is left alone (``"absent"``). A node with only one of them is an error. When a node fails, those
    that have switched are switched back.

    Args:
        from_tenant, to_tenant: as :func:`sublet.swap` takes them.
        timeout: seconds that each phase may take on a node; 120 by default. A node that has not answered
            half a minute after that has failed; if it succeeds later, it switches back.
        nodes: Ray's ids of the nodes that are meant, where it is not all; each must have both tenants.

    Returns:
        The state of each node, in the order of Ray's list.

    Raises:
        UsageError: no node has the tenants, a node has only one of them, or an argument is wrong. Nothing has
            changed.
        ClusterError: a node failed or was lost; the error has the state of each.

    Blocks. Call it where Ray is connected (``ray.init``), one call at a time.
    """
    names = tuple(
        tenant.name if isinstance(tenant, Tenant) else Tenant(tenant).name
        for tenant in (from_tenant, to_tenant)
    )
    if names[0] == names[1]:
        raise UsageError(f"switch: '{names[0]}' is both tenants")
    return _Round("switch", names, None, timeout, nodes).run()


def pause(
    tenant: Union[Tenant, str],
    tags: Tags = None,
    *,
    timeout: Optional[float] = None,
    nodes: Optional[Iterable[str]] = None,
) -> tuple[NodeOutcome, ...]:
    """Pauses a tenant, or memory of it by tag, on every node of the cluster; else as :func:`switch`.

    When a node fails, those that this call has paused are resumed.
    """
    return _Round("pause", (_name(tenant),), tag_list(tags), timeout, nodes).run()


def resume(
    tenant: Union[Tenant, str],
    tags: Tags = None,
    *,
    timeout: Optional[float] = None,
    nodes: Optional[Iterable[str]] = None,
) -> tuple[NodeOutcome, ...]:
    """Resumes a tenant, or memory of it by tag, on every node of the cluster; else as :func:`switch`.

    When a node fails, those that this call has resumed are paused again.
    """
    return _Round("resume", (_name(tenant),), tag_list(tags), timeout, nodes).run()


def _name(tenant: Union[Tenant, str]) -> str:
    return tenant.name if isinstance(tenant, Tenant) else Tenant(tenant).name


# ---------------------------------------------------------------- on a node


def _act(order: _Order) -> dict[str, Any]:
    """What one node does, on a thread which the KeyboardInterrupt does not reach by which Ray calls a task off."""
    given_up, pool = threading.Event(), ThreadPoolExecutor(1)
    acting: Optional[Future[dict[str, Any]]] = None
    while True:
        try:
            acting = acting or pool.submit(_act_unless, given_up, order)
            # Ray only notes the interrupt: no wait ends by it.
            return acting.result(timeout=_CANCELLED_EVERY_S)
        except TimeoutError:
            pass
        except KeyboardInterrupt:
            given_up.set()


def _act_unless(given_up: threading.Event, order: _Order) -> dict[str, Any]:
    """What one node does. Puts its part back when it is done too late for the caller, or for nobody."""
    act, names, tags, seconds, grace = order
    begin, parent = time.monotonic(), os.getppid()
    try:
        reports = _done(act, names, tags, seconds)
    except Error as error:
        return {"outcome": "failed", "error": f"{type(error).__name__}: {error}"}
    outcome = "already" if all(report.outcome == "already" for report in reports.values()) else "completed"
    # Ray's own process of the node is a worker's parent: without it nobody hears the answer.
    is_lost = os.getppid() != parent
    if outcome == "completed" and (is_lost or given_up.is_set() or time.monotonic() - begin > seconds + grace):
        try:
            _done(*_opposite(act, names), tags, seconds)
        except Error as error:
            return {"outcome": "standing", "error": f"too late, and cannot be put back: {error}"}
        return {"outcome": "undone", "error": "too late"}
    return {"outcome": outcome, "reports": reports}


def _done(act: str, names: tuple[str, ...], tags: Optional[list[str]], seconds: float) -> dict[str, Report]:
    if act == "switch":
        swapped = swap(names[0], names[1], timeout=seconds)
        return {names[0]: swapped.paused, names[1]: swapped.resumed}
    tenant = Tenant(names[0])
    act_on = tenant.pause if act == "pause" else tenant.resume
    return {names[0]: act_on(tags, timeout=seconds)}


def _opposite(act: str, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    if act == "switch":
        return act, names[::-1]
    return ("resume" if act == "pause" else "pause"), names


def _look(names: tuple[str, ...]) -> dict[str, str]:
    """The state of each of these tenants that is on this node."""
    present = set(tenants())
    states = {}
    for name in names:
        if name not in present:
            continue
        try:
            members = Tenant(name).stats()["members"]
        except UsageError:
            continue
        found = sorted({str(member["member"]["state"]) for member in members})
        states[name] = "/".join(found) or "without memory"
    return states


# ---------------------------------------------------------------- where the call is made


class _Round:
    """One call, on all nodes."""

    def __init__(
        self,
        act: str,
        names: tuple[str, ...],
        tags: Optional[list[str]],
        timeout: Optional[float],
        nodes: Optional[Iterable[str]],
    ) -> None:
        timeout_ms(timeout)
        self._what = f"{act} {' to '.join(repr(name) for name in names)}"
        self._act, self._names, self._tags = act, names, tags
        self._seconds = TIMEOUT_S if timeout is None else float(timeout)
        self._ray: Any = _ray()
        self._wanted = None if nodes is None else list(nodes)
        self._nodes = self._alive()

    def run(self) -> tuple[NodeOutcome, ...]:
        """Asks all nodes, lets them act, and undoes what must be undone."""
        standing, asked = self._ask()
        order = (self._act, self._names, self._tags, self._seconds, GRACE_S)
        tasks = self._start(asked, _act, order)
        standing.update(self._outcomes(tasks, self._seconds + GRACE_S))
        if not any(outcome.outcome in _FAILURES for outcome in standing.values()):
            return self._in_order(standing)
        self._put_back(standing, tasks)
        raise ClusterError(self._what, self._in_order(standing))

    def _alive(self) -> dict[str, str]:
        """The address of each node that is meant, by its id."""
        alive = {
            str(node["NodeID"]): str(node["NodeManagerAddress"])
            for node in self._ray.nodes()
            if node["Alive"]
        }
        if self._wanted is None:
            return alive
        missing = [node for node in self._wanted if node not in alive]
        if missing:
            raise UsageError(f"{self._what}: node {missing[0]} is not in the cluster, or not alive")
        return {node: alive[node] for node in self._wanted}

    def _ask(self) -> tuple[dict[str, NodeOutcome], list[str]]:
        """Returns the nodes that have the tenants. Changes nothing."""
        answers = self._answers(self._start(list(self._nodes), _look, self._names), GRACE_S)
        standing: dict[str, NodeOutcome] = {}
        asked = []
        unheard = {node: said for node, said in answers.items() if isinstance(said, str)}
        if unheard:
            for node in self._nodes:
                outcome = "unknown" if node in unheard else "unchanged"
                standing[node] = self._of(node, outcome, unheard.get(node))
            raise ClusterError(f"{self._what}: not begun", self._in_order(standing))
        for node, states in answers.items():
            missing = [name for name in self._names if name not in states]
            if not missing:
                asked.append(node)
            elif len(missing) < len(self._names) or self._wanted is not None:
                raise UsageError(
                    f"{self._what}: node {self._nodes[node]} ({node[:12]}) has no tenant '{missing[0]}': "
                    "nothing has changed"
                )
            else:
                standing[node] = self._of(node, "absent")
        if not asked:
            addresses = ", ".join(self._nodes.values()) or "none"
            raise UsageError(
                f"{self._what}: no node has such a tenant (nodes: {addresses}): SUBLET_RUN_DIR must be "
                "the same for Ray and for the tenants of a node"
            )
        return standing, asked

    def _put_back(self, standing: dict[str, NodeOutcome], tasks: dict[str, Any]) -> None:
        """Undoes the changes, and queries the state of the nodes that failed."""
        self._undo(standing, standing)
        # Who was late may have answered meanwhile. It has put its part back, unless it was done before it heard that it was late.
        late = {node: tasks[node] for node in tasks if standing[node].outcome == "unknown"}
        answered = self._outcomes(late, 0).items()
        standing.update({node: said for node, said in answered if said.outcome != "unknown"})
        self._undo(standing, late)
        failed = [node for node in tasks if standing[node].outcome in _FAILURES]
        for node, states in self._answers(self._start(failed, _look, self._names), GRACE_S).items():
            if not isinstance(states, str):
                before = standing[node]
                standing[node] = self._of(node, before.outcome, before.error, None, states)

    def _undo(self, standing: dict[str, NodeOutcome], nodes: Iterable[str]) -> None:
        """Undoes what those of these nodes have done that have completed it."""
        act, names = _opposite(self._act, self._names)
        order = (act, names, self._tags, self._seconds, GRACE_S)
        done = [node for node in nodes if standing[node].outcome == "completed"]
        undone = self._outcomes(self._start(done, _act, order), self._seconds + GRACE_S)
        for node, outcome in undone.items():
            if outcome.outcome in ("completed", "already"):
                standing[node] = self._of(node, "undone")
            elif outcome.outcome != "unknown":
                standing[node] = self._of(node, "standing", outcome.error)
            else:
                standing[node] = outcome

    def _start(self, nodes: list[str], function: Callable[[Any], Any], argument: Any) -> dict[str, Any]:
        """A task on each node, which takes none of its CPUs."""
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        remote = self._ray.remote(num_cpus=0, num_gpus=0, max_retries=0)(function)
        tasks = {}
        for node in nodes:
            pinned = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            tasks[node] = remote.options(scheduling_strategy=pinned).remote(argument)
        return tasks

    def _answers(self, tasks: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Returns the result of each task within `seconds`, or a text with the reason why there is none."""
        deadline = time.monotonic() + seconds
        waiting, dead = dict(tasks), set()
        while waiting:
            left = deadline - time.monotonic()
            # Ray tells of a node that is lost sooner than of its tasks.
            slice_s = max(0.0, min(left, _LOOK_EVERY_S))
            ready, _ = self._ray.wait(
                list(waiting.values()), num_returns=len(waiting), timeout=slice_s
            )
            waiting = {node: task for node, task in waiting.items() if task not in ready}
            if left <= 0:
                break
            if waiting:
                alive = {str(node["NodeID"]) for node in self._ray.nodes() if node["Alive"]}
                dead |= {node for node in waiting if node not in alive}
                waiting = {node: task for node, task in waiting.items() if node in alive}
        return {
            node: "lost: the node is not alive" if node in dead else self._answer(task, seconds)
            for node, task in tasks.items()
        }

    def _answer(self, task: Any, seconds: float) -> Any:
        try:
            return self._ray.get(task, timeout=0)
        except self._ray.exceptions.GetTimeoutError:
            # One that has not begun never will; one that has puts its part back itself.
            self._ray.cancel(task, force=False)
            return f"no answer in {seconds:g} s"
        except self._ray.exceptions.RayError as error:
            return f"lost: {str(error).strip().splitlines()[0]}"

    def _outcomes(self, tasks: dict[str, Any], seconds: float) -> dict[str, NodeOutcome]:
        """Returns the result of each task that acts."""
        found = {}
        for node, answer in self._answers(tasks, seconds).items():
            if isinstance(answer, str):
                found[node] = self._of(node, "unknown", answer)
            else:
                found[node] = self._of(
                    node, answer["outcome"], answer.get("error"), answer.get("reports")
                )
        return found

    def _of(
        self,
        node: str,
        outcome: str,
        error: Optional[str] = None,
        reports: Optional[dict[str, Report]] = None,
        states: Optional[dict[str, str]] = None,
    ) -> NodeOutcome:
        return NodeOutcome(node, self._nodes[node], outcome, error, states, reports)

    def _in_order(self, standing: dict[str, NodeOutcome]) -> tuple[NodeOutcome, ...]:
        return tuple(standing[node] for node in self._nodes)


def _ray() -> Any:
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise UsageError(f"sublet.ray: Ray cannot be imported ({error}): pip install 'sublet[ray]'") from error
    if not ray.is_initialized():
        raise UsageError("sublet.ray: this process is not connected to a cluster: call ray.init() first")
    return ray
