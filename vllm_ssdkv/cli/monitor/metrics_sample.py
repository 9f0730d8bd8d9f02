"""Sample of ``ssdkv top``: a server's state, and its rates between two scrapes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_ssdkv.base.metrics import BY_NAME
from vllm_ssdkv.cli.monitor.metrics_scrape import Scrape, gained, mean_gained

_DAY_S: Final = 86_400
_YEAR_S: Final = 365 * _DAY_S

TROUBLES: Final = (
    "load_failures",
    "recomputed_requests",
    "checksum_failures",
    "slots_dropped",
    "io_deadline_exceeded",
    "journal_errors",
    "node_sessions_lost",
    "node_call_failures",
)
"""Counters of which any number above 0 is worth a look."""


def exposed(name: str) -> str:
    """Name on the page. A name that is not declared is an error, not an empty column."""
    return BY_NAME[name].exposed_name


def _theirs(name: str) -> str:
    return f"vllm:{name}"


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One SSD, all engines and ranks together.

    Attributes:
        in_service: False once any rank has taken it out; None where nothing says so.
        share: Share of what is stored now; the mean of several engines.
        read_latency_s: Mean time of a read in the device; None without reads. Likewise writes.
        queue_depth: Mean of the requests that the device had when one more was given to it.
        errors: Failed requests since the engine started.
        new_errors: Those of this sample's time.
        years_left: Years until its endurance (``tbw``) is used up at this rate of writing; None
            where no rating is known or nothing is written.
    """

    device: str
    in_service: bool | None
    share: float | None
    read_bytes_per_s: float
    written_bytes_per_s: float
    reads_per_s: float
    writes_per_s: float
    read_latency_s: float | None
    write_latency_s: float | None
    queue_depth: float | None
    errors: int
    new_errors: int
    years_left: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """A server, all its engines together.

    Attributes:
        time: Seconds since 1970, when the later scrape was there.
        seconds: Between the two scrapes; every rate is a mean over this time.
        in_force: Mode, I/O engine and selector of the engines.
        prompt_tokens_per_s: Of prompts, restored ones included.
        hit_rate: Share of the prompt tokens asked of the store that it had, computed all the same
            or not; None without any.
        hit_rate_since_start: The same, since the server started.
        restored_tokens: Since the start, by tier.
        context_pages_per_s: Pages of context brought in, by tier (mode page).
        hbm_used: Share of vLLM's own KV cache, mean of the engines.
        node_answers: Whether the node answers all engines that use one; None where none does.
        troubles: Counters of :data:`TROUBLES`, since the start.
        seconds_saved: Estimated time to first token that the store saved since the start, less the
            time by which loads took longer.
        written_bytes_per_day: Bytes that a day at the rate of this sample writes to all devices.
        worst_years_left: Years after which the first drive has used up its endurance (``tbw``), at
            the rate of this sample; None where no rating is known or nothing is written.
    """

    time: float
    seconds: float
    url: str
    models: tuple[str, ...]
    in_force: tuple[str, ...]
    requests_running: int
    requests_waiting: int
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    hit_rate: float | None
    hit_rate_since_start: float | None
    restored_tokens: dict[str, int]
    restored_tokens_per_s: dict[str, float]
    context_pages_per_s: dict[str, float]
    hbm_used: float | None
    node_answers: bool | None
    slots: int
    slots_to_come: int
    slots_ready: int
    slots_free: int
    slots_pinned: int
    slots_retained: int
    dram_frames: int
    dram_frames_used: int
    dram_frames_dirty: int
    troubles: dict[str, int]
    seconds_saved: float
    written_bytes_per_day: float
    worst_years_left: float | None
    devices: tuple[DeviceSample, ...]


