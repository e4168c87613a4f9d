"""What the samples of a race amount to: figures with their limit, what bounds each, and goals.

Everything here is computed from a record: no process is started and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import common
from common import MIB, Result

GB = 1e9
LINK = "the link: a pinned copy of the same run"


@dataclass(frozen=True)
class Figure:
    """A pair of series, and how to read them."""

    panel: str  # `rates` in GB/s, `times` in ms
    key: str  # series are `KEY_pause_s` and `KEY_resume_s`, or as `ways` says
    who: str
    label: str
    bound: str
    #: Series in GB/s that are the limit out and in; for `times` the bytes of `sizes` take as long at that rate. Where
    #: the second of these and of `ways` is empty, one figure holds for each way.
    limit: tuple[str, str] = ("pinned_out_gb_s", "pinned_in_gb_s")
    ways: tuple[str, str] = ("pause_s", "resume_s")
    #: Whose bytes, among `sizes` of the record; the key's own without.
    size: str = ""
    baseline: str = "a plain pinned copy"
    #: The limit is of all GPUs together, and the bytes are of one.
    of_each: bool = False


SUBLET = "Sublet"
TORCH_SAVER = "torch_memory_saver"
FIGURES = (
    Figure("rates", "kept_first", SUBLET, "very first pause", "host memory that is touched and pinned as it goes"),
    Figure("rates", "prepared_first", SUBLET, "first pause, prepared", LINK),
    Figure("rates", "kept_all", SUBLET, "everything rewritten", LINK),
    Figure("rates", "kept_tenth", SUBLET, "a tenth rewritten, in a row", "reading the device once, and a tenth of the link's time"),
    Figure("rates", "kept_scattered", SUBLET, "a tenth rewritten, scattered", "reading the device once, and a tenth of the link's time"),
    Figure("rates", "kept_nothing", SUBLET, "nothing rewritten", "reading the device once, releasing and creating"),
    Figure("rates", "kept_zero", SUBLET, "all zero", "reading the device once, releasing, creating and clearing"),
    Figure("rates", "swap", SUBLET, "swap", "the link, both ways together",
           ("pinned_both_gb_s", ""), ("s", ""), baseline="pinned copies both ways together, each way"),
    Figure("rates", "every", SUBLET, "all GPUs together", "what the links and the host's memory carry together",
           ("pinned_every_out_gb_s", "pinned_every_in_gb_s"), baseline="as many pinned copies together", of_each=True),
    Figure("rates", "saver_sublet", SUBLET, "by tag, resume immediately", LINK),
    Figure("rates", "saver_retained", TORCH_SAVER, "backup retained", LINK, baseline="Sublet, by tag"),
    Figure("rates", "saver_saver", TORCH_SAVER, "as it comes", "pinned memory made at each pause", baseline="Sublet, by tag"),
    Figure("rates", "checkpoint", "driver", "checkpoint of the process", "copies through pageable memory",
           baseline="Sublet, very first pause"),
    Figure("times", "nccl2", SUBLET, "2 communicators", "the driver's calls, which all ranks share, and the link",
           baseline="destroy and rebuild"),
    Figure("times", "nccl2_alone", SUBLET, "2, NCCL's memory alone", "the driver's calls; the processes run on", size="nccl2",
           baseline="destroy and rebuild"),
    Figure("times", "nccl2_rebuild", "NCCL", "2, destroyed and rebuilt", "NCCL's own set-up", ways=("destroy_s", "rebuild_s"),
           size="nccl2", baseline="Sublet, 2 communicators"),
    Figure("times", "nccl2_suspend", "NCCL", "2, ncclCommSuspend and Resume", "NCCL's own exchange of handles",
           ways=("suspend_s", "resume_s"), size="nccl2", baseline="Sublet, 2 communicators"),
    Figure("times", "nccl20", SUBLET, "20 communicators", "the driver's calls, which all ranks share, and the link",
           baseline="destroy and rebuild"),
    Figure("times", "nccl20_alone", SUBLET, "20, NCCL's memory alone", "the driver's calls; the processes run on", size="nccl20",
           baseline="destroy and rebuild"),
    Figure("times", "nccl20_rebuild", "NCCL", "20, destroyed and rebuilt", "NCCL's own set-up", ways=("destroy_s", "rebuild_s"),
           size="nccl20", baseline="Sublet, 20 communicators"),
    Figure("times", "nccl20_suspend", "NCCL", "20, ncclCommSuspend and Resume", "NCCL's own exchange of handles",
           ways=("suspend_s", "resume_s"), size="nccl20", baseline="Sublet, 20 communicators"),
    Figure("times", "legacy2", SUBLET, "2, NCCL_CUMEM_ENABLE=0", "the driver's calls, which all ranks share, and the link",
           baseline="Sublet, 2 communicators"),
    Figure("times", "legacy20", SUBLET, "20, NCCL_CUMEM_ENABLE=0", "the driver's calls, which all ranks share, and the link",
           baseline="Sublet, 20 communicators"),
)  # fmt: skip


def numbers(record: Mapping[str, Any], series: str) -> list[float]:
    """A series of the record; nothing where it has none."""
    return [value for value in record["samples"].get(series, []) if isinstance(value, (int, float))]


def median(record: Mapping[str, Any], series: str) -> float | None:
    return common.summarise(numbers(record, series))["median"]


def figure(record: Mapping[str, Any], what: Figure) -> dict[str, Any] | None:
    """A figure out of the record; None where nothing was measured."""
    size = record.get("sizes", {}).get(what.size or what.key)
    answer: dict[str, Any] = {
        "panel": what.panel,
        "key": what.key,
        "who": what.who,
        "label": what.label,
        "unit": "GB/s" if what.panel == "rates" else "ms",
        "bytes": size,
        "each_way": not what.ways[1],
        "limit": {},
        "baseline": what.baseline,
        "bound": what.bound,
    }
    for way, series, limit in zip(("out", "in"), what.ways, what.limit, strict=True):
        name = f"{what.key}_{series}"
        seconds = numbers(record, name)
        if not series or not seconds or (what.panel == "rates" and not size):
            continue
        if what.panel == "rates":
            values = [size / each / GB for each in seconds]
            # The slowest is what a p99 is about.
            summary = {**common.summarise(values), "p99": common.percentile([-value for value in values], 0.99)}
            summary["p99"] = -(summary["p99"] or 0.0)
        else:
            summary = common.summarise([1000 * each for each in seconds])
        answer[way] = {**summary, "series": name}
        link = median(record, limit)
        if link and what.of_each:
            link /= record.get("parameters", {}).get("gpus") or 1
        if link:
            answer["limit"][way] = link if what.panel == "rates" else (size or 0) / link / GB * 1000
    return answer if "out" in answer or "in" in answer else None


def figures(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All that the record has samples for."""
    found = (figure(record, what) for what in FIGURES)
    return [each for each in found if each is not None]


