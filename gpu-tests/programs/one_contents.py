"""One process with memory of each contents policy on all GPUs: kept, discarded, in a file.

    python3 programs/one_contents.py --steps 500

The regions are there when libsublet.so is; without it all memory is the same. What may be lost is written again before
it is read. Copies go around all devices, with whatever context is current, and memory comes and goes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from rawcuda import WORD_MASK, Driver
from steps import Steps

POLICIES = {"kept": 0, "discarded": 1, "filed": 2}
#: Words of a buffer, times the width.
WORDS_BY_WIDTH = 1 << 14
#: Words that the host looks at in every step; all of them at the end.
SEEN_WORDS = 1 << 12


@contextlib.contextmanager
def region(tag: str) -> Iterator[None]:
    """Memory that is allocated inside belongs to `tag`, under Sublet."""
    library = ctypes.CDLL(None)
    begin, end = (getattr(library, name, None) for name in ("sublet_region_begin", "sublet_region_end"))
    is_open = begin is not None and begin(tag.encode(), POLICIES[tag]) == 0
    try:
        yield
    finally:
        if is_open:
            end()


class AllDevices:
    def __init__(self, steps: Steps) -> None:
        self.driver = Driver()
        self.words = steps.args.width * WORDS_BY_WIDTH
        self.devices = range(steps.args.devices or self.driver.device_count())
        self.places: dict[tuple[int, str], int] = {}
        self.values: dict[tuple[int, str], int] = {}
        self.streams = []
        for device in self.devices:
            self.driver.use(device)
            self.streams.append(self.driver.stream())
            for tag in POLICIES:
                with region(tag):
                    self.places[device, tag] = self.driver.allocate(4 * self.words)
                self.set(device, tag, 1000 * device + len(tag))

    def set(self, device: int, tag: str, value: int) -> None:
        """Fills a buffer."""
        self.driver.fill(self.places[device, tag], value, self.words, self.streams[device])
        self.values[device, tag] = value & WORD_MASK

    def work(self, device: int, tag: str, factors: tuple[int, int]) -> None:
        """A kernel on a buffer."""
        self.driver.affine(device, self.places[device, tag], factors, self.words, self.streams[device])
        self.values[device, tag] = (self.values[device, tag] * factors[0] + factors[1]) & WORD_MASK

    def step(self, number: int) -> str:
        """Work on all that is not lost, a copy around the devices, and memory that comes and goes."""
        for device in self.devices:
            self.driver.use((device + number) % len(self.devices))
            self.work(device, "kept", (3, number + device))
            self.work(device, "filed", (5, number))
        for stream in self.streams:
            self.driver.wait(stream)
        source = number % len(self.devices)
        target = (source + 1) % len(self.devices)
        places = (self.places[target, "filed"], self.places[source, "kept"])
        self.driver.copy(*places, self.words, self.streams[source])
        self.values[target, "filed"] = self.values[source, "kept"]
        passing = self.driver.allocate(8 << 20)
        self.driver.wait(self.streams[source])
        self.driver.use(target)
        self.driver.free(passing)
        for (device, tag), value in self.values.items():
            if tag != "discarded":
                self.driver.use(device)
                what = f"step {number}, device {device}, {tag}"
                self.driver.expect(what, self.places[device, tag], value, SEEN_WORDS, self.streams[device])
        return f"{sum(self.values.values()):x}"

    def finish(self) -> str:
        """Every word of all buffers."""
        for (device, tag), value in list(self.values.items()):
            self.driver.use(device)
            if tag == "discarded":
                self.set(device, tag, value)
            what = f"the end, device {device}, {tag}"
            self.driver.expect(what, self.places[device, tag], value, self.words, self.streams[device])
        return f"devices {len(self.devices)}"


def main() -> None:
    steps = Steps(__doc__)
    everything = AllDevices(steps)
    steps.run(everything.step, everything.finish)


if __name__ == "__main__":
    main()
