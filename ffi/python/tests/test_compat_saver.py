"""torch_memory_saver's interface on the simulated driver: C functions, Python object, alias."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Optional

import pytest

import sublet
from package_stage import Stage
from simdriver import MIB, OUT_OF_MEMORY, DriverError, Memory, allocate, call, free_bytes
from sublet.compat import alias_path
from sublet.compat.torch_memory_saver import TorchMemorySaver, configure_subprocess, preload
from sublet.compat.torch_memory_saver.functions import BinaryWrapper

BYTES = 4 * MIB


def saver() -> TorchMemorySaver:
    """The object of this process, without what other tests have set."""
    return TorchMemorySaver()


def backup_of(memory: Memory, size_bytes: int = 8) -> Any:
    """The first saved bytes, or None."""
    functions = BinaryWrapper().cdll
    place = functions.tms_get_cpu_backup_pointer(
        ctypes.cast(memory.address, ctypes.POINTER(ctypes.c_uint8)), size_bytes
    )
    return bytes(place[:size_bytes]) if place else None


def tags() -> dict[str, int]:
    """Bytes on the device by tag, as Sublet counts them."""
    classes = [entry for device in sublet.stats()["pool"]["devices"] for entry in device["memory"]]
    return {entry["tag"] or "": entry["resident_bytes"] for entry in classes if entry["own_bytes"]}


@pytest.mark.tenant("saver")
def test_pause_gives_back_the_tag_and_resume_brings_what_was_backed_up() -> None:
    tms = saver()
    with tms.region("weights", enable_cpu_backup=True):
        weights = allocate(BYTES, fill=7)
    with tms.region("kv_cache"):
        cache = allocate(BYTES, fill=8)
    other = allocate(BYTES, fill=9)
    before = free_bytes()

    tms.pause("kv_cache")
    assert free_bytes() == before + BYTES
    assert weights.read() == bytes([7]) * BYTES
    tms.pause("weights")
    assert free_bytes() == before + 2 * BYTES
    assert backup_of(weights) == bytes([7]) * 8
    assert backup_of(cache) is None
    assert other.read() == bytes([9]) * BYTES

    tms.resume()
    assert free_bytes() == before
    assert weights.read() == bytes([7]) * BYTES
    assert backup_of(weights) is None
    cache.write(b"new")
    assert cache.read()[:3] == b"new"


@pytest.mark.tenant("saver")
def test_one_tag_has_memory_with_and_without_backups() -> None:
    tms = saver()
    with tms.region(enable_cpu_backup=True):
        kept = allocate(BYTES, fill=1)
    with tms.region():
        lost = allocate(BYTES, fill=2)
    assert tags() == {"tms/default/keep": BYTES, "tms/default/discard": BYTES}
    tms.pause("default")
    assert set(tags().values()) == {0}
    tms.resume("default")
    assert kept.read() == bytes([1]) * BYTES
    assert lost.read() != bytes([2]) * BYTES


@pytest.mark.tenant("saver")
def test_a_pause_of_the_whole_tenant_saves_what_has_no_backup() -> None:
    """It may come at any instant, and an engine has its cache of keys and values there."""
    tms = saver()
    with tms.region("kv_cache"):
        cache = allocate(BYTES, fill=5)
    for _ in range(2):
        sublet.pause()
        sublet.resume()
        assert cache.read() == bytes([5]) * BYTES
    tms.pause("kv_cache")
    tms.resume("kv_cache")
    assert cache.read() != bytes([5]) * BYTES


@pytest.mark.tenant("saver")
def test_what_ends_the_process_elsewhere_is_a_success_here() -> None:
    tms = saver()
    tms.pause("never used")
    tms.resume("never used")
    tms.pause()
    with tms.region("a", enable_cpu_backup=True):
        memory = allocate(BYTES, fill=3)
    for _ in range(2):
        tms.pause("a")
    for _ in range(2):
        tms.resume("a")
    assert memory.read() == bytes([3]) * BYTES


@pytest.mark.tenant("saver")
def test_resume_without_room_keeps_the_backups_and_can_be_repeated() -> None:
    tms = saver()
    with tms.region("weights", enable_cpu_backup=True):
        weights = allocate(64 * MIB, fill=5)
    tms.pause("weights")
    # In the mode without regions, so that it is not of the tag.
    intruder = allocate(free_bytes() - 32 * MIB)
    with pytest.raises(sublet.OutOfDeviceMemory) as refused:
        tms.resume("weights")
    assert refused.value.missing_bytes == 32 * MIB
    assert backup_of(weights) == bytes([5]) * 8
    intruder.free()
    tms.resume("weights")
    assert weights.read() == bytes([5]) * 64 * MIB


def place_of(memory: Memory, size_bytes: int = 8) -> Optional[int]:
    """Where the backup lies."""
    address = ctypes.cast(memory.address, ctypes.POINTER(ctypes.c_uint8))
    place = BinaryWrapper().cdll.tms_get_cpu_backup_pointer(address, size_bytes)
    return ctypes.addressof(place.contents) if place else None


@pytest.mark.tenant("saver")
def test_backups_that_are_kept_lie_in_one_place_through_pauses_and_resumes() -> None:
    tms = saver()
    with tms.region("a", enable_cpu_backup=True):
        a = allocate(BYTES, fill=1)
    with tms.region("b", enable_cpu_backup=True, cpu_backup_backend="mmap"):
        b = allocate(BYTES, fill=2)
    tms.pause("a")
    place = place_of(a)
    tms.retain_cpu_backup = True
    tms.resume("a")
    assert place is not None and place_of(a) == place and backup_of(a) == bytes([1]) * 8
    tms.retain_cpu_backup = False
    assert place_of(a) == place, "it counts from the next resume on"
    a.write(bytes([3]) * BYTES)
    tms.pause()
    assert place_of(a) == place and backup_of(a) == bytes([3]) * 8
    assert backup_of(b) == bytes([2]) * 8
    tms.retain_cpu_backup = True
    # From outside, and as a whole tag: the process itself asks for nothing.
    command = [sys.executable, "-m", "sublet", "resume", "saver", "--tag", "tms/a/keep"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert place_of(a) == place and a.read() == bytes([3]) * BYTES
    tms.retain_cpu_backup = False
    tms.pause("a")
    tms.resume()
    assert (place_of(a), place_of(b)) == (None, None)
    assert a.read() == bytes([3]) * BYTES and b.read() == bytes([2]) * BYTES


@pytest.mark.tenant("saver")
def test_backup_in_several_pieces_is_of_the_last_pause() -> None:
    tms = saver()
    with tms.region("before", enable_cpu_backup=True):
        before = allocate(254 * MIB)
    with tms.region("weights", enable_cpu_backup=True):
        weights = allocate(BYTES, fill=1)
    tms.retain_cpu_backup = True
    for fill in (1, 2):
        weights.write(bytes([fill]) * BYTES)
        tms.pause()
        first = place_of(weights, BYTES)
        assert backup_of(weights, BYTES) == bytes([fill]) * BYTES
        tms.resume()
        assert place_of(weights, BYTES) == first and backup_of(weights, BYTES) == bytes([fill]) * BYTES
    before.free()


def anonymous_bytes() -> int:
    """Memory of this process that is in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.tenant("saver")
