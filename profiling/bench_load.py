"""Speed of loading a prefix hit, against what the drives give.

    python -P -m vllm_ssdkv.profiling.bench_load --dir /mnt/nvme0 --dir /mnt/nvme1

Per size of block and of hit, in turns in one run: the hit loaded by the store (read, checked, and
copied to where HBM would be); *one batch*, the same requests for the same bytes of the same files,
given at once to the same engine, and nothing done with them; and the engine under ``ssdkv bench
io`` at the size of the store's requests. Medians over rounds. One batch is what a load of that size
can reach at best: both begin with empty queues and end with the last byte. ``bench io`` keeps the
queues full for a while and reads into few buffers, which stay in the processor's cache.

*Check and copy* is how fast one thread does that with the same slots when they are in memory. A
drive that is faster needs more threads, which a load takes when it falls behind, and their cores.

With ``--bandwidth`` the drives are slowed down inside the engine, for everybody. CPU seconds are
those of the whole process while a hit is loaded; they hold on a busy machine, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import MIB, format_size, parse_size
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.io_engine import EngineKind, ThrottleRule
from vllm_ssdkv.profiling.bench_io.case import MEMORY_BYTES, Case
from vllm_ssdkv.profiling.bench_io.clock import Clock
from vllm_ssdkv.profiling.bench_io.engines import EngineContender
from vllm_ssdkv.profiling.bench_io.files import BenchFile, bench_files
from vllm_ssdkv.store.cache.frames import NO_FRAME
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.open import StorePlace, open_rank
from vllm_ssdkv.store.read.load_job import LoadJob
from vllm_ssdkv.store.tiered_store import TieredStore

LAYERS = 32
BLOCKS = (128 * 1024, 512 * 1024, 2 * MIB)
"""Bytes of a block, all layers."""
HITS = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
DRAM_BYTES = 320 * MIB
ENGINE_S = 0.3
ONE_THREAD_BYTES = 3 * MIB
"""Of what has arrived at once, so much is not worth a second thread."""
PATIENCE_S = 120.0


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


class Bench:
    """A store on the devices, and blocks in it."""

    def __init__(
        self,
        directories: Sequence[Path],
        geometry: SlotGeometry,
        blocks: int,
        drive: ThrottleRule | None = None,
    ):
        capacity = (blocks + 8 * len(directories)) * geometry.slot_bytes * 9 // 8
        share = capacity // len(directories) + 32 * MIB
        config = SSDKVConfig.from_extra_config(
            {
                "devices": [{"path": str(path), "capacity": share} for path in directories],
                "dram_gib": DRAM_BYTES / 2**30,
                "io": {"throttle": [] if drive is None else [_plain(drive)]},
            }
        )
        place = StorePlace(config, geometry, Fingerprint({"bench": geometry.payload_bytes}), 1)
        self.geometry = geometry
        self.depth = config.io.queue_depth
        self._opened = open_rank(place, 0, Counters())
        self._hbm = np.zeros(blocks * geometry.payload_bytes * geometry.pages, dtype=np.uint8)
        self.store = TieredStore(
            self._opened.files,
            self._opened.arena,
            self._opened.plan,
            self._opened.num_slots,
            16,
            self._copy_in,
            stretches=self._stretches(),
        )
        self.slots = np.arange(blocks, dtype=np.int64)
        self._keys = [slot.to_bytes(32, "little") for slot in range(blocks)]
        self._write()

    @property
    def request_bytes(self) -> int:
        """The largest request that a block is read with."""
        files = self.store.files
        extents = files.placement.extents(self.slots, 0, self.geometry.slot_bytes, merged=False)
        return int(extents.length.max())

    def _stretches(self) -> _io.Stretches:
        geometry, pages = self.geometry, np.arange(self.geometry.pages, dtype=np.uint64)
        block = geometry.pages * geometry.payload_bytes
        base = self._hbm.ctypes.data - block  # of block 0, which stands for none
        return _io.Stretches(
            np.uint64(geometry.header_bytes) + pages * np.uint64(geometry.page_bytes),
            np.full(geometry.pages, geometry.payload_bytes, dtype=np.uint64),
            np.uint64(base) + pages * np.uint64(geometry.payload_bytes),
            np.full(geometry.pages, block, dtype=np.uint64),
        )

    def _copy_in(self, frames: NDArray[np.int32], block_ids: NDArray[np.int64]) -> None:
        geometry, pages = self.geometry, np.arange(self.geometry.pages, dtype=np.uint64)
        first = self.store.frames.address(frames) + np.uint64(geometry.header_bytes)
        place = np.uint64(self._hbm.ctypes.data) + (block_ids - 1).astype(np.uint64) * np.uint64(
            geometry.pages * geometry.payload_bytes
        )
        source = first[:, None] + pages * np.uint64(geometry.page_bytes)
        target = place[:, None] + pages * np.uint64(geometry.payload_bytes)
        _io.copy(source.ravel(), target.ravel(), geometry.payload_bytes)

    def _write(self) -> None:
        plan, random = self._opened.plan, np.random.default_rng(0)
        for at in range(plan.frame_offset, plan.nbytes, 4 * MIB):
            piece = self._opened.arena.view(at, min(4 * MIB, plan.nbytes - at))
            piece[:] = random.integers(0, 256, len(piece), np.uint8)
        done = 0
        while done < len(self.slots):
            frames = self.store.reserve_frames(self.slots[done:], wait=True)
            if len(frames) == 0:
                raise RuntimeError("no frame in time")
            part = slice(done, done + len(frames))
            slots = self.slots[part]
            self.store.flush(slots, np.ones(len(slots), np.int64), self._keys[part])
            done += len(frames)
        if not self.store.drain(PATIENCE_S) or self.store.take_write_results()[1]:
            raise RuntimeError("a block was not written")

    def load(self, blocks: int) -> float:
        """Seconds in which the first so many blocks were loaded, none of them from DRAM."""
        slots = self.slots[:blocks]
        self.store.frames.forget(self.slots)
        job = LoadJob("r", slots, np.ones(blocks, np.int64), tuple(self._keys[:blocks]), slots + 1)
        self.store.load(job)
        end = time.monotonic() + PATIENCE_S
        while not (outcomes := self.store.take_load_outcomes()):
            if time.monotonic() > end:
                raise RuntimeError("the load did not end")
            time.sleep(0.0005)
        if not outcomes[0].complete or outcomes[0].tokens_from_dram:
            raise RuntimeError("the load failed, or something was in DRAM")
        return outcomes[0].ssd_s

    def check_and_copy(self, blocks: int) -> float:
        """Seconds in which one thread does so with what :meth:`load` has just brought."""
        slots, files = self.slots[:blocks], self.store.files
        frames = self.store.frames.borrow(slots)
        if (frames == NO_FRAME).any():
            raise RuntimeError("DRAM does not hold the hit")
        spent = 0.0
        per = max(1, ONE_THREAD_BYTES // self.geometry.slot_bytes)
        for at in range(0, blocks, per):
            part = slots[at : at + per]
            keys = key_rows(self._keys[at : at + len(part)])
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
                self._stretches(),
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
        files, plan = self.store.files, self._opened.plan
        self.store.frames.forget(self.slots)
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

    def close(self) -> None:
        """End the store."""
        self.store.close()
        self._opened.close()


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
            load = nbytes / bench.load(count)
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
    lines = [
        "| block | hit | request | load GB/s | one batch | bench io | check and copy "
        "| load / one batch | load / bench io | CPU s/GB |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        sizes = (row.block_bytes, row.hit_bytes, row.request_bytes)
        cells = [format_size(size) for size in sizes]
        cells += [f"{speed:.2f}" for speed in (row.load, row.reads, row.engine, row.check)]
        cells += [f"{ratio:.2f}" for ratio in (row.load_per_reads, row.load_per_engine)]
        cells.append(f"{row.load_cpu_s_per_gb:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", action="append", type=Path, help="device (repeat for several)")
    parser.add_argument("--block", action="append", type=parse_size, help="bytes, all layers")
    parser.add_argument("--hit", action="append", type=parse_size, help="bytes of a hit")
    parser.add_argument("--bandwidth", help="bytes/s that each drive is slowed down to")
    parser.add_argument("--latency", type=float, default=0.0001, help="seconds per request then")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    drive = None
    if given.bandwidth:
        drive = ThrottleRule(bandwidth=parse_size(given.bandwidth), latency_s=given.latency)
    with tempfile.TemporaryDirectory(prefix="ssdkv-bench-", dir=Path.cwd()) as scratch:
        directories = []
        for i, parent in enumerate(given.dir or [Path(scratch)]):
            directories.append(Path(tempfile.mkdtemp(prefix=f"ssdkv-bench-{i}-", dir=parent)))
        try:
            blocks, hits = given.block or BLOCKS, given.hit or HITS
            rows = measure(directories, blocks, hits, given.rounds, drive=drive)
        finally:
            for directory in directories:
                shutil.rmtree(directory, ignore_errors=True)
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
