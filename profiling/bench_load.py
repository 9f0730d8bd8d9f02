"""Speed of loading a prefix hit, against what the drives give.

    python -P -m vllm_ssdkv.profiling.bench_load --dir /mnt/nvme0 --dir /mnt/nvme1

Per size of block and of hit, in turns in one run: the hit loaded by the store (read, checked, and
copied to where HBM would be); *one batch*, the same requests for the same bytes of the same files,
given at once to the same engine, and nothing done with them; and the engine under ``ssdkv lab bench
io`` at the size of the store's requests. Medians over rounds. One batch is what a load of that size
can reach at best: both begin with empty queues and end with the last byte. ``bench io`` keeps the
queues full for a while and reads into few buffers, which stay in the processor's cache.

*Check and copy* is how fast one thread does that with the same slots when they are in memory. A
drive that is faster needs more threads, which a load takes when it falls behind, and their cores.

With ``--bandwidth`` the drives are slowed down inside the engine, for everybody. CPU seconds are
those of the whole process while a hit is loaded; they hold on a busy machine, too.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB, format_size, parse_size
from vllm_ssdkv.config.io_engine import EngineKind, ThrottleRule
from vllm_ssdkv.profiling.bench_io.case import MEMORY_BYTES, Case
from vllm_ssdkv.profiling.bench_io.clock import Clock
from vllm_ssdkv.profiling.bench_io.engines import EngineContender
from vllm_ssdkv.profiling.bench_io.files import BenchFile, bench_files
from vllm_ssdkv.profiling.rig.measure import (
    bench_parser,
    markdown,
    scratch_directories,
    write_json,
)
from vllm_ssdkv.profiling.rig.store import PATIENCE_S, Hbm, StoreRig, store_config
from vllm_ssdkv.store.cache.frames import NO_FRAME
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

LAYERS = 32
BLOCKS = (128 * 1024, 512 * 1024, 2 * MIB)
"""Bytes of a block, all layers."""
HITS = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
DRAM_BYTES = 320 * MIB
ENGINE_S = 0.3
ONE_THREAD_BYTES = 3 * MIB
"""Bytes of data arrived at once that are not worth a second thread."""


@dataclass(frozen=True, slots=True)
class Row:
    """GB/s of one size of block and hit; ratios are medians of the rounds' ratios."""

    block_bytes: int
    hit_bytes: int
    request_bytes: int
    load: float
    reads: float
    engine: float
    check: float
    load_per_reads: float
    load_per_engine: float
    load_cpu_s_per_gb: float


