"""Signals that come while something is taken: nothing is left behind."""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sublet
from package_stage import Stage, simulated_node
from simdriver import MIB, allocate
from sublet import _command, _regions
from sublet._library import any_library

tenant = pytest.mark.tenant("interrupts")


_kept: list[BaseException] = []


def interrupted_at(count: int, enter: Callable[[], object]) -> bool:
    """Has a KeyboardInterrupt come before the `count`-th instruction of what `enter` calls, or as its `count`-th call of C returns. Did it?

    Python looks for signals behind calls, jumps back and the beginning of a function; what is behind such a call is looked at here before the
    next instruction, but for one that returns, which the interrupt as a call of C returns stands for.
    """
    left = {"opcode": count, "c_return": count}
    before: dict[Any, str] = {}

    def follow(frame: Any, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes = True
        is_looked_for = event == "c_return"
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            was, before[frame] = before.get(frame, "RESUME"), name
            is_looked_for = was.startswith(("CALL", "JUMP_BACKWARD", "RESUME")) and not name.startswith("RETURN")
        if is_looked_for:
            left[event] -= 1
            if left[event] == 0:
                sys.settrace(None)
                sys.setprofile(None)
                raise KeyboardInterrupt
        return follow

    def run(install: Callable[[Any], None]) -> bool:
        install(follow)
        try:
            enter()
        except KeyboardInterrupt as error:
            # A notebook keeps the last one, and with it what its frames hold.
            _kept[:] = [error]
            return True
        finally:
            sys.settrace(None)
            sys.setprofile(None)
        return False

    was_there = run(sys.settrace)
    return run(sys.setprofile) or was_there


def each_instant(manager: Callable[[], Any], check: Callable[[], None], every: int = 1) -> int:
    """Interrupts the entering of `manager` at each instant, or at every so many. How many there were."""
    count = 0
    while interrupted_at(1 + count * every, lambda: left(entered(manager))):
        check()
        count += 1
    return count


def entered(manager: Callable[[], Any]) -> Any:
    """What `with` does with it first; not seen by the interrupts."""
    made = manager()
    made.__enter__()
    return made


def left(made: Any) -> None:
    """Its end, which is not interrupted."""
    sys.settrace(None)
    sys.setprofile(None)
    made.__exit__(None, None, None)


def no_turn() -> None:
    with pytest.raises(sublet.UsageError, match="no turn of this process"):
        any_library().turn_end()


@tenant
def test_interrupt_while_a_turn_begins_leaves_no_turn() -> None:
    memory = allocate(4 * MIB)
    assert each_instant(sublet.turn, no_turn) > 10
    with sublet.turn():
        pass
    no_turn()
    memory.free()


@tenant
def test_interrupt_while_a_region_is_entered_leaves_no_region() -> None:
    allocate(4 * MIB)

    def no_region() -> None:
        assert not _regions._all_open() and not _regions._entered.entries
        with pytest.raises(sublet.UsageError, match="no region"):
            any_library().region_end()
        with pytest.raises(sublet.UsageError, match="no region"):
            any_library().region_end_all_threads()

    for all_threads in (False, True):

        def region(all_threads: bool = all_threads) -> sublet.Region:
            return sublet.region("kv", "keep", all_threads=all_threads)

        assert each_instant(region, no_region) > 10


@tenant
def test_interrupt_while_memory_is_paused_for_a_block_brings_it_back() -> None:
    with sublet.region("kv"):
        memory = allocate(4 * MIB, fill=7)

    def is_back() -> None:
        assert not sublet.is_paused() and not sublet.is_paused("kv")

    for manager in (sublet.paused, lambda: sublet.paused("kv"), lambda: sublet.Tenant().paused(["kv"])):
        assert each_instant(manager, is_back, every=7) > 10
    assert memory.read() == b"\x07" * 4 * MIB


@tenant
def test_interrupt_that_comes_while_a_pause_is_under_way_brings_the_memory_back() -> None:
    memory = allocate(64 * MIB, fill=7)
    library, real = any_library(), []

    def interrupts(number: int, frame: object) -> None:
        real.append(sublet.is_paused())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupts)
    try:
        # The thread gets the interpreter when the pause gives it up. The signal is handled as the pause comes back, since a pause is one call.
        entered = threading.Event()

        def send() -> None:
            entered.wait(20)
            os.kill(os.getpid(), signal.SIGUSR1)

        sends = threading.Thread(target=send)
        sends.start()
        with pytest.raises(KeyboardInterrupt):
            entered.set()
            with sublet.paused():
                sends.join()
        assert not library.is_paused()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(real) == 1
    assert memory.read() == b"\x07" * 64 * MIB


