"""The native module: libraries of other versions, and the questions of a pause."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import sublet
from simdriver import MIB, allocate
from sublet import _errors
from sublet._library import own_library
from sublet._native import Library

tenant = pytest.mark.tenant("train")


def test_older_library_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text('const char *sublet_version(void) { return "0.0.1"; }')
    old = tmp_path / "libold.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(old), str(source)], check=True)
    library = Library.open(str(old))
    assert library.version() == "0.0.1"
    with pytest.raises(sublet.RefusedError, match="0.0.1.*no sublet_stats_json.*library_path"):
        library.stats()


def test_file_that_is_no_library_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent.so"):
        Library.open(str(tmp_path / "absent.so"))


def test_carried_library_is_of_this_version() -> None:
    assert Library.find() is None
    assert Library.open(sublet.library_path()).version() == sublet.__version__


def test_every_code_has_its_exception() -> None:
    kinds = {
        1: sublet.UsageError,
        2: sublet.NotAttachedError,
        3: sublet.RetryError,
        4: sublet.RefusedError,
        5: sublet.OutOfDeviceMemory,
        6: sublet.OutOfHostMemory,
        7: sublet.LostError,
        99: sublet.RefusedError,
    }
    for code, kind in kinds.items():
        error = _errors.from_code("pause", code, "it went wrong", None)
        assert type(error) is kind
        assert str(error) == "pause: it went wrong"
    report = {"code": 5, "message": "short", "missing_bytes": 7, "devices": [{"uuid": "a"}], "tags": []}
    # NCCL's code for a failure is 1, whatever it was.
    error = _errors.from_code("resume", 1, "", json.dumps(report))
    assert isinstance(error, sublet.OutOfDeviceMemory)
    assert (error.missing_bytes, error.devices) == (7, [{"uuid": "a"}])


def test_every_word_of_the_command_has_the_exception_of_its_code() -> None:
    words = {
        "usage": sublet.UsageError,
        "no-such-tenant": sublet.UsageError,
        "unknown-tag": sublet.UsageError,
        "gpu-full": sublet.OutOfDeviceMemory,
        "host-full": sublet.OutOfHostMemory,
        "lost": sublet.LostError,
        "busy": sublet.RefusedError,
    }
    for word, kind in words.items():
        document = {"error": "it went wrong", "code": word, "shortages": [{"uuid": "a"}], "missing_device_bytes": 7}
        error = _errors.from_document("pause", document)
        assert type(error) is kind
        assert str(error) == "pause: it went wrong"
        if isinstance(error, sublet.OutOfDeviceMemory):
            assert (error.missing_bytes, error.devices) == (7, [{"uuid": "a"}])
    retryable = _errors.from_document("pause", {"error": "it went wrong", "code": "busy", "retryable": True})
    assert type(retryable) is sublet.RetryError


@tenant
def test_zero_in_a_text_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nul byte"):
        own_library().tag_is_paused("a\0b")


@tenant
def test_memory_named_as_unused_is_not_saved() -> None:
    weights, cached = allocate(4 * MIB, fill=7), allocate(8 * MIB, fill=8)
    asked: list[int] = []

    def unused() -> list[tuple[int, int]]:
        asked.append(1)
        return [(cached.address, cached.size_bytes)]

    library = own_library()
    library.set_unused_source(unused)
    sublet.pause()
    assert asked == [1]
    phases = {name: phase["bytes"] for name, phase in sublet.stats()["last_pause"]}
    assert (phases["prepare"], phases["release"]) == (4 * MIB, 12 * MIB)
    sublet.resume()
    assert weights.read() == b"\x07" * (4 * MIB)
    # The next one asks nobody.
    library.set_unused_source(None)
    sublet.pause()
    sublet.resume()
    assert asked == [1]


@tenant
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_question_that_fails_saves_everything() -> None:
    memory = allocate(4 * MIB, fill=7)

    def unused() -> list[tuple[int, int]]:
        raise RuntimeError("no answer")

    own_library().set_unused_source(unused)
    sublet.pause()
    sublet.resume()
    own_library().set_unused_source(None)
    assert memory.read() == b"\x07" * (4 * MIB)
