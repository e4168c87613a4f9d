"""What each tenant holds on each GPU, by kind, over time: `sublet stats --json`, again and again."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

TENANTS = ("train", "infer")
#: Kinds in the order in which they are stacked, and what a reader is told of them.
KINDS = {
    "weights": "weights", "optimizer": "optimizer", "caches": "caches, activations", "kv": "KV cache",
    "graphs": "graphs", "bucket": "hand-over bucket", "nccl": "NCCL", "context": "contexts",
}  # fmt: skip
_LOOK_S = 30.0
#: Bytes by tenant and kind, by GPU.
Held = dict[str, dict[str, dict[str, int]]]


def command() -> list[str]:
    """The `sublet` command of the installed package."""
    package = importlib.import_module("sublet").__file__
    return [str(Path(str(package)).resolve().parent / "bin/sublet")]


def look() -> dict[str, Any]:
    """The document that `sublet stats --json` prints; empty where nobody is there or it did not come in time."""
    with contextlib.suppress(subprocess.SubprocessError, ValueError):
        done = subprocess.run([*command(), "stats", "--json"], capture_output=True, timeout=_LOOK_S, check=False)
        if done.returncode == 0:
            document: dict[str, Any] = json.loads(done.stdout)
            return document
    return {}


def used_mib() -> list[int]:
    """What nvidia-smi says is used of each GPU; nothing on a machine without one."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(subprocess.SubprocessError, OSError, ValueError):
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_LOOK_S, check=True)
        return [int(line) for line in done.stdout.split()]
    return []


def by_kind(document: Mapping[str, Any], parts: Mapping[int, Mapping[str, int]], contexts: Mapping[int, tuple[str, int]]) -> Held:
    """Bytes on the device by GPU, tenant and kind.

    Memory with a tag is of the kind of its tag. What has none is split by what its process says it holds (`parts`, by
    process): weights and optimizer first, and the rest are caches. Contexts are what the driver says is used and no
    tenant counts, or where it does not say, what each process's context costs and where (`contexts`, by process).
    """
    held: Held = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    for tenant in document.get("tenants", []):
        if tenant["tenant"] not in TENANTS:
            continue
        for member in tenant["members"]:
            pid = member["member"]["pid"]
            for device in member["pool"]["devices"]:
                _classes(device["memory"], parts.get(pid, {}), held[device["uuid"]][tenant["tenant"]])
            if pid in contexts:
                uuid, size_bytes = contexts[pid]
                held[uuid][tenant["tenant"]]["context"] += size_bytes
    for gpu in document.get("gpus", []):
        if gpu["used_bytes"] is not None and gpu["uuid"] in held:
            _contexts(held[gpu["uuid"]], gpu["used_bytes"])
    return {gpu: {tenant: dict(kinds) for tenant, kinds in tenants.items()} for gpu, tenants in held.items()}


def _classes(classes: list[dict[str, Any]], parts: Mapping[str, int], kinds: dict[str, int]) -> None:
    left = dict(parts)
    for entry in classes:
        size_bytes = entry["resident_bytes"]
        tag = "nccl" if entry["library"] == "nccl" else entry["tag"]
        if tag in KINDS:
            kinds[tag] += size_bytes
            left.pop(tag, None)
            continue
        for kind, most_bytes in list(left.items()):
            taken = min(size_bytes, most_bytes)
            kinds[kind] += taken
            size_bytes -= taken
            left[kind] -= taken
        kinds["caches"] += size_bytes


def _contexts(tenants: dict[str, dict[str, int]], used_bytes: int) -> None:
    known = sum(size for kinds in tenants.values() for kind, size in kinds.items() if kind != "context")
    rest = max(0, used_bytes - known)
    for kinds in tenants.values():
        kinds["context"] = rest // len(tenants)


def places(document: Mapping[str, Any]) -> list[tuple[int, str, int]]:
    """Process, GPU, and bytes of its own there, whether they are on the device or away."""
    return [
        (member["member"]["pid"], device["uuid"], sum(entry["own_bytes"] for entry in device["memory"]))
        for tenant in document.get("tenants", [])
        if tenant["tenant"] in TENANTS
        for member in tenant["members"]
        for device in member["pool"]["devices"]
    ]


def host_bytes(document: Mapping[str, Any]) -> int:
    """Host memory that the tenants' processes hold for saved contents."""
    members = [
        member for tenant in document.get("tenants", []) if tenant["tenant"] in TENANTS for member in tenant["members"]
    ]
    return sum(member["host"]["held_bytes"] for member in members)


class Sampler:
    """A thread that looks each `interval_s`, and callers that want a look now. `off` where there are no GPUs."""

    def __init__(self, clock: Callable[[], float], interval_s: float, off: bool = False) -> None:
        self._clock, self._interval_s, self._off = clock, interval_s, off
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._parts: dict[int, Mapping[str, int]] = {}
        self._context_bytes: dict[int, int] = {}
        self._contexts: dict[int, tuple[str, int]] = {}
        self.samples: list[dict[str, Any]] = []
        self.host_bytes = 0

    def knows(self, pid: int, parts: Mapping[str, int], context_bytes: int) -> None:
        """What process `pid` says of itself."""
        with self._lock:
            self._parts[pid], self._context_bytes[pid] = dict(parts), context_bytes

    def take(self, point: str) -> None:
        """Looks now, and keeps it as what was at `point`; an empty name for any."""
        if self._off:
            return
        begin = self._clock()
        document = look()
        if not document:
            return
        with self._lock:
            self._place(document)
            held = by_kind(document, self._parts, self._contexts)
            self.host_bytes = max(self.host_bytes, host_bytes(document))
            self.samples.append({"at_s": round((begin + self._clock()) / 2, 4), "point": point, "held": held})

    def _place(self, document: Mapping[str, Any]) -> None:
        """Remembers on which GPU each process has its memory: its context stays there when that is gone."""
        for pid, uuid, own_bytes in places(document):
            if own_bytes and pid in self._context_bytes:
                self._contexts[pid] = (uuid, self._context_bytes[pid])

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            self.take("")

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_LOOK_S + 5)
        self.samples.sort(key=lambda sample: float(sample["at_s"]))


def clock() -> Callable[[], float]:
    """Seconds since now."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin
