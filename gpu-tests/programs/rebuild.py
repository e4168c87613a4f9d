"""Communicators that end and are made again all the time, on ranks that are not in step: raw NCCL by ctypes.

    python3 launch.py 2 programs/rebuild.py --steps 500

Each rank has two communicators and sums over both in every step, and knows the sums. Every 20th step one of them ends,
by ncclCommAbort or by ncclCommFinalize and ncclCommDestroy in turn, each rank after a sleep of its own, and is made
again.
"""

from __future__ import annotations

import os
import random
import time

from rawcuda import Driver, Nccl
from steps import Steps

COMMUNICATORS = 2
EVERY = 20
#: Sleeps of a rank around the end of a communicator.
SLEEP_MAX_S = 0.02


class Rank:
    def __init__(self, steps: Steps) -> None:
        self.steps, self.rank, self.world = steps, steps.rank, steps.world
        self.driver, self.nccl = Driver(), Nccl()
        self.driver.use(int(os.environ.get("LOCAL_RANK", "0")))
        self.random = random.Random(self.rank)
        self.made = 0
        #: Words of the sums, by turns.
        self.words = (64, 1 << 14, steps.args.width << 9)
        room = 4 * max(self.words)
        self.streams = [self.driver.stream() for _ in range(COMMUNICATORS)]
        self.sources = [self.driver.allocate(room) for _ in range(COMMUNICATORS)]
        self.targets = [self.driver.allocate(room) for _ in range(COMMUNICATORS)]
        self.comms = [self.new_communicator() for _ in range(COMMUNICATORS)]

    def new_communicator(self):
        """The next one of all ranks, which make theirs in the same order."""
        name = f"id-{self.made}"
        self.made += 1
        if self.rank == 0:
            self.steps.tell(name, self.nccl.unique_id())
        return self.nccl.join(self.steps.hear(name), self.rank, self.world)

    def sleep(self) -> None:
        """So that the ranks are at different places."""
        time.sleep(self.random.uniform(0, SLEEP_MAX_S))

    def step(self, number: int) -> str:
        """Both sums, checked; now and then a communicator ends."""
        words = self.words[number % len(self.words)]
        wanted = []
        for which, comm in enumerate(self.comms):
            values = [number * 2654435761 + rank * 40503 + which * 97 for rank in range(self.world)]
            wanted.append(sum(values))
            self.driver.fill(self.sources[which], values[self.rank], words, self.streams[which])
            self.nccl.all_reduce(self.sources[which], self.targets[which], words, comm, self.streams[which])
        for which, value in enumerate(wanted):
            what = f"step {number}, rank {self.rank}, communicator {which}"
            self.driver.expect(what, self.targets[which], value, words, self.streams[which])
        if number % EVERY == EVERY - 1:
            self.rebuild(number // EVERY)
        return f"{sum(wanted):x}"

    def rebuild(self, count: int) -> None:
        """Ends a communicator in one of two ways, and makes it again."""
        which = count // 2 % COMMUNICATORS
        self.sleep()
        if count % 2 == 0:
            self.nccl.call("ncclCommAbort", self.comms[which])
        else:
            self.nccl.call("ncclCommFinalize", self.comms[which])
            self.sleep()
            self.nccl.call("ncclCommDestroy", self.comms[which])
        self.sleep()
        self.comms[which] = self.new_communicator()

    def finish(self) -> str:
        """The end of both communicators."""
        for comm in self.comms:
            self.nccl.call("ncclCommDestroy", comm)
        return f"communicators {self.made}"


def main() -> None:
    steps = Steps(__doc__)
    rank = Rank(steps)
    steps.run(rank.step, rank.finish)


if __name__ == "__main__":
    main()
