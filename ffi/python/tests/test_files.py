"""Memory whose contents a pause saves to a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import sublet
from simdriver import MIB, allocate

tenant = pytest.mark.tenant("train")


def files_in(folder: str) -> int:
    """How many files in `folder`, named or not, this process has open. One may be open more than once."""
    opened = (entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return len({entry.stat().st_ino for entry in opened if os.readlink(entry).startswith(folder)})


@tenant
def test_contents_go_to_a_file_without_a_name_and_come_back(tmp_path: Path) -> None:
    sublet.set_file_dir(tmp_path)
    with sublet.region("optimizer", contents="file"):
        optimizer = allocate(4 * MIB, fill=3)
    optimizer.write(b"state")
    for tags in ("optimizer", None):
        sublet.pause(tags)
        assert files_in(str(tmp_path)) == 1 and not list(tmp_path.iterdir())
        assert sublet.stats()["pool"]["file_bytes"] == 4 * MIB
        assert bytes(sublet.host_copy(optimizer)[:6]) == b"state\x03"
        sublet.resume()
        assert optimizer.read()[:6] == b"state\x03"
    assert sublet.stats()["pool"]["file_bytes"] == 0


@tenant
def test_a_folder_that_will_not_do_is_refused_with_its_name() -> None:
    for path in ("/no/such/folder", "/proc"):
        with pytest.raises(sublet.UsageError, match=path):
            sublet.set_file_dir(path)


@tenant
def test_a_tag_in_a_file_cannot_be_kept_too() -> None:
    with sublet.region("optimizer", contents="file"):
        allocate(2 * MIB)
    with pytest.raises(sublet.UsageError, match="another tag"):
        with sublet.region("optimizer", contents="keep"):
            pass


@pytest.mark.tenant("saver")
def test_a_disk_backup_of_torch_memory_saver_goes_to_its_folder(tmp_path: Path) -> None:
    from sublet.compat.torch_memory_saver import torch_memory_saver as saver

    folder = tmp_path / "backups"
    saver.set_disk_backup_dir(str(folder))
    with saver.region("weights", enable_disk_backup=True):
        weights = allocate(2 * MIB, fill=9)
    saver.pause("weights")
    assert files_in(str(folder)) == 1
    saver.resume("weights")
    assert weights.read()[:2] == b"\x09\x09"