def test_backups_of_the_kind_mmap_leave_no_host_memory_after_the_resume() -> None:
    tms = saver()
    with tms.region("pinned", enable_cpu_backup=True, cpu_backup_backend="pinned"):
        pinned = allocate(64 * MIB, fill=6)
    tms.pause()
    tms.resume()
    assert sublet.stats()["pool"]["host_arena_bytes"] > 0, "it stays for the next pause"
    with tms.region("mapped", enable_cpu_backup=True, cpu_backup_backend="mmap"):
        mapped = allocate(64 * MIB, fill=7)
    tms.pause("mapped")
    tms.resume("mapped")
    before = anonymous_bytes()
    tms.pause("mapped")
    assert anonymous_bytes() > before + 48 * MIB
    tms.resume("mapped")
    assert anonymous_bytes() < before + 16 * MIB
    assert sublet.stats()["pool"]["host_arena_bytes"] == 0
    assert mapped.read() == bytes([7]) * 64 * MIB and pinned.read() == bytes([6]) * 64 * MIB


@pytest.mark.tenant("saver")
def test_memory_of_a_paused_tag_can_be_freed() -> None:
    tms = saver()
    with tms.region("cache"):
        gone, stays = allocate(BYTES), allocate(BYTES)
    before = free_bytes()
    tms.pause("cache")
    gone.free()
    tms.resume("cache")
    assert free_bytes() == before + BYTES
    stays.write(b"x")


@pytest.mark.tenant("saver")
def test_settings_are_the_threads_own_and_regions_restore_them() -> None:
    tms = saver()
    tms._ensure_initialized()
    assert tms._impl is not None
    cdll = tms._impl._binary_wrapper.cdll
    seen: list[Any] = []

    def look() -> None:
        seen.append((cdll.tms_get_interesting_region(), cdll.tms_get_current_tag()))

    with tms.region("outer", enable_cpu_backup=True, cpu_backup_backend="mmap"):
        assert cdll.tms_get_cpu_backup_backend() == b"mmap"
        with tms.region("inner"):
            assert (cdll.tms_get_current_tag(), cdll.tms_get_enable_cpu_backup()) == (
                b"inner",
                False,
            )
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        assert (cdll.tms_get_current_tag(), cdll.tms_get_enable_cpu_backup()) == (b"outer", True)
    assert (cdll.tms_get_current_tag(), cdll.tms_get_interesting_region()) == (b"default", False)
    assert cdll.tms_get_cpu_backup_backend() == b"pinned"
    assert seen == [(False, b"default")]


