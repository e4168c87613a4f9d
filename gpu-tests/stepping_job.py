"""Do kernels that wait for another process, and that nobody counts, come through pauses at random instants?

Two processes with a GPU each map each other's memory by cudaIpc, and their kernels wait for each other there, without
NCCL, as inference engines' own all-reduces and DeepEP's dispatch and combine do (programs/peers.py, peers.cu). One row
a kind: a one-shot sum, a two-shot sum, tokens sent to the other process and back by counters, and a sum by a chain of
small kernels. A row runs once plain, and once or more under `sublet run`, where the real command pauses and resumes it
`--pauses` times at instants of a seed. Every word of every step is checked on the device, and what the host read must be
the same as without pauses. A pause that is refused, or that runs out of time, is a failure.

Bound: a step takes some 0.1 ms. A GPU may wait for a launch that a pause holds back in the other process; the pause then
has to let it through. A pause and a resume take some 0.3 s.
"""

from __future__ import annotations

from strangers_job import Row, Strangers, usual
from suite import main


def kind(name: str, word: str) -> Row:
    """A row of programs/peers.py."""
    return Row(name, "peers", "launch", (), gpus_min=2, env={"KIND": word}, gpus_max=2)


ROWS = (
    kind("one-shot sum", "one_shot"),
    kind("two-shot sum", "two_shot"),
    kind("dispatch and combine", "exchange"),
    kind("a chain of small kernels", "simple"),
)


if __name__ == "__main__":
    main(usual(__doc__, 200, 200.0), "stepping", lambda *given: Strangers(ROWS, *given).run())
