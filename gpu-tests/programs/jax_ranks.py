"""JAX training by a process for each GPU: the batch is split over all processes' devices.

    MASTER_PORT=29500 python3 launch.py 2 programs/jax_ranks.py --steps 500
"""

from __future__ import annotations

import os

import jax
import numpy
from jax.sharding import NamedSharding
from one_jax import Training
from steps import Steps


class Part(Training):
    """What one process has: its own device's weights and its rows of each batch."""

    def put(self, host: numpy.ndarray, sharding: NamedSharding) -> jax.Array:
        """Every process has all numbers, and gives its own devices theirs."""
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def main() -> None:
    steps = Steps(__doc__)
    # Each process sees all GPUs and uses its own.
    jax.distributed.initialize(
        coordinator_address=f"127.0.0.1:{os.environ['MASTER_PORT']}",
        num_processes=steps.world,
        process_id=steps.rank,
        local_device_ids=[steps.rank],
    )
    training = Part(steps)
    steps.run(training.step, training.finish)


if __name__ == "__main__":
    main()
