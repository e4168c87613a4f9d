"""What a user gets by installing the wheel: files, licences, description and tag.

`cargo xtask wheel` runs these tests on a wheel for users, which must start on older systems and must not name folders of the
machine that built it.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from importlib.metadata import Distribution, PackagePath, distribution
from pathlib import Path

import pytest

from package_stage import FOLDER, TIMEOUT_S
from simdriver import MIB

IS_PORTABLE = os.environ.get("SUBLET_TEST_PORTABLE") == "1"
ROOT = FOLDER.parents[2]
PROGRAMS = ["sublet/bin/sublet", "sublet/lib/libsublet.so", "sublet/_native.abi3.so"]


@pytest.fixture
def wheel() -> Distribution:
    """The package as it is installed."""
    return distribution("sublet")


def files(wheel: Distribution) -> dict[str, PackagePath]:
    assert wheel.files is not None
    return {str(file): file for file in wheel.files}


def located(wheel: Distribution, name: str) -> Path:
    return Path(str(files(wheel)[name].locate()))


def test_licences_of_all_that_is_in_it_are_there(wheel: Distribution) -> None:
    texts = {Path(name).name: file.read_text() for name, file in files(wheel).items() if "/licenses/" in name}
    assert set(wheel.metadata.get_all("License-File") or []) == set(texts)
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()
    # Crates of the library, of the command and of the module; and none that is only for tests.
    for crate in ["postcard", "tracing-subscriber", "comfy-table", "prometheus-client", "pyo3", "libloading"]:
        assert re.search(rf"^{crate} \d", texts["THIRD-PARTY.txt"], re.MULTILINE), crate
    assert not re.search(r"^(proptest|bindgen|jsonschema) \d", texts["THIRD-PARTY.txt"], re.MULTILINE)
    assert "Permission is hereby granted" in texts["THIRD-PARTY.txt"]
    assert "The Rust Standard Library" in texts["RUST-STANDARD-LIBRARY.html"]


def test_package_index_has_what_it_shows(wheel: Distribution) -> None:
    metadata = wheel.metadata
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert "pip install ./sublet-" in (wheel.read_text("METADATA") or "")
    assert metadata["Author"] or metadata["Author-email"]
    assert metadata["Requires-Python"] == ">=3.9"
    assert not [needed for needed in wheel.requires or [] if "extra ==" not in needed]


def test_entry_points_and_programs_are_there(wheel: Distribution) -> None:
    entries = {(entry.group, entry.name) for entry in wheel.entry_points}
    assert entries == {("console_scripts", "sublet"), ("torch.backends", "sublet"), ("vllm.general_plugins", "sublet")}
    for entry in wheel.entry_points:
        assert callable(entry.load()), entry
    for name in [*PROGRAMS, "sublet/py.typed", "sublet/lib/libsublet_nccl.so"]:
        assert located(wheel, name).is_file(), name
    assert located(wheel, PROGRAMS[0]).stat().st_mode & stat.S_IXOTH
    ran = subprocess.run([located(wheel, PROGRAMS[0]), "--version"], text=True, capture_output=True, check=True)
    assert ran.stdout == f"sublet {wheel.version}\n"


def test_share_has_what_users_and_their_shells_look_for(wheel: Distribution) -> None:
    site = located(wheel, PROGRAMS[0]).parents[2]
    shares = [folder / "share" for folder in (site, Path(sys.prefix)) if (folder / "share/doc/sublet").is_dir()]
    assert shares, "no pages are installed"
    share = shares[0]
    manual = {page.name for page in (share / "man/man1").iterdir()}
    assert {"sublet.1", "sublet-pause.1", "sublet-metrics.1", "sublet-explain.1"} <= manual
    for script in ["bash-completion/completions/sublet", "zsh/site-functions/_sublet", "fish/vendor_completions.d/sublet.fish"]:
        assert "COMPLETE=" in (share / script).read_text(), script
    kernel = (share / "jupyter/kernels/sublet/kernel.json").read_text()
    assert kernel == (ROOT / "deploy/jupyter/sublet/kernel.json").read_text()
    for page in [*(ROOT / "docs").glob("*.md"), *(path for path in (ROOT / "deploy").rglob("*") if path.is_file())]:
        assert (share / "doc/sublet" / page.relative_to(ROOT)).read_bytes() == page.read_bytes(), page
    ran = subprocess.run([located(wheel, PROGRAMS[0]), "docs"], text=True, capture_output=True, check=True)
    assert ran.stdout.startswith(f"{share}/doc/sublet/docs: ")


def test_no_message_names_a_path_of_the_repository(wheel: Distribution) -> None:
    for name in [*PROGRAMS, *(name for name in files(wheel) if name.startswith("sublet/") and name.endswith(".py"))]:
        found = re.findall(rb"\b(?:docs|deploy)/[\w./-]+\.(?:md|sh|json|yaml|service)", located(wheel, name).read_bytes())
        assert not found, name


def test_wheel_alone_pauses_a_job_on_simulated_gpus(wheel: Distribution) -> None:
    job = f"""
import simdriver, sublet
memory = simdriver.allocate({4 * MIB}, fill=7)
assert sublet.pause().freed_bytes >= {4 * MIB}
sublet.resume()
assert memory.read() == bytes([7]) * {4 * MIB}
print("same contents")
"""
    command = str(located(wheel, PROGRAMS[0]))
    machine = [command, "simulate", "--gpus", "1", "--memory", "64MiB", "--"]
    words = [*machine, command, "run", "--tenant", "job", "--", sys.executable, "-c", job]
    ran = subprocess.run(words, cwd=FOLDER, text=True, capture_output=True, timeout=TIMEOUT_S)
    assert (ran.returncode, ran.stdout) == (0, "same contents\n"), ran.stderr


def test_tag_is_of_an_old_system_and_of_every_later_python(wheel: Distribution) -> None:
    text = next(file for name, file in files(wheel).items() if name.endswith(".dist-info/WHEEL")).read_text()
    tag = re.search(r"^Tag: cp39-abi3-(\S+)$", text, re.MULTILINE)
    assert tag is not None, text
    if IS_PORTABLE:
        # That the programs keep it was looked at when the wheel was packed.
        assert tag[1].startswith("manylinux_2_28_")


@pytest.mark.skipif(not IS_PORTABLE, reason="only a wheel for users must not name folders of this machine")
def test_no_folder_of_the_building_machine_is_named(wheel: Distribution) -> None:
    folders = [str(ROOT), str(Path.home()), os.environ.get("CARGO_HOME", str(ROOT))]
    total = 0
    for name in files(wheel):
        path = located(wheel, name)
        if not name.startswith("sublet/") and "/licenses/" not in name or path.suffix == ".pyc":
            # Written by the installation.
            continue
        content = path.read_bytes()
        total += len(content)
        for folder in folders:
            assert folder.encode() + b"/" not in content, f"{name} names {folder}"
    assert total < 64 * MIB
