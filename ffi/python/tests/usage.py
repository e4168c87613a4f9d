"""How typed programs use the package. Never run: mypy says whether a user's types come out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import sublet
import sublet.ray
import sublet.trl
from sublet.compat import verl

if TYPE_CHECKING:
    from typing_extensions import assert_type


@sublet.region("weights")
def load(path: str, *, layers: int = 1) -> list[str]:
    """Keeps its own signature in a region."""
    return [path] * layers


def use() -> None:
    """Every public name, as a user writes it."""
    assert_type(load("a", layers=2), list[str])
    with sublet.region("kv", contents="discard", device=0, all_threads=True) as region:
        assert_type(region, sublet.Region)
    assert_type(sublet.attach("train"), sublet.AttachReport)
    assert_type(sublet.attach("train", family="rl"), sublet.AttachReport)
    assert_type(sublet.attached(), bool)
    with sublet.saved():
        pass
    with sublet.configure_subprocess(tenant="infer"):
        pass
    assert_type(sublet.library_path(), str)
    assert_type(sublet.nccl_library_path(), str)
    assert_type(sublet.pause(deep=True), sublet.Report)
    assert_type(sublet.pause("kv", timeout=2.5).freed_bytes, int)
    assert_type(sublet.resume(("kv", "weights"), wait=5).seconds, float)
    sublet.resume({"kv": 1}.keys(), together=False)
    assert_type(sublet.is_paused(), bool)
    assert_type(sublet.is_paused("kv"), bool)
    with sublet.paused("kv", wait=2) as report:
        assert_type(report, sublet.Report)
    with sublet.Tenant().paused(deep=True) as report:
        assert_type(report.details, dict[str, Any])
    assert_type(sublet.stats(), dict[str, Any])
    assert_type(sublet.tenants(), list[str])
    assert_type(sublet.budget("0=40GiB"), dict[str, Any])
    assert_type(sublet.Tenant("train").budget({0: "40GiB", 1: "none"}), dict[str, Any])
    with sublet.turn(timeout=3) as turn:
        assert_type(turn, sublet.Report)
    train = sublet.Tenant("train")
    assert_type(train.switch(wait=1), sublet.Report)
    assert_type(train.name, str)
    assert_type(train.swap_to("infer", timeout=1, deep=True), sublet.SwapReport)
    assert_type(sublet.swap(train, "infer").resumed, sublet.Report)
    train.swap_to("infer", "kv", in_tags=["weights"])
    sublet.swap(train, "infer", out_tags="kv")


def clusters() -> None:
    """Names that are imported by themselves."""
    assert_type(sublet.ray.env("train", family="rl", budget={0: "1GiB"}), dict[str, Any])
    assert_type(sublet.ray.switch("train", "infer", timeout=5), tuple[sublet.ray.NodeOutcome, ...])
    assert_type(sublet.ray.pause("train", ["kv"]), tuple[sublet.ray.NodeOutcome, ...])
    assert_type(verl.install().replaced, tuple[str, ...])
    turns = sublet.trl.TakeTurns("infer", optimizer=False)
    assert_type(turns, sublet.trl.TakeTurns)
    with turns.away():
        pass


def shortage() -> tuple[Optional[int], list[dict[str, Any]], tuple[str, ...]]:
    """The fields of exceptions."""
    try:
        sublet.resume()
    except sublet.OutOfDeviceMemory as error:
        return error.missing_bytes, error.devices, ()
    except sublet.OutOfHostMemory as error:
        return error.missing_bytes, [], ()
    except sublet.UsageError as error:
        return None, [], error.tags
    except (sublet.RetryError, sublet.RefusedError, sublet.LostError, sublet.Error):
        pass
    return None, [], ()