# ---------------------------------------------------------------- goals


def goals(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the project wants of itself, and whether this run has it. No check: a run that misses one is a good run."""
    by_key = {each["key"]: each for each in figures(record)}
    answer: list[dict[str, Any]] = []

    def of(key: str, way: str) -> float | None:
        value = by_key.get(key, {}).get(way, {}).get("median")
        return float(value) if value is not None else None

    def limit(key: str, way: str) -> float | None:
        value = by_key.get(key, {}).get("limit", {}).get(way)
        return float(value) if value is not None else None

    def add(what: str, value: float | None, least: float | None, unit: str) -> None:
        if value is not None and least is not None:
            answer.append({"what": what, "reached": value >= least, "detail": f"{value:.1f}, wanted {least:.1f} {unit}"})

    def times(factor: float, value: float | None) -> float | None:
        return None if value is None else factor * value

    for way in ("out", "in"):
        for key, name in (("kept_all", "everything rewritten"), ("every", "all GPUs together")):
            add(f"{name}, {way}: 95 % of the pinned copy", of(key, way), times(0.95, limit(key, way)), "GB/s")
        for key, name in (("kept_nothing", "nothing rewritten"), ("kept_zero", "all zero")):
            add(f"{name}, {way}: 10 times as fast as copying", of(key, way), times(10, of("kept_all", way)), "GB/s")
        for key in ("kept_tenth", "kept_scattered"):
            least = times(10 / 1.3, of("kept_all", way))
            add(f"{key.removeprefix('kept_')}, {way}: within 1.3 of copying a tenth", of(key, way), least, "GB/s")
        least = of("saver_retained", way)
        add(f"by tag, {way}: as fast as torch_memory_saver's best mode", of("saver_sublet", way), least, "GB/s")
    add("swap: 90 % of both ways together", of("swap", "out"), times(0.9, limit("swap", "out")), "GB/s each way")
    add("first pause, prepared: 50 % of the pinned copy", of("prepared_first", "out"), times(0.5, limit("prepared_first", "out")), "GB/s")
    gpus = record.get("parameters", {}).get("gpus")
    for key, most_ms in (("nccl2", {2: 60.0, 4: 250.0}), ("nccl20", {2: 350.0})):
        ours = [of(key, way) for way in ("out", "in")]
        if gpus in most_ms and None not in ours:
            both, most = sum(each or 0.0 for each in ours), most_ms[gpus]
            detail = f"{both:.0f}, wanted {most:.0f} ms"
            answer.append({"what": f"{key}: pause and resume together", "reached": both <= most, "detail": detail})
    return answer


# ---------------------------------------------------------------- what the command said


def reports(told: Any) -> list[dict[str, Any]]:
    """The reports in what the command printed, in order, however deep they lie."""
    if isinstance(told, dict):
        if isinstance(told.get("phases"), list) and "wall_us" in told:
            return [told]
        return [report for value in told.values() for report in reports(value)]
    if isinstance(told, list):
        return [report for value in told for report in reports(value)]
    return []


# ---------------------------------------------------------------- the end


def finish(result: Result) -> None:
    """Adds figures, goals and the summary to the record, and prints them."""
    data = result.data
    data["figures"], data["goals"] = figures(data), goals(data)
    for each in data["figures"]:
        for way in ("out", "in"):
            if way in each:
                data["summary"][f"{each['key']}_{way}_{each['unit'].replace('/', '_').lower()}"] = each[way]
    held = numbers(data, "nccl20_host_mib") or numbers(data, "nccl2_host_mib")
    if held:
        data["summary"]["nccl_host_mib_per_rank"] = max(held)


def rows(data: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table of the figures."""
    table: list[tuple[str, ...]] = [("who", "what", "out", "p99", "in", "p99", "unit", "limit", "of")]
    for each in data["figures"]:
        cells: list[str] = []
        for way in ("out", "in"):
            summary = each.get(way)
            cells += [f"{summary['median']:.1f}", f"{summary['p99']:.1f}"] if summary else ["-", "-"]
        limits = " ".join(f"{value:.0f}" for value in each["limit"].values()) or "-"
        size = f"{each['bytes'] / MIB:,.0f} MiB" if each["bytes"] else "-"
        table.append((each["who"], each["label"], *cells, each["unit"], limits, size))
    return table