@pytest.mark.tenant("saver")
def test_programs_may_switch_a_region_off_and_on_by_the_c_functions() -> None:
    tms = saver()
    with tms.region("layer"):
        assert tms._impl is not None
        cdll = tms._impl._binary_wrapper.cdll
        cdll.tms_set_interesting_region(False)
        outside = allocate(BYTES, fill=4)
        cdll.tms_set_interesting_region(True)
        inside = allocate(BYTES)
        with tms.disable():
            disabled = allocate(BYTES, fill=6)
    tms.pause()
    assert tags() == {"": 2 * BYTES, "tms/layer/discard": 0}
    assert (outside.read()[:1], disabled.read()[:1]) == (b"\4", b"\6")
    tms.resume()
    inside.write(b"x")
    with pytest.raises(sublet.UsageError, match="inside a region"), tms.disable():
        pass


@pytest.mark.tenant("saver")
def test_margin_refuses_what_would_leave_too_little() -> None:
    tms = saver()
    memory = allocate(BYTES)
    tms.memory_margin_bytes = free_bytes() - BYTES
    memory.free()
    allocate(3 * BYTES).free()
    with tms.region():
        with pytest.raises(DriverError) as refused:
            allocate(3 * BYTES)
        assert refused.value.code == OUT_OF_MEMORY
        tms.memory_margin_bytes = 0
        allocate(3 * BYTES)


@pytest.mark.tenant("saver")
def test_wrong_arguments_are_refused() -> None:
    tms = saver()
    with (
        pytest.raises(ValueError, match="requires enable_cpu_backup"),
        tms.region(cpu_backup_backend="mmap"),
    ):
        pass
    with pytest.raises(ValueError, match="'pinned' or 'mmap'"):
        with tms.region(enable_cpu_backup=True, cpu_backup_backend="tape"):
            pass
    with pytest.raises(sublet.UsageError, match="not both"):
        with tms.region(enable_cpu_backup=True, enable_disk_backup=True):
            pass
    with pytest.raises(AttributeError):
        _ = tms.hook_mode
    with pytest.raises(NotImplementedError):
        _ = tms.memory_margin_bytes
    assert tms.enabled