WAITS = """
def waits():
    try:
        with sublet.turn(timeout=60):
            return 'in its turn'
    except KeyboardInterrupt:
        return 'interrupted'
"""


def test_interrupt_ends_the_wait_for_a_turn_and_nobody_has_one(stage: Stage, tmp_path: Path) -> None:
    node = simulated_node(tmp_path, 64 * MIB)
    book = stage.worker("notebook", **node, SUBLET_TURNS="class=fair")
    book.do("memory = simdriver.allocate(40 * MIB, fill=8)")
    book.do(WAITS)
    train = stage.worker("train", **node, SUBLET_TURNS="class=guaranteed")
    train.do("sublet.Tenant('notebook').pause()")
    train.do("memory = simdriver.allocate(40 * MIB, fill=7)")
    train.do("turn = sublet.turn(); turn.__enter__()")
    book.tell("waits()")
    assert not book.has_answered(1.0)
    os.kill(book.pid, signal.SIGINT)
    assert book.has_answered(20)
    assert book.answer() == "interrupted"
    train.do("turn.__exit__(None, None, None)")
    kind, args = book.do("failure(lambda: sublet._library.any_library().turn_end(), 'args')")
    assert kind == "UsageError" and "no turn of this process" in args[0]


ALLOCATES = """
def allocates():
    try:
        simdriver.allocate(40 * MIB)
        return 'taken'
    except KeyboardInterrupt:
        return 'interrupted'
    except simdriver.DriverError:
        return 'out of memory'
"""


def test_interrupt_ends_the_wait_for_memory_and_another_signal_does_not(stage: Stage, tmp_path: Path) -> None:
    node = simulated_node(tmp_path, 64 * MIB)
    train = stage.worker("train", **node, SUBLET_TURNS="auto,class=guaranteed")
    train.do("memory = simdriver.allocate(40 * MIB, fill=7)")
    train.do("turn = sublet.turn(); turn.__enter__()")
    book = stage.worker("notebook", **node, SUBLET_TURNS="auto,wait=10m")
    book.do(ALLOCATES)
    book.do("import signal; seen = []; signal.signal(signal.SIGCHLD, lambda *_: seen.append(1))")
    book.tell("allocates()")
    assert not book.has_answered(1.0)
    os.kill(book.pid, signal.SIGCHLD)
    assert not book.has_answered(1.0)
    os.kill(book.pid, signal.SIGINT)
    assert book.answer() in {"interrupted", "out of memory"}
    assert book.do("seen") == [1]


def test_interrupt_of_a_command_is_told_it_and_what_it_did_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Instead of the command one that is interrupted behind its deed, and says what it has done.
    script = tmp_path / "sublet"
    script.write_text(
        "#!/bin/sh\ntrap 'echo \"{\\\"outcome\\\": \\\"completed\\\"}\"; exit 0' INT\nsleep 0.5\nkill -USR1 $PPID\nwhile true; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(_command, "command_path", lambda: str(script))

    def interrupts(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupts)
    done: list[str] = []
    try:
        with pytest.raises(KeyboardInterrupt):
            _command.run("pause", "--deep", "train", done=done)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [line.strip() for line in done] == ['{"outcome": "completed"}']
