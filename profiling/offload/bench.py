"""Cases of ``ssdkv lab bench offload``: who attends, on how many drives, how often is written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch

from vllm_ssdkv.config.offload import DriveProfile
from vllm_ssdkv.config.selectors import SelectorName
from vllm_ssdkv.offload.host import HostDevice
from vllm_ssdkv.offload.protocol import ContextDevice
from vllm_ssdkv.offload.testing.drive_timing import DRIVES
from vllm_ssdkv.offload.testing.throttled_drives import ThrottledDrives
from vllm_ssdkv.profiling.offload.host_rate import MEMORY, measure_host
from vllm_ssdkv.profiling.offload.rig import (
    WINDOW,
    Contexts,
    Effort,
    Rig,
    Share,
    Sizes,
    link_rule,
    opened,
)
from vllm_ssdkv.profiling.offload.writing import Writing
from vllm_ssdkv.profiling.offload.x_cache import measure_projection, shape_of
from vllm_ssdkv.profiling.simulation.hardware import IoPath, find

Way: TypeAlias = Literal["none", "host", "shared", "instinfer", "smartssd"]
"""Way of attending to contexts: by the thread of the step, by the host's device, by both
(``offload.share: auto``), by drives of a paper."""
WAYS: Final[tuple[Way, ...]] = ("none", "host", "shared", "instinfer", "smartssd")

Row: TypeAlias = dict[str, Any]
"""Figures of a case, as in the JSON document."""

DRAM: Final = "dram"
FLASH: Final = "flash"
FLEXGEN: Final = "flexgen"
"""Places of contexts, beside the links of each profile: these memories, and FlexGen's path."""

