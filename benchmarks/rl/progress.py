"""How far a run is: a bar where tqdm is installed and somebody looks, else a line a step."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


class Progress:
    """Of one mode's steps."""

    def __init__(self, mode: str, steps: int) -> None:
        self._mode, self._steps, self._done = mode, steps, 0
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=steps, desc=mode, unit="step")

    def step(self, reward: float | None, lost_share: float) -> None:
        """One more is done."""
        self._done += 1
        text = f"reward {'-' if reward is None else format(reward, '.4f')}, lost {100 * lost_share:.1f} % to switching"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
            self._bar.update()
        else:
            print(f"{self._mode}: step {self._done} of {self._steps}, {text}", flush=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()
