"""Does NCCL's memory come through pauses at random instants, with every handle, address and byte, on one GPU?

Two processes, or four, make, share, use and end 20 communicators by the driver calls that were recorded of NCCL 2.28.9, all
on one GPU and without NCCL (programs/replay.c). A row runs once plain, and once or more under `sublet run`, where the real
command pauses and resumes it `--pauses` times at instants of a seed, also while calls are under way. After each step
every word, handle and address is compared.

Bound: 34 GiB. A resume takes their time over the link, some 0.7 s, and that of the driver's calls; a pause saves what changed.
The first pause takes 34 GiB of host memory.
"""

from __future__ import annotations

from strangers_job import Row, Strangers, usual
from suite import main

#: A step ends and makes a communicator, with some 3,000 calls.
TIMES = {"warm_steps": 2, "active_ms": 250.0, "patience_s": 90.0}


def processes(ranks: int) -> Row:
    """A row of programs/replay.py."""
    return Row(f"{ranks} processes", "replay", "launch", (), gpus_max=1, ranks=ranks, **TIMES)


ROWS = (processes(2), processes(4))


if __name__ == "__main__":
    main(usual(__doc__, 100, 280.0), "replay", lambda *given: Strangers(ROWS, *given).run())
