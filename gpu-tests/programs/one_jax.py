"""JAX training on all GPUs by one process: the batch is split over a mesh, XLA adds the gradients with NCCL.

    python3 programs/one_jax.py --steps 500
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

# Memory as it is needed, and the same kernels in every run.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from steps import Steps, not_run

LAYERS, ROWS = 6, 256

Weights = list[dict[str, jax.Array]]


def forward(weights: Weights, x: jax.Array) -> jax.Array:
    """A chain of dense layers."""
    for layer in weights:
        x = jax.nn.gelu(x @ layer["kernel"] + layer["bias"])
    return x


def loss_of(weights: Weights, x: jax.Array) -> jax.Array:
    """How far the chain is from turning each row around."""
    return jnp.mean(jnp.square(forward(weights, x) - x[:, ::-1]))


def update(weights: Weights, x: jax.Array) -> tuple[Weights, jax.Array]:
    """One step of plain gradient descent."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, x)
    return jax.tree.map(lambda weight, gradient: weight - 0.05 * gradient, weights, gradients), loss


def value_of(loss: jax.Array) -> str:
    """A number that every device has, in hexadecimal."""
    return float(numpy.asarray(loss.addressable_shards[0].data)).hex()


class Training:
    """What the process has: weights on every device, batches split over them."""

    def __init__(self, steps: Steps) -> None:
        if Path("/dev/nvidia0").exists() and jax.default_backend() != "gpu":
            not_run("this jax uses no GPU: its CUDA plugin is not here")
        self.width = steps.args.width
        devices = jax.devices()[: steps.args.devices or None]
        mesh = Mesh(numpy.array(devices), ("data",))
        self.rows = NamedSharding(mesh, PartitionSpec("data"))
        whole = NamedSharding(mesh, PartitionSpec())
        self.count = len(devices)
        self.update = jax.jit(update, out_shardings=(whole, whole), donate_argnums=0)
        self.random = numpy.random.default_rng(0)
        scale = numpy.float32(1 / numpy.sqrt(self.width))
        self.weights: Weights = [
            {
                "kernel": self.put(self.numbers(self.width, self.width) * scale, whole),
                "bias": self.put(numpy.zeros(self.width, numpy.float32), whole),
            }
            for _ in range(LAYERS)
        ]
        self.pending: jax.Array | None = None

    def numbers(self, *shape: int) -> numpy.ndarray:
        """Random ones."""
        return self.random.standard_normal(shape, numpy.float32)

    def put(self, host: numpy.ndarray, sharding: NamedSharding) -> jax.Array:
        """Numbers of the host's, on the devices."""
        return jax.device_put(host, sharding)

    def step(self, number: int) -> str:
        """Queues a step, and gives the loss of the one before as a hexadecimal number."""
        self.random = numpy.random.default_rng(number)
        x = self.put(self.numbers(ROWS * self.count, self.width), self.rows)
        self.weights, loss = self.update(self.weights, x)
        before, self.pending = self.pending, loss
        return "" if before is None else value_of(before)

    def finish(self) -> str:
        """The last loss, and a digest of the weights on every device."""
        last = "" if self.pending is None else value_of(self.pending)
        digest = hashlib.sha256()
        for array in jax.tree.leaves(self.weights):
            for shard in array.addressable_shards:
                digest.update(numpy.asarray(shard.data).tobytes())
        return f"{last}\nweights {digest.hexdigest()}"


def main() -> None:
    steps = Steps(__doc__)
    training = Training(steps)
    steps.run(training.step, training.finish)


if __name__ == "__main__":
    main()
