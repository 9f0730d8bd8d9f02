"""Sample of ``ssdkv top`` where the page is a node's: its state, and rates between two scrapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vllm_ssdkv.base.metrics import BY_NAME
from vllm_ssdkv.cli.monitor.metrics_sample import DeviceSample, device_samples, exposed
from vllm_ssdkv.cli.monitor.metrics_scrape import Scrape, gained

NODE_TROUBLES: Final = (
    "checksum_failures",
    "slots_dropped",
    "io_deadline_exceeded",
    "journal_errors",
)
"""Counters of which any number above 0 is worth a look, beside refusals."""

_EXPECTED: Final = "closing"
"""Cause of refusals and ends of sessions when the node itself ends."""


def is_node(scrape: Scrape) -> bool:
    """Check whether a page is a node's, and not an engine's."""
    return exposed("node_stores") in scrape.samples


@dataclass(frozen=True, slots=True)
class StoreSample:
    """One store of a node, all ranks together.

    Attributes:
        model: As vLLM was started with.
        store: Name of its directory below each device.
        dram_frames_dirty: Frames not yet on an SSD.
    """

    model: str
    store: str
    slots: int
    slots_ready: int
    slots_free: int
    slots_pinned: int
    dram_frames: int
    dram_frames_used: int
    dram_frames_dirty: int


@dataclass(frozen=True, slots=True)
class NodeSample:
    """A node.

    Attributes:
        time: Seconds since 1970, when the later scrape was there.
        seconds: Between the two scrapes; every rate is a mean over this time.
        sessions: Halves of engines, and askers, by role; each engine has one ``scheduler``.
        pins: Slots that sessions have pinned.
        claims: Slots that engines have claimed and that are not written yet.
        calls_per_s: By name, without those that nobody made.
        bytes_per_s: Of blocks, ``saved`` by engines and ``loaded`` by them.
        bytes_since_start: The same, since the node started.
        refusals: Connections refused since the start, by cause, without those of the node's end.
        sessions_ended: Since the start, by cause.
        pins_released: Pins undone since the start, because their session ended.
        troubles: Counters of :data:`NODE_TROUBLES`, since the start.
        devices: Each store's place on each SSD.
    """

    time: float
    seconds: float
    url: str
    sessions: dict[str, int]
    pins: int
    claims: int
    calls_per_s: dict[str, float]
    bytes_per_s: dict[str, float]
    bytes_since_start: dict[str, int]
    refusals: dict[str, int]
    sessions_ended: dict[str, int]
    pins_released: int
    troubles: dict[str, int]
    stores: tuple[StoreSample, ...]
    devices: tuple[DeviceSample, ...]


def compare_node(older: Scrape, newer: Scrape, url: str, now: float) -> NodeSample:
    """Compare two scrapes of a node's page, the newer one made later.

    Args:
        url: Of the page.
        now: Seconds since 1970.
    """
    seconds = newer.at - older.at

    def rates(name: str) -> dict[str, float]:
        label = BY_NAME[name].labels[0]
        return {
            value: gained(older, newer, exposed(name), **{label.name: value}) / seconds
            for value in label.values
        }

    def since_start(name: str) -> dict[str, int]:
        label = BY_NAME[name].labels[0]
        return {
            value: round(newer.total(exposed(name), **{label.name: value}))
            for value in label.values
        }

    return NodeSample(
        time=now,
        seconds=seconds,
        url=url,
        sessions=since_start("node_sessions"),
        pins=round(newer.total(exposed("node_pins"))),
        claims=round(newer.total(exposed("node_claims"))),
        calls_per_s={call: rate for call, rate in rates("node_calls").items() if rate},
        bytes_per_s=rates("node_bytes"),
        bytes_since_start=since_start("node_bytes"),
        refusals={
            cause: count
            for cause, count in since_start("node_refusals").items()
            if count and cause != _EXPECTED
        },
        sessions_ended=since_start("node_sessions_ended"),
        pins_released=round(newer.total(exposed("node_pins_released"))),
        troubles={name: round(newer.total(exposed(name))) for name in NODE_TROUBLES},
        stores=tuple(_store(newer, *of) for of in _stores(newer)),
        devices=device_samples(older, newer),
    )


def _stores(scrape: Scrape) -> list[tuple[str, str]]:
    """Model and directory of each store, in order."""
    shown = scrape.series(exposed("slots"))
    return sorted({(labels.get("model_name", ""), labels.get("store", "")) for labels, _ in shown})


def _store(scrape: Scrape, model: str, store: str) -> StoreSample:
    def now_of(name: str) -> int:
        return round(scrape.total(exposed(name), model_name=model, store=store))

    return StoreSample(
        model=model,
        store=store,
        slots=now_of("slots"),
        slots_ready=now_of("slots_ready"),
        slots_free=now_of("slots_free"),
        slots_pinned=now_of("slots_pinned"),
        dram_frames=now_of("dram_frames"),
        dram_frames_used=now_of("dram_frames_used"),
        dram_frames_dirty=now_of("dram_frames_dirty"),
    )
