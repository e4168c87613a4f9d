"""How new weights get from the trainer to the generator, seen from the conductor."""

from __future__ import annotations

from pathlib import Path

from rl.problem import Problem
from rl.teams import Team


def by_ipc(train: Team, infer: Team) -> int:
    """Bucket by bucket: each trainer process fills one, the generator on its GPU opens it, copies and closes it. Returns
    how many it took. `end_ipc` ends it."""
    buckets = 0
    while True:
        lent = train.ask("lend", index=buckets)
        if lent[0] is None:
            break
        infer.ask("borrow", each=lent)
        buckets += 1
    return buckets


def end_ipc(train: Team) -> None:
    """The trainer gives its bucket back."""
    train.ask("lent")


def from_host(train: Team, infer: Team, path: Path, away: bool) -> int:
    """By a file in memory. With `away`, its bytes are those that the pause of the trainer has saved: the weights of both
    are never on the device together. Returns its size in bytes."""
    (size_bytes,) = train.ask("write", ranks=[0], path=str(path), away=away)
    infer.ask("load", path=str(path))
    return int(size_bytes)


def check(given: list[str], found: list[str], step: int) -> None:
    """The generator must have, byte for byte, what the trainer had."""
    if len({*given, *found}) != 1:
        raise Problem(f"step {step}: the generator generated with other weights than the trainer's: {given} and {found}")
