"""Two processes with a GPU each whose kernels wait for each other, in memory that both map by cudaIpc, without NCCL.

    KIND=one_shot python3 launch.py 2 programs/peers.py --steps 500

KIND is what a step is: `one_shot` and `two_shot`, sums over both processes by one kernel that polls the other's flags;
`exchange`, tokens sent to the other process and back, with counters there; `simple` (the default), a sum by a chain of
small kernels, one that stores a flag and one that spins on it among them, which the simulated driver has too. The kernels
are peers.cu, compiled here. Every word of every result is checked on the device; the host reads what was found, and a
word of the result, after every fourth step, so that it runs ahead of its GPU.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driver import call, kernel, launch, load
from rawcuda import AFFINE, WORD_MASK, Driver
from steps import Steps, not_run, program_failed

SOURCE = Path(__file__).with_name("peers.cu")
#: Words of an input for each unit of `--width`.
WORDS_PER_WIDTH = 1024
#: For exchange: tokens of a process, and words of one.
TOKENS, TOKEN_WORDS = 512, 1024
GRID, BLOCK = 32, 512
#: Steps after which the host waits for its GPU.
READ_EVERY = 4
#: For simple: flags of steps that may be under way simultaneously, and as many that are made ready for later ones.
SLOTS = 16
FLAG_BYTES, STATE_BYTES = 64 << 10, 128
ARCHITECTURE = "compute_80"
HANDLE_BYTES = 64
#: Below, the driver puts several allocations into one piece of memory, and a handle is for all of them.
SHARED_BYTES_MIN = 2 << 20
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
#: A number that is another in every step.
FACTOR = 2654435761


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


# ---------------------------------------------------------------- the kernels


def compiler() -> ctypes.CDLL | None:
    """NVRTC, where it is found."""
    for major in (13, 12):
        try:
            return ctypes.CDLL(f"libnvrtc.so.{major}")
        except OSError:
            continue
    return None


def compiled_by(nvrtc: ctypes.CDLL) -> bytes:
    """The kernels as PTX."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"peers.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={ARCHITECTURE}".encode())
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if code != 0:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        program_failed(f"NVRTC: {log.value.decode(errors='replace')[:800]}")
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, text)
    return text.value + b"\0"