class Bench(StoreRig):
    """A store on the devices, and blocks in it."""

    def __init__(
        self,
        directories: Sequence[Path],
        geometry: SlotGeometry,
        blocks: int,
        drive: ThrottleRule | None = None,
    ):
        throttle = [] if drive is None else [_plain(drive)]
        config = store_config(
            directories, geometry, blocks, dram=DRAM_BYTES, io={"throttle": throttle}
        )
        self.depth = config.io.queue_depth
        self._hbm = Hbm(geometry, blocks)
        super().__init__(config, geometry, blocks, hbm=self._hbm, stretches=self._hbm.stretches())
        plan, random = self.opened.plan, np.random.default_rng(0)
        for at in range(plan.frame_offset, plan.nbytes, 4 * MIB):
            piece = self.opened.arena.view(at, min(4 * MIB, plan.nbytes - at))
            piece[:] = random.integers(0, 256, len(piece), np.uint8)
        self.write()

    @property
    def request_bytes(self) -> int:
        """The largest request that a block is read with."""
        files = self.store.files
        extents = files.placement.extents(self.slots, 0, self.geometry.slot_bytes, merged=False)
        return int(extents.length.max())

    def hit(self, blocks: int) -> float:
        """Seconds in which the first so many blocks were loaded, none of them from DRAM."""
        self.forget()
        outcome = self.load(blocks)
        if outcome.tokens_from_dram:
            raise BenchError("something was in DRAM")
        return outcome.ssd_s

    def check_and_copy(self, blocks: int) -> float:
        """Seconds in which one thread does so with what :meth:`hit` has just brought."""
        slots, files = self.slots[:blocks], self.store.files
        frames = self.store.frames.borrow(slots)
        if (frames == NO_FRAME).any():
            raise RuntimeError("DRAM does not hold the hit")
        spent = 0.0
        per = max(1, ONE_THREAD_BYTES // self.geometry.slot_bytes)
        for at in range(0, blocks, per):
            part = slots[at : at + per]
            keys = key_rows(self.keys[at : at + len(part)])
            plain = files.codec.plain_check(part, np.ones(len(part), np.int64), keys)
            if plain is None:
                raise RuntimeError("the store is encrypted")
            length = np.full(len(part), self.geometry.slot_bytes, dtype=np.uint32)
            verifier = _io.ArrivalVerifier(
                plain.shape,
                self.store.frames.address(frames[at : at + len(part)]),
                plain.beginnings.ravel(),
                (part + 1).astype(np.uint64),
                np.arange(len(part)),
                np.zeros(len(part), dtype=np.uint64),
                length,
                self._hbm.stretches(),
                plain.first,
                plain.step,
            )
            begin = time.perf_counter()
            verifier.take(length.astype(np.int32))
            spent += time.perf_counter() - begin
            if (verifier.states() != 1).any():
                raise RuntimeError("a slot is wrong")
        self.store.frames.give_back(frames)
        return spent

    def read(self, blocks: int) -> float:
        """Seconds in which the engine read the same in one batch; where there is no memory for all
        of it, blocks share some."""
        files, plan = self.store.files, self.opened.plan
        self.forget()
        size = self.geometry.slot_bytes
        extents = files.placement.extents(self.slots[:blocks], 0, size, merged=False)
        # Where a block has no place in memory of its own, it shares one: nobody looks at it.
        place = (extents.slot_index % plan.frames - extents.slot_index) * size + plan.frame_offset
        buffer = (extents.buffer.astype(np.int64) + place).astype(np.uint64)
        begin = time.perf_counter()
        batch = files.engine.submit(Op.READ, extents.device, extents.offset, extents.length, buffer)
        if not batch.wait(PATIENCE_S) or (batch.results() != extents.length).any():
            raise RuntimeError("a read failed")
        return time.perf_counter() - begin


def _plain(drive: ThrottleRule) -> dict[str, float]:
    return {"bandwidth": int(drive.bandwidth or 0), "latency": drive.latency_s}


@contextmanager
def _bench(
    directories: Sequence[Path], block: int, hits: Sequence[int], drive: ThrottleRule | None = None
) -> Iterator[Bench]:
    geometry = SlotGeometry("opaque", LAYERS, 1, 1, block // LAYERS)
    folders = [directory / f"store-{block}" for directory in directories]
    for folder in folders:
        folder.mkdir()
    bench = Bench(folders, geometry, max(hits) // block, drive)
    try:
        yield bench
    finally:
        bench.close()
        for folder in folders:
            shutil.rmtree(folder)


def measure(
    directories: Sequence[Path],
    blocks: Sequence[int],
    hits: Sequence[int],
    rounds: int,
    *,
    drive: ThrottleRule | None = None,
    region_bytes: int = 256 * MIB,
    engine_s: float = ENGINE_S,
) -> list[Row]:
    """One row per size of block and hit that is at least a block.

    Args:
        directories: One per device.
        blocks: Bytes of a block.
        hits: Bytes of a hit.
        rounds: Measurements of each.
        drive: What every device is slowed down to, or nothing.
        region_bytes: Of the files for ``bench io``, per device.
        engine_s: Seconds of one run of ``bench io``.
    """
    arena = Arena(MEMORY_BYTES)
    rows: list[Row] = []
    try:
        with bench_files(directories, len(directories), region_bytes) as files:
            for block in blocks:
                fitting = [hit for hit in hits if hit >= block]
                if not fitting:
                    continue
                with _bench(directories, block, fitting, drive) as bench:
                    kind: EngineKind = "uring" if _io.has_uring else "threads"
                    contender = EngineContender(kind, files, arena, drive)
                    rows += [
                        _row(bench, contender, files, hit, rounds, engine_s) for hit in fitting
                    ]
    finally:
        arena.close()
    return rows


def _row(
    bench: Bench,
    contender: EngineContender,
    files: Sequence[BenchFile],
    hit: int,
    rounds: int,
    engine_s: float,
) -> Row:
    block = bench.geometry.pages * bench.geometry.payload_bytes
    count, request = hit // block, bench.request_bytes
    depth = max(1, min(bench.depth, MEMORY_BYTES // request // len(files)))
    case = Case(Op.READ, request, depth, len(files))
    nbytes = count * bench.geometry.slot_bytes
    speeds: list[tuple[float, float, float, float]] = []
    cpu: list[float] = []
    for _ in range(rounds):
        with Clock() as clock:
            load = nbytes / bench.hit(count)
        cpu.append(clock.cpu_s / nbytes * 1e9)
        check = nbytes / bench.check_and_copy(count)
        read = nbytes / bench.read(count)
        full = contender.run(case, engine_s).bytes_per_s
        speeds.append((load / 1e9, read / 1e9, full / 1e9, check / 1e9))
    load, read, engine, check = (statistics.median(each) for each in zip(*speeds, strict=True))
    return Row(
        block,
        hit,
        request,
        load,
        read,
        engine,
        check,
        statistics.median(one[0] / one[1] for one in speeds),
        statistics.median(one[0] / one[2] for one in speeds),
        statistics.median(cpu),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    columns = ("block", "hit", "request", "load GB/s", "one batch", "bench io", "check and copy")
    ways = ("load / one batch", "load / bench io", "CPU s/GB")
    cells = [
        [format_size(size) for size in (row.block_bytes, row.hit_bytes, row.request_bytes)]
        + [f"{speed:.2f}" for speed in (row.load, row.reads, row.engine, row.check)]
        + [f"{ratio:.2f}" for ratio in (row.load_per_reads, row.load_per_engine)]
        + [f"{row.load_cpu_s_per_gb:.2f}"]
        for row in rows
    ]
    return markdown((*columns, *ways), cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write JSON if asked."""
    parser = bench_parser(__doc__)
    parser.add_argument("--dir", action="append", type=Path, help="device (repeat for several)")
    parser.add_argument(
        "--block", action="append", type=parse_size, help="bytes of a block, all layers"
    )
    parser.add_argument("--hit", action="append", type=parse_size, help="bytes of a hit")
    parser.add_argument("--bandwidth", help="bandwidth to which each drive is slowed down, bytes/s")
    parser.add_argument(
        "--latency", type=float, default=0.0001, help="latency of a slowed drive in seconds"
    )
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    drive = None
    if given.bandwidth:
        drive = ThrottleRule(bandwidth=parse_size(given.bandwidth), latency_s=given.latency)
    with scratch_directories(given.dir) as directories:
        blocks, hits = given.block or BLOCKS, given.hit or HITS
        rows = measure(directories, blocks, hits, given.rounds, drive=drive)
    print(table(rows))
    write_json(given.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