def compare(older: Scrape, newer: Scrape, url: str, now: float) -> Sample:
    """Compare two scrapes of a page, the newer one made later.

    Args:
        url: Of the page.
        now: Seconds since 1970.
    """
    seconds = newer.at - older.at

    def rate(name: str, **labels: str) -> float:
        return gained(older, newer, name, **labels) / seconds

    def by_tier(name: str) -> dict[str, float]:
        return {tier: rate(exposed(name), tier=tier) for tier in BY_NAME[name].labels[0].values}

    def now_of(name: str) -> int:
        return round(newer.total(exposed(name)))

    queries = _theirs("external_prefix_cache_queries_total")
    found = (_theirs("external_prefix_cache_hits_total"), exposed("hit_tokens_computed"))
    infos = [labels for labels, _ in newer.series(exposed("info"))]
    devices = device_samples(older, newer)
    return Sample(
        time=now,
        seconds=seconds,
        url=url,
        models=_names(labels.get("model_name", "") for labels in infos),
        in_force=_names(
            ", ".join(labels.get(label.name, "") for label in BY_NAME["info"].labels)
            for labels in infos
        ),
        requests_running=round(newer.total(_theirs("num_requests_running"))),
        requests_waiting=round(newer.total(_theirs("num_requests_waiting"))),
        prompt_tokens_per_s=rate(_theirs("prompt_tokens_total")),
        generation_tokens_per_s=rate(_theirs("generation_tokens_total")),
        hit_rate=_share(
            sum(gained(older, newer, name) for name in found), gained(older, newer, queries)
        ),
        hit_rate_since_start=_share(sum(map(newer.total, found)), newer.total(queries)),
        restored_tokens={
            tier: round(newer.total(exposed("hit_tokens"), tier=tier))
            for tier in BY_NAME["hit_tokens"].labels[0].values
        },
        restored_tokens_per_s=by_tier("hit_tokens"),
        context_pages_per_s=by_tier("context_pages_streamed"),
        hbm_used=_mean(newer.values(_theirs("kv_cache_usage_perc"))),
        node_answers=all_one(newer, "node_connected"),
        slots=now_of("slots"),
        slots_to_come=now_of("slots_to_come"),
        slots_ready=now_of("slots_ready"),
        slots_free=now_of("slots_free"),
        slots_pinned=now_of("slots_pinned"),
        slots_retained=now_of("slots_retained"),
        dram_frames=now_of("dram_frames"),
        dram_frames_used=now_of("dram_frames_used"),
        dram_frames_dirty=now_of("dram_frames_dirty"),
        troubles={name: now_of(name) for name in TROUBLES},
        seconds_saved=newer.total(exposed("seconds_saved")) - newer.total(exposed("seconds_lost")),
        written_bytes_per_day=_DAY_S * sum(device.written_bytes_per_s for device in devices),
        worst_years_left=min(
            (device.years_left for device in devices if device.years_left is not None), default=None
        ),
        devices=devices,
    )


def _names(found: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for name in found if name}))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def all_one(scrape: Scrape, name: str, **labels: str) -> bool | None:
    """Check whether a gauge of ours is 1 wherever it is shown; None where it is not."""
    states = scrape.values(exposed(name), **labels)
    return bool(min(states)) if states else None


def device_samples(older: Scrape, newer: Scrape) -> tuple[DeviceSample, ...]:
    """All devices of a page, by path."""
    return tuple(_device(older, newer, device) for device in _devices(newer))


def _devices(scrape: Scrape) -> list[str]:
    """All that have a state, or have moved a byte."""
    names = [exposed(name) for name in ("device_state", "bytes_read", "bytes_written")]
    found = {labels.get("device", "") for name in names for labels, _ in scrape.series(name)}
    return sorted(found - {""})


def _device(older: Scrape, newer: Scrape, device: str) -> DeviceSample:
    seconds = newer.at - older.at

    def rate(name: str, **labels: str) -> float:
        return gained(older, newer, exposed(name), device=device, **labels) / seconds

    latency = BY_NAME["io_latency_seconds"].full_name
    return DeviceSample(
        device=device,
        in_service=all_one(newer, "device_state", device=device),
        share=_mean(newer.values(exposed("device_share"), device=device)),
        read_bytes_per_s=rate("bytes_read"),
        written_bytes_per_s=rate("bytes_written"),
        reads_per_s=rate("io_requests", direction="read"),
        writes_per_s=rate("io_requests", direction="write"),
        read_latency_s=mean_gained(older, newer, latency, device=device, direction="read"),
        write_latency_s=mean_gained(older, newer, latency, device=device, direction="write"),
        queue_depth=mean_gained(older, newer, BY_NAME["io_queue_depth"].full_name, device=device),
        errors=round(newer.total(exposed("io_errors"), device=device)),
        new_errors=round(gained(older, newer, exposed("io_errors"), device=device)),
        years_left=_years_left(newer, device, rate("bytes_written")),
    )


def _years_left(newer: Scrape, device: str, bytes_per_s: float) -> float | None:
    used = newer.total(exposed("wear_used"), device=device)
    if not used or not bytes_per_s:
        return None
    written = newer.total(exposed("wear_bytes"), device=device)
    return max(0.0, written / used - written) / bytes_per_s / _YEAR_S