def kernels(folder: Path, rank: int) -> bytes | None:
    """The kernels as PTX, by NVRTC or nvcc; None where there is neither."""
    nvrtc = compiler()
    if nvrtc is not None:
        return compiled_by(nvrtc)
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    target = folder / f"peers{rank}.ptx"
    command = [nvcc, "-O3", "-ptx", f"-arch={ARCHITECTURE}", "-o", str(target), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return None
    if done.returncode != 0:
        program_failed(f"nvcc: {(done.stderr or done.stdout)[-800:]}")
    return target.read_bytes() + b"\0"


# ---------------------------------------------------------------- a process


class Peer:
    """One process: its GPU, and memory of both that both map."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.rank = steps, steps.rank
        if steps.world != 2:
            not_run(f"two processes are wanted, not {steps.world}")
        self.driver = Driver()
        if self.driver.device_count() < 2:
            not_run("two GPUs are wanted")
        self.driver.use(self.rank)
        self.stream = self.driver.stream()
        self.kind = os.environ.get("KIND", "simple")
        self.functions: dict[str, ctypes.c_void_p] = {}
        ptx = kernels(steps.args.out, self.rank)
        if ptx is None and self.kind != "simple":
            not_run("neither NVRTC nor nvcc is here")
        # The simulated driver knows kernels by their names.
        self.module = load(ptx or AFFINE)
        self.words = WORDS_PER_WIDTH * steps.args.width
        self.flags, self.peer_flags = self.shared("flags", FLAG_BYTES)

    def own(self, size_bytes: int) -> int:
        """Memory of this process's, all zero."""
        address = self.driver.allocate(size_bytes)
        self.driver.fill(address, 0, size_bytes // 4, self.stream)
        self.driver.wait(self.stream)
        return address

    def shared(self, name: str, size_bytes: int) -> tuple[int, int]:
        """Memory of this process's, all zero, and the other's, as it is mapped here."""
        address, handle = self.own(max(size_bytes, SHARED_BYTES_MIN)), IpcHandle()
        call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        self.steps.tell(f"{name}.{self.rank}", bytes(handle))
        theirs, peer = IpcHandle.from_buffer_copy(self.steps.hear(f"{name}.{1 - self.rank}")), ctypes.c_uint64()
        call("cuIpcOpenMemHandle_v2", ctypes.byref(peer), theirs, ctypes.c_uint(1))
        return address, peer.value

    def launch(self, name: str, *arguments: Any, grid: int = GRID, block: int = BLOCK) -> None:
        """Launches a kernel with ctypes numbers as its arguments."""
        if name not in self.functions:
            self.functions[name] = kernel(self.module, name.encode())
        launch(self.functions[name], grid, block, self.stream, *arguments)

    def read(self, address: int, words: int = 1) -> list[int]:
        """Words of the device, after the work of the stream."""
        place = (ctypes.c_uint32 * words)()
        size = ctypes.c_size_t(4 * words)
        call("cuMemcpyDtoHAsync_v2", place, ctypes.c_uint64(address), size, self.stream)
        self.driver.wait(self.stream)
        return list(place)

    def say_goodbye(self) -> None:
        """Waits until the other process needs this one's memory no more."""
        self.driver.wait(self.stream)
        self.steps.tell(f"end.{self.rank}", b"")
        self.steps.hear(f"end.{1 - self.rank}")


class Work:
    """What a step is. `step` queues it, `value` reads what came of it."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.rank = peer, peer.rank

    def step(self, number: int) -> None:
        raise NotImplementedError

    def value(self, number: int) -> str:
        """What step `number` gave; ends the program where a word was wrong."""
        raise NotImplementedError


def wide(address: int) -> ctypes.c_uint64:
    """An address, or a count, as a kernel takes it."""
    return ctypes.c_uint64(address)


def narrow(value: int) -> ctypes.c_uint32:
    return ctypes.c_uint32(value & WORD_MASK)


class Checked(Work):
    """Work whose results are checked by a kernel, which counts the wrong words."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.tally = peer.own(4 * 2)  # wrong words, and whether a wait gave up

    @property
    def failed(self) -> ctypes.c_uint64:
        """Where a kernel says that a wait gave up."""
        return wide(self.tally + 4)

    def look(self, result: int, factors: Sequence[int], words: int) -> None:
        """Queues the check that word i is i * factors[0] + factors[1]."""
        self.peer.launch("count_wrong", wide(result), *map(narrow, factors), wide(words), wide(self.tally))

    def found(self, what: str, result: int, words: int) -> str:
        """What the checks found so far, and the last word."""
        wrong, gave_up = self.peer.read(self.tally, 2)
        if wrong or gave_up:
            program_failed(f"{what}: {wrong} words were wrong, and {'a' if gave_up else 'no'} wait gave up")
        return f"{self.peer.read(result + 4 * (words - 1))[0]:x}"


class Sum(Checked):
    """A sum over both processes by one kernel."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.own, self.theirs = peer.shared("input", 4 * peer.words)
        self.out, self.their_out = peer.shared("output", 4 * peer.words)

    @staticmethod
    def factors(number: int, rank: int) -> tuple[int, int]:
        """Of a rank's input."""
        return FACTOR * (number + 1) + 2 * rank, number + 7 * rank

    def step(self, number: int) -> None:
        peer, count = self.peer, wide(self.peer.words)
        peer.launch("ramp", wide(self.own), *map(narrow, self.factors(number, self.rank)), count)
        epoch, flags = narrow(number + 1), (wide(peer.flags), wide(peer.peer_flags))
        inputs = wide(self.own), wide(self.theirs)
        if peer.kind == "one_shot":
            peer.launch("one_shot", *inputs, wide(self.out), *flags, epoch, count, self.failed)
        else:
            outputs = wide(self.out), wide(self.their_out)
            peer.launch("two_shot", *inputs, *outputs, *flags, epoch, narrow(self.rank), count, self.failed)
        parts = zip(self.factors(number, 0), self.factors(number, 1), strict=True)
        self.look(self.out, [sum(part) for part in parts], peer.words)

    def value(self, number: int) -> str:
        return self.found(f"step {number}", self.out, self.peer.words)


class Exchange(Checked):
    """Tokens to the other process and back."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        atomics = ctypes.c_int()
        places = ctypes.c_int(peer.rank), ctypes.c_int(1 - peer.rank)
        call("cuDeviceGetP2PAttribute", ctypes.byref(atomics), ctypes.c_int(NATIVE_ATOMICS), *places)
        if not atomics.value:
            not_run("these GPUs cannot count in each other's memory")
        words = TOKENS * TOKEN_WORDS
        self.tokens = peer.own(4 * words)
        # All tokens of both may come here.
        self.received = peer.shared("received", 2 * 4 * words)
        self.sources = peer.shared("sources", 2 * 4 * TOKENS)
        self.combined = peer.shared("combined", 4 * words)
        self.states = peer.shared("states", 2 * STATE_BYTES)

    def step(self, number: int) -> None:
        peer, words = self.peer, TOKENS * TOKEN_WORDS
        factors = FACTOR * (number + 1), number + 7 * self.rank
        peer.launch("ramp", wide(self.tokens), *map(narrow, factors), wide(words))
        now, next_one = (STATE_BYTES * ((number + ahead) % 2) for ahead in (0, 1))
        states = [wide(state + now) for state in self.states]
        sizes = narrow(TOKENS), narrow(TOKEN_WORDS)
        places = [wide(place) for pair in (self.received, self.sources) for place in pair]
        rank = narrow(self.rank)
        peer.launch("dispatch", wide(self.tokens), *places, *states, rank, narrow(number), *sizes, self.failed)
        peer.launch(
            "combine",
            wide(self.received[0]),
            wide(self.sources[0]),
            *map(wide, self.combined),
            *states,
            wide(self.states[0] + next_one),
            wide(peer.flags),
            wide(peer.peer_flags),
            narrow(number + 1),
            rank,
            *sizes,
            self.failed,
        )
        self.look(self.combined[0], (3 * factors[0], 3 * factors[1] + 1), words)

    def value(self, number: int) -> str:
        return self.found(f"step {number}", self.combined[0], TOKENS * TOKEN_WORDS)


class Simple(Work):
    """A sum over both processes by a chain of kernels, each with one piece of work."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        # By turns: what the other process still reads is not written.
        self.inputs = [peer.shared(f"input{turn}", 4 * peer.words) for turn in range(2)]
        self.out = peer.own(4 * peer.words)

    def input_word(self, number: int, rank: int) -> tuple[int, int, int]:
        """What a rank's input is filled with, and the factors that make it the input."""
        return FACTOR * number + rank, 2 * number + 3, number + rank

    def meet(self, slot: int, phase: int) -> None:
        """Queues a flag for the other process, and the wait for its own."""
        at = 4 * (2 * slot + phase)
        self.peer.launch("store_u32", wide(self.peer.peer_flags + at), narrow(1), grid=1, block=1)
        self.peer.launch("spin_until_nonzero", wide(self.peer.flags + at), grid=1, block=1)

    def step(self, number: int) -> None:
        peer, slot = self.peer, number % SLOTS
        own, theirs = self.inputs[number % 2]
        value, mul, add = self.input_word(number, self.rank)
        peer.driver.fill(own, value, peer.words, peer.stream)
        peer.launch("affine_u32", wide(own), narrow(mul), narrow(add), wide(peer.words))
        self.meet(slot, 0)
        peer.launch("add_u32", wide(self.out), wide(own), wide(theirs), wide(peer.words))
        self.meet(slot, 1)
        # The other process comes to these when both have met at all steps before.
        later = (slot + SLOTS // 2) % SLOTS
        peer.driver.fill(peer.flags + 8 * later, 0, 2, peer.stream)

    def value(self, number: int) -> str:
        inputs = (self.input_word(number, rank) for rank in range(2))
        total = sum(value * mul + add for value, mul, add in inputs) & WORD_MASK
        self.peer.driver.expect(f"step {number}", self.out, total, self.peer.words, self.peer.stream)
        return f"{total:x}"


KINDS: dict[str, type[Work]] = {"one_shot": Sum, "two_shot": Sum, "exchange": Exchange, "simple": Simple}


def main() -> None:
    steps = Steps(__doc__)
    peer = Peer(steps)
    work = KINDS[peer.kind](peer)

    def step(number: int) -> str:
        work.step(number)
        return work.value(number) if number % READ_EVERY == READ_EVERY - 1 else ""

    def finish() -> str:
        peer.say_goodbye()
        return f"kind {peer.kind}"

    steps.run(step, finish)


if __name__ == "__main__":
    main()