BLOCK_TOKENS: Final = 16
SETTLING_STEPS: Final = 32
"""Steps after which a share is settled: each way was tried."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Cases that are measured.

    Attributes:
        contexts: Tokens.
        batches: Requests at a time.
        drives: Numbers of them.
        intervals: Tokens between two writes.
        x_shares: Of the batch, whose X is projected.
        budget: Share of the tokens that selectors choose.
        dilation: Factor by which emulated drives are slower than theirs.
        threads: Of the host's device.
        memory_bytes: With which the rate of the host's attention is measured.
    """

    contexts: Sequence[int]
    batches: Sequence[int]
    selectors: Sequence[SelectorName]
    ways: Sequence[Way]
    drives: Sequence[int]
    intervals: Sequence[int]
    budget: float
    dilation: float
    threads: int
    x_shares: Sequence[float] = ()
    effort: Effort = field(default_factory=Effort)
    sizes: Sizes = field(default_factory=Sizes)
    memory_bytes: int = MEMORY

    @property
    def profiles(self) -> list[DriveProfile]:
        """Drives of papers among the ways."""
        return [profile for profile in DRIVES if profile in self.ways]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of figures.

    Attributes:
        place: Of the contexts: :data:`DRAM`, :data:`FLASH`, or behind the link of a profile or of
            :data:`FLEXGEN`.
        drives: Number of them; 0 in DRAM.
        link: Bytes/s of all of them together.
        interval: Tokens between two writes; 0: nothing is charged for writes.
    """

    contexts: Contexts
    way: Way
    place: str
    drives: int = 0
    link: float = 0.0
    interval: int = 0

    def __str__(self) -> str:
        size = f"{self.contexts.requests} x {self.contexts.tokens} tokens"
        often = f", a write every {self.interval}" if self.interval else ""
        where = f"{self.drives} x {self.place}" if self.drives else self.place
        return f"{size}, {self.contexts.selector}: {self.way}, {where}{often}"


def cases(settings: Settings) -> Iterator[Case]:
    """All cases; those that share contexts and their place follow each other."""
    plain = [way for way in settings.ways if way in ("none", "host", "shared")]
    for tokens, requests, selector in itertools.product(
        settings.contexts, settings.batches, settings.selectors
    ):
        here = Contexts(tokens, requests, selector)
        for way in plain:
            yield Case(here, way, DRAM)
        for profile in settings.profiles:
            for drives in settings.drives:
                yield Case(here, profile, FLASH, drives)
        away = Contexts(tokens, requests, selector, on_drive=True)
        for name, drives, bandwidth in _links(settings):
            if "none" in plain and (name != FLEXGEN or selector == "exact"):
                yield Case(away, "none", name, drives, drives * bandwidth)
            # The device brings the same bytes: one case shows whether it keeps a drive busy.
            if "host" in plain and name != FLEXGEN and drives == 1 and selector == "exact":
                yield Case(away, "host", name, drives, bandwidth)
    for interval in settings.intervals:
        block = max(interval, BLOCK_TOKENS)
        longest = Contexts(max(settings.contexts), max(settings.batches), block_tokens=block)
        for profile in settings.profiles:
            yield Case(longest, profile, FLASH, max(settings.drives), interval=interval)


def _links(settings: Settings) -> Iterator[tuple[str, int, float]]:
    """Name, number of drives, and bytes/s of each."""
    for profile in settings.profiles:
        for drives in settings.drives:
            yield profile, drives, DRIVES[profile].link_bandwidth
    if settings.profiles:
        yield FLEXGEN, 1, find(IoPath, "flexgen-memmap").drive_bandwidth or 0.0


def formula(sizes: Sizes, contexts: Contexts, devices: int) -> float:
    """Bytes over the link of a token in one row and layer.

    ``n (2 Hq d + Hq (4 d + 8)) + 4 n_kv d``: to each of n devices a query of 16 bit, from each a
    state in fp32 with maximum and sum, and K and V once. A token that chooses adds a bit per page
    and KV head of its context.
    """
    q, d, heads = sizes.query_heads, sizes.head_size, sizes.kv_heads
    dense = devices * (2 * q * d + q * (4 * d + 8)) + 4 * heads * d
    if contexts.selector == "exact":
        return dense
    pages = (contexts.tokens - WINDOW) / BLOCK_TOKENS
    return dense + pages * heads / 8


def run(settings: Settings, directory: Path, note: Callable[[str], None]) -> Row:
    """Measure all cases: the document of ``--json``.

    Args:
        settings: What is measured.
        directory: Stores are made below it, and removed.
        note: Shows each case before it begins, with its number and how many there are.

    Raises:
        BenchError: a drive or a device failed.
    """
    writing = _writing(settings)
    parts, numbers = 2 + len(list(cases(settings))) + writing.cases, itertools.count(1)

    def begin(what: str) -> None:
        note(f"{next(numbers)} of {parts}: {what}")

    begin("reading memory, and attending to it")
    cpus = os.cpu_count() or 1
    host = measure_host(cpus, settings.memory_bytes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of small operations many wait longer than they work
    try:
        rows = list(_rows(settings, directory, begin))
        writes = writing.measure(directory, begin)
        begin("projecting X")
        largest = max(settings.batches)
        asked = sorted({max(1, round(share * largest)) for share in settings.x_shares if share})
        projected = measure_projection(settings.sizes, max(settings.contexts), asked)
    finally:
        torch.set_num_threads(threads)
    return {
        "dilation": settings.dilation,
        "budget": settings.budget,
        "threads": settings.threads,
        "cpus": cpus,
        "load": os.getloadavg()[0],
        "host": host,
        "rows": rows,
        "writes": writes,
        "projected": projected,
        "x_shape": asdict(shape_of(settings.sizes)),
    }


def _writing(settings: Settings) -> Writing:
    return Writing(
        max(settings.batches),
        max(settings.contexts),
        settings.intervals,
        settings.profiles,
        settings.dilation,
        settings.threads,
        settings.sizes,
    )


def _rows(settings: Settings, directory: Path, note: Callable[[str], None]) -> Iterator[Row]:
    model = settings.sizes.model()
    for contexts, those in itertools.groupby(cases(settings), lambda case: case.contexts):
        with opened(contexts, model, settings.budget, directory) as rig:
            for case in those:
                note(str(case))
                yield _measure(rig, case, settings)


def _measure(rig: Rig, case: Case, settings: Settings) -> Row:
    contexts, sizes = case.contexts, settings.sizes
    device, writes, rate = _device(case, settings), None, case.link
    # In so many steps every row stores one block, whatever it begins with.
    steps = settings.effort.steps
    effort = settings.effort if case.link else Effort(steps, steps)
    if case.way == "shared":
        effort = Effort(steps, steps, warm=SETTLING_STEPS)
    if isinstance(device, ThrottledDrives):
        rate = device.timing.read_bandwidth * device.drives
        if case.interval:
            writes = _writes(device, case, sizes)
            effort = Effort(most := max(settings.intervals), most)
    link = link_rule(case.link, settings.dilation) if case.link else None
    share: Share = "auto" if case.way == "shared" else 1.0
    found = rig.run(device, effort, link, writes, share)
    devices = case.drives if case.place == FLASH else 1
    return {
        "context": contexts.tokens,
        "batch": contexts.requests,
        "selector": contexts.selector,
        "way": case.way,
        "place": case.place,
        "drives": case.drives,
        "interval": case.interval,
        "layers": sizes.layers,
        "bandwidth": rate / settings.dilation,
        "link_formula": formula(sizes, contexts, devices) if device is not None else 0.0,
        **found,
    }


def _device(case: Case, settings: Settings) -> ContextDevice | None:
    """The device of a case, which is new."""
    if case.way == "none":
        return None
    host = HostDevice(settings.threads)
    if case.way == "instinfer" or case.way == "smartssd":  # noqa: PLR1714  # mypy narrows by it
        return ThrottledDrives(host, DRIVES[case.way], case.drives, settings.dilation)
    return host


def _writes(device: ThrottledDrives, case: Case, sizes: Sizes) -> Iterator[None]:
    """Have drives write K and V of some tokens as often: of each row, layer and head in pages of
    their own, as nobody else has anything to fill these with."""
    side = device.timing.flash_pages(case.interval * sizes.head_size * 2)
    pages = 2 * side * sizes.kv_heads * sizes.layers * case.contexts.requests
    while True:
        device.write(pages)
        for _ in range(case.interval):
            yield
