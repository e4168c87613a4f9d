"""One process and one thread with all GPUs: ncclCommInitAll, and all-reduces of all devices in one group.

    python3 programs/one_nccl.py --steps 500

A step is a chain of all-reduces with a kernel on each device between them; the host knows what must come out.
"""

from __future__ import annotations

from rawcuda import WORD_MASK, Driver, Nccl
from steps import Steps, program_failed

CHAIN = 6
WORDS = 1 << 18


class AllDevices:
    def __init__(self, steps: Steps) -> None:
        self.driver, self.nccl = Driver(), Nccl()
        self.devices = range(steps.args.devices or self.driver.device_count())
        if len(self.devices) < 2:
            program_failed("this program needs two devices")
        self.streams, self.sources, self.targets = [], [], []
        for device in self.devices:
            self.driver.use(device)
            self.streams.append(self.driver.stream())
            self.sources.append(self.driver.allocate(4 * WORDS))
            self.targets.append(self.driver.allocate(4 * WORDS))
        self.comms = self.nccl.all_of(len(self.devices))

    def all_reduce(self) -> None:
        """One group over all devices."""
        self.nccl.call("ncclGroupStart")
        for device in self.devices:
            places = (self.sources[device], self.targets[device])
            self.nccl.all_reduce(*places, WORDS, self.comms[device], self.streams[device])
        self.nccl.call("ncclGroupEnd")

    def step(self, number: int) -> str:
        """A chain, checked on every device."""
        values = [number * 2654435761 + device for device in self.devices]
        for device in self.devices:
            self.driver.use(device)
            self.driver.fill(self.sources[device], values[device], WORDS, self.streams[device])
        for link in range(CHAIN):
            self.all_reduce()
            total = sum(values)
            for device in self.devices:
                factors = (2 * link + 3, number + device)
                self.driver.use(device)
                self.driver.affine(device, self.targets[device], factors, WORDS, self.streams[device])
                values[device] = (total * factors[0] + factors[1]) & WORD_MASK
            self.sources, self.targets = self.targets, self.sources
        for device in self.devices:
            self.driver.use(device)
            what = f"step {number}, device {device}"
            self.driver.expect(what, self.sources[device], values[device], WORDS, self.streams[device])
        return f"{sum(values):x}"

    def finish(self) -> str:
        """The end of all communicators."""
        self.nccl.call("ncclGroupStart")
        for comm in self.comms:
            self.nccl.call("ncclCommDestroy", comm)
        self.nccl.call("ncclGroupEnd")
        return f"devices {len(self.devices)}"


def main() -> None:
    steps = Steps(__doc__)
    everything = AllDevices(steps)
    steps.run(everything.step, everything.finish)


if __name__ == "__main__":
    main()
