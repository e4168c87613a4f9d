"""CuPy with arrays that come and go in its memory pool, on all GPUs of one process.

    POOL=async python3 programs/cupy_pools.py --steps 500

POOL chooses CuPy's own pool (default) or the driver's stream-ordered one (async). Some arrays live for many steps; the
values are whole numbers, so that every step's sum is exact.
"""

from __future__ import annotations

import os

import cupy
import numpy
from steps import Steps

#: Arrays that live, and the words of the largest.
LIVING, WORDS_MAX = 24, 1 << 20
KERNEL = r"""
extern "C" __global__ void mix(unsigned* words, unsigned mul, unsigned add, unsigned long long count) {
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        words[i] = words[i] * mul + add + (unsigned)i;
}
"""


class Arrays:
    """What lives on one device."""

    def __init__(self, device: int, seed: int) -> None:
        self.device, self.random = device, numpy.random.default_rng(seed)
        with cupy.cuda.Device(device):
            self.mix = cupy.RawKernel(KERNEL, "mix")
            self.living = [self.make() for _ in range(LIVING)]

    def make(self) -> cupy.ndarray:
        """An array of a size of its own."""
        count = int(self.random.integers(1, WORDS_MAX))
        return cupy.full(count, int(self.random.integers(1 << 31)), dtype=cupy.uint32)

    def step(self, number: int) -> int:
        """Two arrays go and come, all change, and the sum of some is read."""
        with cupy.cuda.Device(self.device):
            for _ in range(2):
                index = int(self.random.integers(LIVING))
                self.living[index] = None  # given back to the pool first
                self.living[index] = self.make()
            for array in self.living:
                self.mix((64,), (256,), (array, numpy.uint32(2 * number + 3), numpy.uint32(number), numpy.uint64(array.size)))
            product = (self.living[0][:1024].astype(cupy.int64) % 1000).reshape(-1, 1)
            total = (product * product.reshape(1, -1)).sum()
            for array in self.living[: LIVING // 4]:
                total = total + array.sum(dtype=cupy.uint64).astype(cupy.int64)
            return int(total)

    def digest(self) -> int:
        """The sum of everything."""
        with cupy.cuda.Device(self.device):
            return sum(int(array.sum(dtype=cupy.uint64)) for array in self.living)


def main() -> None:
    steps = Steps(__doc__)
    count = steps.args.devices or cupy.cuda.runtime.getDeviceCount()
    if os.environ.get("POOL") == "async":
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    else:
        cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)
    devices = [Arrays(device, device) for device in range(count)]
    steps.run(
        lambda number: f"{sum(arrays.step(number) for arrays in devices):x}",
        lambda: "\n".join(f"words {arrays.digest():x}" for arrays in devices),
    )


if __name__ == "__main__":
    main()
