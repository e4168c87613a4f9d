"""Every block that the quick start and the README show is typed, as a newcomer types it who has the wheel alone.

A shell gets the blocks of a page one after the other. It stands in an empty folder with the wheel, and finds neither Rust nor
this Python's packages. What a ``text`` block shows must come after the block before it, in this order; the next block is
typed when it has come, as a reader does it.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120.0
_STANDS_FOR_IT = "needs PyTorch and GPUs; tests/tests/quick_start.rs types it at jobs that stand for these"
#: Blocks that are not typed here, by page and first line, and why.
LEFT_OUT = {
    ("docs/quick-start.md", "sublet run --tenant train -- torchrun --nproc-per-node 2 examples/train.py --steps 2000"): _STANDS_FOR_IT,
    ("docs/quick-start.md", "sublet pause train   # from another terminal"): _STANDS_FOR_IT,
    ("README.md", "cargo xtask wheel"): "needs Rust, and builds a release; what it installs, this test does",
    ("README.md", "sublet run --tenant train -- torchrun --nproc-per-node 4 examples/train.py"): _STANDS_FOR_IT,
    ("README.md", "import sublet, torch"): "needs PyTorch; the quick start has the same with sublet.demo",
}
INSTALL = "python3 -m venv env && . env/bin/activate"
#: What begins a line that a newcomer would stop at, unless the page shows it.
TROUBLE = re.compile(r"sublet: |sublet\.demo: |Traceback|.*(: line \d+:|command not found|[Nn]o such file)")


@dataclass
class Block:
    """What a page tells to type, and what it shows behind that."""

    page: str
    typed: str
    shown: list[str]


def blocks(page: str) -> list[Block]:
    """All blocks of a page."""
    found: list[Block] = []
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE):
        if language == "text":
            found[-1].shown += body.splitlines()
        else:
            found.append(Block(page, body, []))
    return found


def pattern(line: str) -> re.Pattern[str]:
    """A line that is shown: blanks may be more, times and process ids others, and ``...`` stands for anything."""
    words = []
    for word in re.sub(r"([0-9.]+) (us|ms|s)\b", "TIME", line).split():
        text = re.escape(word).replace(r"\.\.\.", ".*")
        text = re.sub(r"GPU\\-[0-9a-f]{8}\S*", r"GPU-\\S*", text)
        text = re.sub(r"\b[0-9]{4,}\b", r"\\d+", text)
        words.append(text.replace("TIME", r"[0-9.]+ (us|ms|s)"))
    return re.compile(r"\s*" + r"\s+".join(words) + r"\s*")


class Shell:
    """A shell that is told lines, with all that it and its jobs print."""

    def __init__(self, folder: Path) -> None:
        python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        (folder / "bin").mkdir()
        (folder / "bin/python3").symlink_to(python)
        path = f"{folder / 'bin'}:/usr/bin:/bin"
        assert shutil.which("cargo", path=path) is None, "the test is about a machine without Rust"
        # The folder's own `env` is made by the page.
        environment = {"PATH": path, "HOME": str(folder), "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            ["bash"], cwd=folder, env=environment, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._marks = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))

    def type(self, block: Block) -> None:
        """Types a block, and waits for its end and for what is shown."""
        assert self._process.stdin is not None
        self._marks += 1
        mark = f"typed-{self._marks}"
        self._process.stdin.write(f"{block.typed}\necho {mark}\n")
        said: list[str] = []
        left, has_ended = [pattern(line) for line in block.shown if line.strip() not in ("", "...")], False
        deadline = time.monotonic() + TIMEOUT_S
        while left or not has_ended:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = left[0].pattern if left else "its end"
                pytest.fail(f"{block.page}: {block.typed}did not come to {missing}, but said\n" + "\n".join(said))
            if line == mark:
                has_ended = True
                continue
            said.append(line)
            if left and left[0].fullmatch(line):
                left.pop(0)
            elif TROUBLE.match(line):
                said += self._rest()
                pytest.fail(f"{block.page}: {block.typed}says what the page does not show: {line}, in\n" + "\n".join(said))

    def _rest(self) -> list[str]:
        """What more it says before it is silent for a while."""
        said: list[str] = []
        while True:
            try:
                said.append(self._lines.get(timeout=1.0))
            except queue.Empty:
                return said

    def close(self) -> None:
        """Ends it, with what it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in a folder that has the wheel and nothing else."""
    (wheel,) = (Path(os.environ["SUBLET_TEST_BIN"]).parent / "wheels").glob("*.whl")
    (tmp_path / wheel.name).symlink_to(wheel)
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def first_line(block: Block) -> str:
    """The first line of a block, without what it says of itself, unless that tells it from others."""
    line = block.typed.splitlines()[0]
    return line if (block.page, line) in LEFT_OUT else line.partition(" #")[0].rstrip()


def test_the_quick_start_does_what_it_shows(shell: Shell) -> None:
    for block in blocks("docs/quick-start.md"):
        if (block.page, first_line(block)) not in LEFT_OUT:
            shell.type(block)


def test_the_readme_does_what_it_shows(shell: Shell) -> None:
    (install,) = [block for block in blocks("docs/quick-start.md") if first_line(block) == INSTALL]
    shell.type(install)
    for block in blocks("README.md"):
        if (block.page, first_line(block)) not in LEFT_OUT:
            shell.type(block)


def test_what_is_left_out_is_there() -> None:
    there = {(page, first_line(block)) for page in ("docs/quick-start.md", "README.md") for block in blocks(page)}
    assert set(LEFT_OUT) <= there
