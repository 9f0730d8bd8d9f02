"""Balance of sparse reads over throttled drives, by both rules of placement.

    python -P -m vllm_ssdkv.profiling.bench_placement TRACES

``TRACES`` is a directory that ``ssdkv lab profile`` has made. What a step chooses of one layer of 8
KV heads is read by the engine, page by page, from stripe maps of either rule, into places that are
anywhere in memory, as in the cache of pages. Drives are files that the engine slows down. The share
of linear is the time of one drive, over that of n and n; the busiest drive's bytes and the requests
that drives get do not depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from vllm_ssdkv.base.sizes import parse_size
from vllm_ssdkv.config.io_engine import EngineOptions, ThrottleRule
from vllm_ssdkv.profiling.clusters.layer_reads import LAYER_HEADS, Scored, baseline
from vllm_ssdkv.profiling.clusters.trace import I64, PAGE, Bools, Trace, read_traces
from vllm_ssdkv.profiling.rig.measure import markdown, write_json
from vllm_ssdkv.store.format.segment import Rule
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES, SlotGeometry
from vllm_ssdkv.store.io.coalescing import submit_coalesced
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import IoEngine, Op
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.placement.stripe_map import Extents, StripeMap

PAGE_BYTES = 8192
BLOCK_TOKENS = 128
QUEUE_DEPTH = 64
PATIENCE_S = 120.0
ORDERS = {"position": "sparf", "keys": "spread"}
"""Selector by order of tokens: the text's, and by likeness of K in blocks."""


class Mode(NamedTuple):
    """A rule of placement, and whether neighbours on a drive go to it as one."""

    name: str
    rule: Rule
    joined: bool


MODES = (
    Mode("equal units", UNSET, True),
    Mode("heads", "heads", True),
    Mode("heads, one by one", "heads", False),
)


class Read(NamedTuple):
    """Chosen pages of a step: slots, and numbers in the layer, [n] each."""

    slots: I64
    pages: I64


@dataclass(frozen=True, slots=True)
class Measured:
    """One placement on some drives.

    Attributes:
        busiest: Bytes of the busiest drive over the mean.
        requests: That drives get in a step.
        step_s: Time of a step's reads.
    """

    busiest: float
    requests: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one placement; ``linear`` is the share of linear speed."""

    order: str
    batch: int
    drives: int
    placement: str
    linear: float
    measured: Measured


def choices(trace: Trace, order: str, steps: int) -> Bools:
    """Pages that so many decode steps choose, [heads, steps, pages]: a tenth, or as many as recall
    the same."""
    heads, every = trace.adjacent_heads(LAYER_HEADS), trace.decode_steps
    some = every[np.linspace(0, len(every) - 1, steps).astype(np.int64)]
    scored, count, recall = baseline(trace, heads, some)
    if order == "keys":
        scored = Scored.of(trace, heads, some, BLOCK_TOKENS, "spread")
        count = scored.pages_for(recall)
    return scored.chosen(count)


def reads(chosen: Sequence[Bools], batch: int) -> list[Read]:
    """Reads of steps of so many contexts, each of which begins at another slot."""
    per_slot = BLOCK_TOKENS // PAGE
    steps, found = chosen[0].shape[1], []
    for first in range(len(chosen) if batch == 1 else 1):
        for step in range(steps):
            parts, slot = [], 0
            for number in range(batch):
                mine = chosen[(first + number) % len(chosen)]
                head, page = np.nonzero(mine[:, (step + number * steps // batch) % steps])
                parts.append((slot + page // per_slot, head * per_slot + page % per_slot))
                slot += mine.shape[2] // per_slot + 3
            found.append(Read(*(np.concatenate(part) for part in zip(*parts, strict=True))))
    return found


class Bench:
    """Drives that are files in a directory, and memory."""

    def __init__(self, directory: Path, heads: int, slots: int, bandwidth: float):
        per_slot = BLOCK_TOKENS // PAGE
        self._geometry = SlotGeometry("paged", 3, heads, per_slot, PAGE_BYTES, summary_pages=1)
        self._directory, self._slots = directory, slots
        self._drive = ThrottleRule(bandwidth=bandwidth)
        self._random = np.random.default_rng(0)

    def measure(self, mode: Mode, work: Sequence[Read], drives: int, repeats: int) -> Measured:
        """Figures of a mode; the time is that of each step's best repetition."""
        stripes = StripeMap(self._geometry, range(drives), drives, rule=mode.rule)
        every = [self._extents(stripes, read) for read in work]
        most = max(len(each.device) for each in every)
        with self._engine(stripes, mode, most, self._drive) as engine:
            spent = [[self._read(engine, each) for each in every] for _ in range(repeats)]
        # A slow drive is told of each request alone; what the engine makes of them is asked for.
        with self._engine(stripes, mode, most) as engine:
            for each in every:
                self._read(engine, each)
            counts = engine.statistics()
        requests = sum(n for name, n in counts.items() if name.startswith("read_requests."))
        moved = [np.bincount(each.device, each.length, drives) for each in every]
        return Measured(
            float(np.mean([each.max() / each.mean() for each in moved])),
            requests / len(work),
            float(np.min(spent, axis=0).mean()),
        )

    def _extents(self, stripes: StripeMap, read: Read) -> Extents:
        first = self._geometry.page_offset(self._geometry.first_page(1))
        return stripes.extents(read.slots, first + read.pages * PAGE_BYTES, PAGE_BYTES)

    def _read(self, engine: IoEngine, extents: Extents) -> float:
        """Seconds."""
        places = self._random.permutation(len(extents.device)).astype(np.uint64) * PAGE_BYTES
        begin = time.monotonic()
        batch = submit_coalesced(
            engine, Op.READ, extents.device, extents.offset, extents.length, places
        )
        if not batch.wait(PATIENCE_S) or (batch.results() <= 0).any():
            raise RuntimeError("a read failed")
        return time.monotonic() - begin

    @contextmanager
    def _engine(
        self, stripes: StripeMap, mode: Mode, pages: int, slow: ThrottleRule | None = None
    ) -> Iterator[IoEngine]:
        unit = self._geometry.unit_bytes
        paths = [self._directory / f"drive{drive}" for drive in range(stripes.devices)]
        with ExitStack() as stack:
            arena = Arena(pages * PAGE_BYTES)
            stack.callback(arena.close)
            fds = []
            for drive, path in enumerate(paths):
                fds.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
                stack.callback(os.close, fds[-1])
                nbytes = SUPERBLOCK_BYTES + stripes.device_units(drive, self._slots) * unit
                os.ftruncate(fds[-1], nbytes)
            throttle = () if slow is None else (slow,)
            options = EngineOptions(queue_depth=QUEUE_DEPTH, throttle=throttle)
            engine = open_engine(options, fds, paths, arena, joined=mode.joined)
            stack.callback(engine.close, PATIENCE_S)
            yield engine