@pytest.mark.tenant("saver")
def test_pluggable_entry_points_give_pool_memory_whatever_the_size_and_context() -> None:
    allocate(BYTES)
    library = ctypes.CDLL("libsublet.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    for stem in ("sublet_torch", "tms_torch"):
        malloc, free = getattr(library, f"{stem}_malloc"), getattr(library, f"{stem}_free")
        malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        malloc.restype = ctypes.c_void_p
        free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        free.restype = None
        free_before = free_bytes(1)
        # The current context stays that of device 0.
        call("cuCtxGetDevice", ctypes.byref(ctypes.c_int()))
        with saver().region("small", enable_cpu_backup=True):
            address = malloc(1000, 1, None)
        device = ctypes.c_int(-1)
        call("cuCtxGetDevice", ctypes.byref(device))
        assert (device.value, free_bytes(1)) == (0, free_before - 2 * MIB)
        memory = Memory(address, 1000, 1)
        memory.write(b"tiny")
        saver().pause("small")
        assert free_bytes(1) == free_before
        saver().resume("small")
        assert memory.read()[:4] == b"tiny"
        free(address, 1000, 1, None)
        assert free_bytes(1) == free_before
        assert malloc(0, 0, None) is None
        assert malloc(-1, 0, None) is None
        assert malloc(1 << 50, 0, None) is None
        assert malloc(4096, 77, None) is None
        free(None, 0, 0, None)


INITIALLY_ENABLED = """
import threading
from simdriver import MIB, allocate, free_bytes
from torch_memory_saver import torch_memory_saver as saver

first = allocate(4 * MIB, fill=1)
made = []
thread = threading.Thread(target=lambda: made.append(allocate(4 * MIB, fill=2)))
thread.start(); thread.join()
with saver.region("grads"):
    grads = allocate(4 * MIB, fill=3)
before = free_bytes()
saver.pause()
assert free_bytes() == before + 12 * MIB, free_bytes() - before
with saver.disable():
    passing = allocate(4 * MIB, fill=4)
assert passing.read()[:1] == b"\\4"
saver.resume()
assert (first.read()[:1], made[0].read()[:1]) == (b"\\1", b"\\2")
cdll = saver._impl._binary_wrapper.cdll
assert (cdll.tms_get_current_tag(), cdll.tms_get_enable_cpu_backup()) == (b"default", True)
assert saver.retain_cpu_backup
print("done")
"""


def test_alias_and_environment_serve_a_launcher_that_preloads_by_name(stage: Stage) -> None:
    """As slime starts its actors: found next to the package, preloaded, set by the environment."""
    import_path = os.pathsep.join([alias_path(), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-c", "import torch_memory_saver as t; print(t.__file__)"],
        env={**os.environ, "PYTHONPATH": import_path},
        text=True,
        capture_output=True,
        check=True,
    )
    folder = Path(found.stdout.strip()).parent.parent
    for suffix in ("", "_cu12", "_cu13"):
        path = folder / f"torch_memory_saver_hook_mode_preload{suffix}.abi3.so"
        assert b"TMS_INIT_ENABLE_DISK_BACKUP" in path.read_bytes()
        environment = {
            **stage.environment(),
            "PYTHONPATH": import_path,
            "LD_PRELOAD": str(path),
            "TMS_INIT_ENABLE": "1",
            "TMS_INIT_ENABLE_CPU_BACKUP": "true",
            "TMS_RETAIN_CPU_BACKUP": "yes",
        }
        ran = subprocess.run(
            [sys.executable, "-c", INITIALLY_ENABLED],
            env=environment,
            cwd=Path(__file__).parent,
            text=True,
            capture_output=True,
            timeout=60,
        )
        assert ran.stdout == "done\n", ran.stderr


COPIES = """
import os, sublet
paths = {line.split()[-1] for line in open("/proc/self/maps") if "libsublet.so" in line}
print(len(paths), sublet.attached())
"""


@pytest.mark.parametrize("under_sublet", [False, True])
def test_alias_never_loads_a_second_sublet(stage: Stage, under_sublet: bool) -> None:
    outer = stage.environment()
    inner = ["-c", COPIES]
    if under_sublet:
        inner = ["-m", "sublet", "run", "--tenant", "one", "--", sys.executable, *inner]
    path = str(preload.get_binary_path_from_package(preload.STEM))
    ran = subprocess.run(
        [sys.executable, *inner], env={**outer, "LD_PRELOAD": path}, text=True, capture_output=True
    )
    assert ran.stdout == "1 True\n", ran.stderr


def test_configure_subprocess_prepends_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/other/lib.so")
    with configure_subprocess():
        ours, other = os.environ["LD_PRELOAD"].split(":")
        assert Path(ours).is_file() and other == "/other/lib.so"
        with configure_subprocess():
            assert os.environ["LD_PRELOAD"] == f"{ours}:{other}"
    assert os.environ["LD_PRELOAD"] == "/other/lib.so"
    monkeypatch.delenv("LD_PRELOAD")
    with configure_subprocess():
        assert preload.preloaded() != []
    assert "LD_PRELOAD" not in os.environ


def test_another_savers_object_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = tmp_path / "torch_memory_saver_hook_mode_preload.abi3.so"
    theirs.write_bytes(b"\x7fELF of somebody else")
    monkeypatch.setenv("LD_PRELOAD", str(theirs))
    with pytest.raises(sublet.UsageError, match="not Sublet's"):
        saver().pause()
    ours = str(preload.get_binary_path_from_package(preload.STEM))
    monkeypatch.setenv("LD_PRELOAD", f"{ours}:{ours}")
    with pytest.raises(sublet.UsageError, match="more than once"):
        saver().pause()


def test_process_without_sublet_is_told_how_to_start() -> None:
    with pytest.raises(sublet.NotAttachedError, match="configure_subprocess"):
        saver().pause()
    # To drive others it loads the library, and is under it no more than before.
    with contextlib.suppress(sublet.Error):
        sublet.Tenant("nobody").stats()
    with pytest.raises(sublet.NotAttachedError, match="configure_subprocess"):
        saver().pause()


def test_install_has_the_alias_found() -> None:
    code = (
        "import sublet.compat as c\n"
        "c.install('torch_memory_saver'); c.install('torch_memory_saver')\n"
        "import torch_memory_saver, torch_memory_saver.utils\n"
        "from torch_memory_saver.hooks.mode_preload import configure_subprocess\n"
        "assert torch_memory_saver.torch_memory_saver._impl is None\n"
        "find = torch_memory_saver.utils.get_binary_path_from_package\n"
        "print(find('torch_memory_saver_hook_mode_preload'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert Path(ran.stdout.strip()).is_file(), ran.stderr
    code = (
        "import sys, types\n"
        "sys.modules['torch_memory_saver'] = types.ModuleType('torch_memory_saver')\n"
        "import sublet.compat as c; c.install('torch_memory_saver')"
    )
    ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert "call this earlier" in ran.stderr
