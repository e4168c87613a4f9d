"""A pause of the trainer that goes on while the generator works."""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

from rl_grpo.problem import Problem


class Leaving:
    """One call in a thread of its own, begun at once."""

    def __init__(self, call: Callable[[], Any], clock: Callable[[], float]) -> None:
        self._call, self._clock = call, clock
        self._told: Any = None
        self._error: Optional[Exception] = None
        self.begin_s, self.end_s = clock(), 0.0
        self._thread = threading.Thread(target=self._run, name="leaving", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._told = self._call()
        except Exception as error:
            self._error = error
        finally:
            self.end_s = self._clock()

    def wait(self, timeout_s: float) -> bool:
        """Whether the call has come to its end, well or not."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def told(self, timeout_s: float) -> Any:
        """What the call has returned; raises what it has raised, and Problem where it has not ended in time."""
        if not self.wait(timeout_s):
            raise Problem(
                f"the pause of tenant 'train' that went on beside the generator has not ended {timeout_s:.0f} s after the generator had: "
                "`sublet stats` says how its processes stand; --overlap off pauses it before"
            )
        if self._error is not None:
            raise self._error
        return self._told