def measure(
    traces: Sequence[Trace],
    directory: Path,
    drives: Sequence[int],
    batches: Sequence[int],
    *,
    bandwidth: float,
    steps: int,
    repeats: int,
) -> list[Row]:
    """Rows by order, batch, drives and placement. Blocks."""
    rows: list[Row] = []
    for order in ORDERS:
        chosen = [choices(trace, order, steps) for trace in traces]
        for batch in batches:
            work = reads(chosen, batch)
            slots = 1 + max(int(read.slots.max()) for read in work)
            bench = Bench(directory, chosen[0].shape[0], slots, bandwidth)
            alone = bench.measure(MODES[0], work, 1, repeats).step_s
            for count in drives:
                for mode in MODES:
                    found = bench.measure(mode, work, count, repeats)
                    linear = alone / found.step_s / count
                    rows.append(Row(order, batch, count, mode.name, linear, found))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    columns = ("order, selector", "batch", "drives", "placement", "of linear", "busiest / mean")
    cells = []
    for row in rows:
        found = row.measured
        shown = [f"{row.linear:.2f}", f"{found.busiest:.2f}", f"{found.requests:.0f}"]
        sizes = [str(row.batch), str(row.drives), row.placement]
        cells.append([f"{row.order}, {ORDERS[row.order]}", *sizes, *shown])
    return markdown((*columns, "requests"), cells)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--dir", type=Path, help="directory of the files (default: temporary)")
    parser.add_argument(
        "--drives", type=int, action="append", help="number of drives (default: 4, 8)"
    )
    parser.add_argument(
        "--batch", type=int, action="append", help="number of contexts (default: 1, 4)"
    )
    parser.add_argument(
        "--bandwidth", type=parse_size, default="30MB", help="bandwidth of each drive, bytes/s"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps of each trace")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    _, traces = read_traces(options.traces)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        rows = measure(
            traces,
            Path(directory),
            options.drives or [4, 8],
            options.batch or [1, 4],
            bandwidth=options.bandwidth,
            steps=options.steps,
            repeats=options.repeats,
        )
    print(table(rows))
    write_json(options.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
