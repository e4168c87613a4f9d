"""Processes of the deep suites that hold memory by a library: JAX, CuPy, and torch with twenty graphs.

Each has `hold`, which fills memory and computes, and `same`: are contents and results bit for bit what they were? It then
changes all contents, so that every pause has something to copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import common

#: Arrays of each process. Their words are added up in rows of 4 MiB, so that rows that changed places are noticed.
PARTS, ROW_WORDS = 4, 1 << 20
GRAPHS = 20
#: What every change makes of a word.
FACTOR, TERM = 1664525, 1013904223


def words_of(gib: float) -> int:
    """The 4-byte words of each of the arrays, whole rows."""
    return max(1, int(gib * common.GIB / 4 / PARTS / ROW_WORDS)) * ROW_WORDS


def say_crashes() -> bool:
    """A crash of any thread writes where it was, from now on: `crash.c`. False where there is no compiler."""
    source = Path(__file__).parent / "programs" / "crash.c"
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError, subprocess.SubprocessError):
        library = Path(folder) / "crash.so"
        command = ["cc", "-std=gnu11", "-O1", "-g", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, timeout=60)
        ctypes.CDLL(str(library)).crash_say()
        return True
    return False


class Held:
    """What the processes have in common."""

    #: The module that must be installed.
    NEEDS = ""

    def __init__(self) -> None:
        self.wanted: list[bytes] = []
        self.results: list[bytes] = []

    def make(self, words: int) -> str:
        """Makes arrays of so many words each, and what computes; the library's version."""
        raise NotImplementedError

    def change(self) -> None:
        raise NotImplementedError

    def sums(self) -> list[bytes]:
        """The sums of all rows of each array."""
        raise NotImplementedError

    def compute(self) -> list[bytes]:
        """Results that are the same each time."""
        raise NotImplementedError

    def hold(self, gib: float) -> dict[str, str]:
        """Takes so much."""
        version = self.make(words_of(gib))
        # After the library's own, if it has one.
        say_crashes()
        self.change()
        self.wanted, self.results = self.sums(), self.compute()
        return {self.NEEDS: version}

    def same(self) -> list[str]:
        """What is not as it was; changes all contents."""
        found = {"contents": self.sums() == self.wanted, "results": self.compute() == self.results}
        self.change()
        self.wanted = self.sums()
        return [what for what, holds in found.items() if not holds]


class Jax(Held):
    """Arrays of JAX, and layers that XLA compiles."""

    NEEDS = "jax"

    def make(self, words: int) -> str:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")
        import jax
        import numpy
        from jax import numpy as jnp

        if jax.default_backend() != "gpu":
            raise common.JobError("this jax uses no GPU: its CUDA plugin is not here")

        def layers(x: Any, weights: Any) -> Any:
            for _ in range(12):
                x = jax.nn.gelu(x @ weights) + x
            return x

        rows = (words // ROW_WORDS, ROW_WORDS)
        self.numpy = numpy
        self.changed = jax.jit(lambda array: array * jnp.uint32(FACTOR) + jnp.uint32(TERM), donate_argnums=0)
        self.summed = jax.jit(lambda array: array.sum(axis=1, dtype=jnp.uint32))
        self.layers = jax.jit(layers)
        made = jax.jit(lambda first: jnp.arange(words, dtype=jnp.uint32).reshape(rows) + first)
        self.arrays = [made(jnp.uint32(number)) for number in range(PARTS)]
        self.x, self.weights = (jax.random.normal(jax.random.key(seed), (1024, 1024)) / 32 for seed in (7, 8))
        return str(jax.__version__)

    def change(self) -> None:
        self.arrays = [self.changed(array) for array in self.arrays]

    def sums(self) -> list[bytes]:
        return [self.numpy.asarray(self.summed(array)).tobytes() for array in self.arrays]

    def compute(self) -> list[bytes]:
        return [self.numpy.asarray(self.layers(self.x, self.weights)).tobytes()]


class CuPy(Held):
    """Arrays of CuPy's pool, a kernel that it compiles, and a graph of that."""

    NEEDS = "cupy"
    KERNEL = r"""
    extern "C" __global__ void change(unsigned* words, unsigned long long count) {
        for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
            words[i] = words[i] * 1664525u + 1013904223u;
    }
    """

    def make(self, words: int) -> str:
        import cupy

        self.cupy = cupy
        self.kernel = cupy.RawKernel(self.KERNEL, "change")
        self.arrays = [cupy.arange(words, dtype=cupy.uint32) + cupy.uint32(number) for number in range(PARTS)]
        self.matrix = cupy.linspace(0, 1, 1 << 20, dtype=cupy.float32).reshape(1024, 1024)
        cupy.cuda.runtime.deviceSynchronize()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream:
            self._launch()  # compiles it
            self.stream.synchronize()
            self.stream.begin_capture()
            self._launch()
            self.graph = self.stream.end_capture()
        return str(cupy.__version__)

    def _launch(self) -> None:
        for array in self.arrays:
            self.kernel((256,), (256,), (array, self.cupy.uint64(array.size)))

    def change(self) -> None:
        self.graph.launch(self.stream)
        self.stream.synchronize()

    def sums(self) -> list[bytes]:
        cupy = self.cupy
        return [cupy.asnumpy(array.reshape(-1, ROW_WORDS).sum(axis=1, dtype=cupy.uint64)).tobytes() for array in self.arrays]

    def compute(self) -> list[bytes]:
        return [self.cupy.asnumpy(self.matrix @ self.matrix).tobytes()]


class Graphs(Held):
    """Tensors of torch and twenty captured graphs: half of them change contents, the others multiply."""

    NEEDS = "torch"

    def make(self, words: int) -> str:
        import torch

        self.torch = torch
        self.arrays = [
            torch.arange(words // 2, device="cuda", dtype=torch.int64).add_(number << 40) for number in range(PARTS)
        ]
        matrix = torch.ones(1024, 1024, device="cuda").cumsum_(0).div_(1024)
        factors = [matrix * (number + 1) for number in range(GRAPHS // 2)]
        torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        self.graphs: list[Any] = []
        self.products: list[Any] = []
        pool = None
        for factor in factors:
            for product in (False, True):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    if product:
                        self.products.append(torch.mm(matrix, factor))
                    else:
                        self.arrays[len(self.products) % PARTS].mul_(FACTOR).add_(TERM)
                pool = pool or graph.pool()
                self.graphs.append(graph)
        return str(torch.__version__)

    def change(self) -> None:
        for graph in self.graphs:
            graph.replay()
        self.torch.cuda.synchronize()

    def sums(self) -> list[bytes]:
        return [array.view(-1, ROW_WORDS // 2).sum(dim=1).cpu().numpy().tobytes() for array in self.arrays]

    def compute(self) -> list[bytes]:
        """What the graphs that multiply have left, once each is replayed into zeros."""
        for product in self.products:
            product.zero_()
        for graph in self.graphs[1::2]:
            graph.replay()
        self.torch.cuda.synchronize()
        return [product.cpu().numpy().tobytes() for product in self.products]


LIBRARIES: dict[str, type[Held]] = {"jax": Jax, "cupy": CuPy, "graphs": Graphs}
