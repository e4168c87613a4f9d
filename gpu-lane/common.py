"""What every job of this folder shares: deadlines, child processes, numbers, results.

Nothing here imports torch at module level, so that the scripts can be checked on a machine without it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: The bundle, or the source tree.
ROOT = Path(__file__).resolve().parent.parent
#: Folders whose modules jobs and their processes import.
FOLDERS = tuple(ROOT / name for name in ("gpu-lane", "gpu-tests", "benchmarks"))
MIB = 1 << 20
GIB = 1 << 30
EXIT_FAILED = 1
EXIT_DEADLINE = 124
#: NVLink multicast stays off in every process that these jobs start.
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


class JobError(RuntimeError):
    """Something that ends a job, in one sentence."""


class Ended(BaseException):
    """A signal asked the job to end; no job mistakes it for a failure that it can go on from."""


def log(text: str) -> None:
    """Prints one line with the time since the job began."""
    print(f"[{time.monotonic() - _BEGAN:7.1f}s] {text}", flush=True)


_BEGAN = time.monotonic()

# ---------------------------------------------------------------- processes and deadlines

_children: dict[int, subprocess.Popen[Any]] = {}
_on_deadline: list[Callable[[str], None]] = []


def spawn(cmd: Sequence[str | os.PathLike[str]], env: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """Starts `cmd` in a process group of its own, output to `log_path`; `stop_children` ends it."""
    with open(log_path, "ab") as sink:
        child = subprocess.Popen(
            [str(part) for part in cmd],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    adopt(child)
    return child


def adopt(child: subprocess.Popen[Any]) -> None:
    """Has `stop_children` end `child`, which must have been started with start_new_session."""
    _children[child.pid] = child


def release(child: subprocess.Popen[Any]) -> None:
    """The child has ended: forget it."""
    _children.pop(child.pid, None)


def stop_child(child: subprocess.Popen[Any], grace_s: float = 2.0) -> None:
    """Ends a child of `spawn` and the processes of its group, politely first."""
    _children.pop(child.pid, None)
    for number in (signal.SIGTERM, signal.SIGKILL):
        # The group has the child's id: it was started as the leader of a new session.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
        if number == signal.SIGTERM:
            time.sleep(0.05)


def stop_children() -> None:
    """Ends everything that `spawn` started and that still runs."""
    for child in list(_children.values()):
        stop_child(child, grace_s=1.0)


def session_of(pid: int) -> int:
    """The session of a process; 0 of one that is gone, or that has ended and is a mere entry."""
    try:
        state, _parent, _group, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        return 0 if state == "Z" else int(session)
    except (OSError, ValueError, IndexError):
        return 0


def members(session: int) -> list[int]:
    """The processes of a session, also those that are groups of their own."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and session_of(int(path.name)) == session]


def end_session(session: int, patience_s: float = 6.0) -> int:
    """Ends all processes of a session, politely first; how many there were."""
    found = members(session)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in members(session):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
        end = time.monotonic() + patience_s
        while members(session) and time.monotonic() < end:
            time.sleep(0.1)
    return len(found)


def at_deadline(action: Callable[[str], None]) -> None:
    """Has `action(reason)` run before the process is ended by its deadline."""
    _on_deadline.append(action)


def arm_deadline(seconds: float) -> None:
    """Ends this process after `seconds`: stacks of all threads, partial results, own children, then the exit."""

    def expire() -> None:
        reason = f"deadline of {seconds:.0f} s passed"
        sys.stderr.write(f"{reason}; stacks follow\n")
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(all_threads=True)
        for action in _on_deadline:
            with contextlib.suppress(Exception):
                action(reason)
        with contextlib.suppress(Exception):
            stop_children()
        os._exit(EXIT_DEADLINE)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    # The second net needs neither the interpreter lock nor a working Python thread.
    faulthandler.dump_traceback_later(seconds + 20, exit=True)


def child_env(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: ours, multicast off, nothing preloaded, plus `extra`."""
    env = dict(os.environ)
    for name in ("LD_PRELOAD", "SUBLET_TENANT"):
        env.pop(name, None)
    for name, value in MULTICAST_OFF.items():
        env.setdefault(name, value)
    env.setdefault("NCCL_DEBUG", "WARN")
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault("OMP_NUM_THREADS", "4")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, FOLDERS), env.get("PYTHONPATH")]))
    env.update(extra or {})
    return env


def wait_until(what: str, ready: Callable[[], bool], timeout_s: float, poll_s: float = 0.02) -> None:
    """Waits until `ready()`; raises JobError naming `what` after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > end:
            raise JobError(f"{what} did not come within {timeout_s:.0f} s")
        time.sleep(poll_s)


# ---------------------------------------------------------------- numbers


def percentile(samples: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile, `share` in 0..1; None of nothing."""
    ordered = sorted(samples)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarise(samples: Sequence[float]) -> dict[str, float | int | None]:
    """Median, p99, best, worst and count."""
    ordered = sorted(samples)
    if not ordered:
        return {"median": None, "p99": None, "min": None, "max": None, "count": 0}
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return {
        "median": median,
        "p99": percentile(ordered, 0.99),
        "min": ordered[0],
        "max": ordered[-1],
        "count": len(ordered),
    }


def growth(values: Sequence[float], share: int) -> tuple[float, str]:
    """How much larger the least of the last `share` values is than that of the first, and both in words."""
    first, last = min(values[:share]), min(values[-share:])
    return last - first, f"{first} then {last}, most {max(values)}"


def held_by(pids: Sequence[int]) -> dict[str, int]:
    """What processes hold of the host together; one that has just ended holds nothing."""
    sums = {"rss_bytes": 0, "anonymous_bytes": 0, "descriptors": 0, "threads": 0, "maps": 0}
    for place in (Path("/proc") / str(pid) for pid in pids):
        with contextlib.suppress(OSError, KeyError):
            status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
            sums["rss_bytes"] += int(status["VmRSS"].split()[0]) << 10
            sums["anonymous_bytes"] += int(status["RssAnon"].split()[0]) << 10
            sums["threads"] += int(status["Threads"])
            sums["descriptors"] += len(os.listdir(place / "fd"))
            sums["maps"] += (place / "maps").read_bytes().count(b"\n")
    return sums


def touch_host_memory(gib: float) -> dict[str, float]:
    """Touches and frees host memory in a child, so that a virtual machine that grows its memory on use has it.

    Without this a first pause would be charged for the machine's growth.
    """
    code = (
        "import ctypes,mmap,sys,threading\n"
        "total=int(float(sys.argv[1])*2**30); n=16; part=total//n//2**21*2**21\n"
        "m=[mmap.mmap(-1,part) for _ in range(n)]\n"
        "def go(b):\n"
        "    try: b.madvise(mmap.MADV_HUGEPAGE)\n"
        "    except (OSError,AttributeError): pass\n"
        "    ctypes.memset((ctypes.c_char*part).from_buffer(b),1,part)\n"
        "t=[threading.Thread(target=go,args=(b,)) for b in m]\n"
        "[x.start() for x in t]; [x.join() for x in t]\n"
    )
    began = time.perf_counter()
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run([sys.executable, "-c", code, str(gib)], env=child_env(), timeout=60, check=False)
    return {"gib": gib, "seconds": time.perf_counter() - began}


#: What may be left of tenants in a deep pause on a GPU.
LEFT_MIB = 16


def used_mib() -> list[int]:
    """What nvidia-smi says is used of each GPU of the machine. It is no tenant, whatever the caller is."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, env=child_env(), capture_output=True, text=True, timeout=20, check=True)
    return [int(line) for line in done.stdout.split()]


# ---------------------------------------------------------------- results


def manifest_commit() -> str:
    """The commit that the bundle was built from, read from its MANIFEST."""
    for path in (ROOT / "MANIFEST", ROOT / "MANIFEST.json", ROOT / "MANIFEST.txt"):
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace")
            named = re.search(r"commit\W+([0-9a-f]{7,40}\S*)", text, re.IGNORECASE)
            if named:
                return named.group(1).strip("\",'")
            bare = re.search(r"\b[0-9a-f]{40}\b", text)
            return bare.group(0) if bare else text.strip()[:80]
    return os.environ.get("SUBLET_COMMIT", "unknown")


def driver_version() -> str:
    """The version of the kernel driver, or 'unknown'."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found.group(1)
    return "unknown"


def gpus() -> dict[str, Any]:
    """Name and number of the GPUs, as nvidia-smi lists them; a job that uses fewer says so itself."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")
        names = [name.strip() for name in names if name.strip()]
        return {"name": names[0] if names else None, "count": len(names)}
    return {"name": None, "count": None}


class Result:
    """One record in a JSON file of records; written again, whole and by rename, at every `save`."""

    def __init__(self, path: Path, name: str, parameters: dict[str, Any]) -> None:
        self.path, self.name = path, name
        self._lock = threading.Lock()
        self.data: dict[str, Any] = {
            "name": name,
            "status": "running",
            "commit": manifest_commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "gpu": gpus(),
            "driver": driver_version(),
            "versions": {
                "torch": None,
                "nccl": None,
                "cuda": None,
                "python": platform.python_version(),
                "kernel": platform.release(),
            },
            "parameters": parameters,
            "samples": {},
            "summary": {},
            "baseline": {},
            "checks": [],
            "notes": [],
        }

    def machine(self, probe: dict[str, Any], versions: dict[str, Any] | None = None) -> None:
        """Notes what the observer and a rank say about machine and libraries."""
        self.data["gpu"] = {"name": probe.get("name"), "count": probe.get("count")}
        self.data["versions"]["driver_api"] = probe.get("driver_api")
        self.data["versions"].update(versions or {})

    def sample(self, series: str, value: Any) -> None:
        self.data["samples"].setdefault(series, []).append(value)

    def note(self, text: str) -> None:
        """Adds a note, and prints it."""
        self.data["notes"].append(text[:4000])
        log(f"note: {text[:1000]}")

    def check(self, what: str, passed: bool, detail: str = "") -> bool:
        """Adds a verdict."""
        self.data["checks"].append({"what": what, "passed": bool(passed), "detail": detail[:1000]})
        log(f"{'ok  ' if passed else 'FAIL'} {what} {detail[:300]}")
        return bool(passed)

    def finish(self, status: str | None = None) -> bool:
        """Summarises the plain number series, decides the status and saves. True when all checks passed."""
        for series, values in list(self.data["samples"].items()):
            numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
            if numbers and len(numbers) == len(values):
                self.data["summary"].setdefault(series, summarise(numbers))
        passed = all(entry["passed"] for entry in self.data["checks"])
        self.data["status"] = status or ("passed" if passed else "failed")
        self.save()
        return passed and status is None

    def save(self) -> None:
        """Writes the record into its file, next to the records of other names."""
        with self._lock:
            records: list[dict[str, Any]] = []
            with contextlib.suppress(OSError, ValueError):
                records = [r for r in json.loads(self.path.read_text()) if r.get("name") != self.name]
            records.append(self.data)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.parent / f".{self.path.name}.{os.getpid()}"
            part.write_text(json.dumps(records, indent=1, default=str))
            part.replace(self.path)


# ---------------------------------------------------------------- the shape of a job script


def job_parser(doc: str | None, deadline_s: float) -> argparse.ArgumentParser:
    """The options that every job has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/results.json"), help="file of result records")
    parser.add_argument("--name", help="name of the record (default: from the options)")
    parser.add_argument("--logs", type=Path, default=Path("results/logs.txt"), help="where output of workers is added")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use (0: all)")
    parser.add_argument("--deadline", type=float, default=deadline_s, help="seconds until the job ends itself")
    parser.add_argument("--dry-run", action="store_true", help="check imports and options, then stop")
    return parser


def run_job(args: Any, name: str, body: Callable[[Any, Result, Path], None]) -> int:
    """Runs `body(args, result, work folder)` under the deadline; an exit code. Whatever happens, results are written."""
    parameters = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    if args.dry_run:
        print(f"dry run of {name}: {json.dumps(parameters)}")
        return 0
    result = Result(args.out, args.name or name, parameters)
    work = Path(tempfile.mkdtemp(prefix="sublet-job-"))

    def gather_logs() -> None:
        args.logs.parent.mkdir(parents=True, exist_ok=True)
        warnings = 0
        with open(args.logs, "ab") as sink:
            for path in sorted(work.glob("*.log")):
                data = path.read_bytes()
                warnings += data.count(b"NCCL WARN")
                if len(data) > 200_000:
                    data = data[:60_000] + b"\n... cut ...\n" + data[-140_000:]
                sink.write(f"\n===== {result.name}: {path.name}\n".encode() + data)
        result.data["nccl_warnings"] = warnings

    def expired(reason: str) -> None:
        result.note(reason)
        gather_logs()
        result.finish("deadline")

    def terminated(number: int, _frame: Any) -> None:
        raise Ended(f"ended by signal {number}")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, terminated)
    at_deadline(expired)
    arm_deadline(args.deadline)
    status: str | None = None
    try:
        body(args, result, work)
    except (JobError, Ended) as error:
        result.note(f"stopped: {error}")
        status = "error"
    except Exception as error:
        import traceback

        traceback.print_exc()
        result.note(f"stopped: {type(error).__name__}: {error}")
        status = "error"
    finally:
        stop_children()
        gather_logs()
    if result.data["nccl_warnings"]:
        result.note(f"{result.data['nccl_warnings']} NCCL WARN lines in the logs")
    passed = result.finish(status)
    shutil.rmtree(work, ignore_errors=True)
    log(f"{result.name}: {result.data['status']}")
    sys.stdout.flush()
    sys.stderr.flush()
    # No atexit handlers of half-finished helpers: everything is on disk.
    os._exit(0 if passed else EXIT_FAILED)
