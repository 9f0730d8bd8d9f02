"""The index at scale: memory per slot, time to recover, time of a lookup, stalls of a rewrite.

Run as ``python -P -m vllm_ssdkv.profiling.bench_index``. A first process stores a block in every
slot and is killed; a second one recovers what it left, looks blocks up, and stores new ones until
the journal was rewritten. Memory is resident memory (``VmRSS``, ``VmHWM``). Times are wall clock,
those of lookups and of a rewrite's steps CPU time of the thread: other work on the machine is not
in them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.profiling.rig.measure import bench_parser, markdown, write_json
from vllm_ssdkv.store.format.journal_record import RECORD_BYTES
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.slot_index import SlotIndex

SLOTS = 10_000_000
STORE = UUID(int=1)
BATCH = 256
"""Blocks that one step of an engine stores."""

LOOKUPS = 200_000
CHAIN = 2048
PATIENCE_S = 600

Figures = dict[str, float]


def memory(what: str) -> int:
    """A figure of this process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == what:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"the kernel does not tell {what}")


def keys_of(first: int, count: int) -> list[bytes]:
    """Keys of so many blocks: the block's number, and noise that depends on it."""
    data = np.random.default_rng(first).integers(0, 2**63, (count, 4), dtype=np.int64)
    data[:, 0] = np.arange(first, first + count)
    raw = data.tobytes()
    return [raw[at : at + 32] for at in range(0, len(raw), 32)]


def store(index: SlotIndex, first: int, count: int) -> None:
    """Store the blocks that one step completed."""
    slots = index.allocate(count)
    for slot, key in zip(slots.tolist(), keys_of(first, count), strict=True):
        index.publish(slot, key)
    index.durable(slots)
    index.unpin(slots)


def batches(first: int, count: int) -> Iterator[tuple[int, int]]:
    """First block and number of blocks of each step."""
    for begin in range(first, first + count, BATCH):
        yield begin, min(BATCH, first + count - begin)


def open_index(path: Path, slots: int) -> tuple[SlotIndex, Journal]:
    journal = Journal(path, store=STORE, fingerprint=bytes(16), num_slots=slots)
    return SlotIndex(slots, journal), journal


def fill(path: Path, slots: int) -> Figures:
    """Store a block in every slot."""
    before = memory("VmRSS")
    index, journal = open_index(path, slots)
    empty = memory("VmRSS")
    begin = time.perf_counter()
    for first, count in batches(0, slots):
        store(index, first, count)
    took = time.perf_counter() - begin
    journal.sync(PATIENCE_S)
    return {
        "empty_bytes_per_slot": (empty - before) / slots,
        "full_bytes_per_slot": (memory("VmRSS") - before) / slots,
        "table_bytes_per_slot": index.nbytes / slots,
        "store_us_per_block": took / slots * 1e6,
        "appends_per_write": journal.counters["appended_records"] / journal.counters["writes"],
        "syncs": journal.counters["syncs"],
    }


def recover(path: Path, slots: int) -> Figures:
    """Open what the other process left; then use it."""
    before = memory("VmRSS")
    begin = time.perf_counter()
    index, journal = open_index(path, slots)
    took = time.perf_counter() - begin
    if index.gauges()["ready"] != slots:
        raise RuntimeError(f"{index.gauges()['ready']} of {slots} slots were recovered")
    figures = {
        "journal_bytes": float(path.stat().st_size),
        "recovery_s": took,
        "recovered_bytes_per_slot": (memory("VmRSS") - before) / slots,
        "recovery_peak_bytes_per_slot": (memory("VmHWM") - before) / slots,
    }
    figures |= lookups(index, slots)
    return figures | churn(index, journal, slots)


def lookups(index: SlotIndex, slots: int) -> Figures:
    """Nanoseconds per key, of keys all over the store."""
    picked = np.random.default_rng(1).integers(0, slots // BATCH, LOOKUPS // BATCH + 1)
    keys = [key for n in picked.tolist() for key in keys_of(n * BATCH, BATCH)]
    np.random.default_rng(2).shuffle(keys)
    begin = time.thread_time()
    found = sum(index.find(key) is not None for key in keys)
    one = time.thread_time() - begin
    begin = time.thread_time()
    for at in range(0, len(keys), CHAIN):
        found += len(index.lookup(keys[at : at + CHAIN]))
    chain = time.thread_time() - begin
    if found != 2 * len(keys):
        raise RuntimeError("a stored block was not found")
    return {"find_ns": one / len(keys) * 1e9, "lookup_ns_per_key": chain / len(keys) * 1e9}


def churn(index: SlotIndex, journal: Journal, slots: int) -> Figures:
    """Evict and store until the journal was rewritten; how long calls took meanwhile.

    A drive that is slow to sync may not let a rewrite end before more was stored than the journal
    remembers for it, which voids the rewrite: a part of the store's slots, then we wait.
    """
    slowest = {False: 0.0, True: 0.0}
    all_calls: dict[bool, list[float]] = {False: [], True: []}
    largest, during, begin_rewrite, first = 0, 0, 0.0, slots
    end = time.monotonic() + PATIENCE_S
    while not journal.counters["rewrites"]:
        if time.monotonic() > end:
            raise RuntimeError(f"the journal was not rewritten in {PATIENCE_S} s")
        rewriting = is_rewriting(journal.path)
        if rewriting and not begin_rewrite:
            begin_rewrite = time.perf_counter()
        during = during + 1 if rewriting else 0
        if during * BATCH > slots // 4:
            time.sleep(0.001)
            continue
        begin = time.perf_counter()
        store(index, first, BATCH)
        took = time.perf_counter() - begin
        all_calls[rewriting].append(took)
        slowest[rewriting] = max(slowest[rewriting], took)
        largest = max(largest, journal.nbytes)
        first += BATCH
    rewrite = time.perf_counter() - begin_rewrite
    steps = walk_steps(index)
    return {
        "rewrite_s": rewrite,
        "step_ms": float(np.median(all_calls[False])) * 1e3,
        "step_slowest_ms": slowest[False] * 1e3,
        "step_while_rewriting_ms": float(np.median(all_calls[True] or [0.0])) * 1e3,
        "step_while_rewriting_slowest_ms": slowest[True] * 1e3,
        "walk_step_ms": float(np.median(steps)) * 1e3,
        "walk_step_slowest_ms": float(steps.max()) * 1e3,
        "largest_journal_share_of_bound": largest / journal.max_bytes,
    }


def is_rewriting(journal: Path) -> bool:
    """Check whether a rewrite is under way."""
    return journal.with_name(journal.name + ".tmp").exists()


def walk_steps(index: SlotIndex) -> NDArray[np.float64]:
    """Seconds for which each step of a rewrite holds the scheduler up."""
    took, more = [], True
    index.live_records.begin_walk()
    while more:
        begin = time.thread_time()
        _, more = index.live_records.walk(1)
        took.append(time.thread_time() - begin)
    return np.array(took)


PARTS = {"fill": fill, "recover": recover}


def _run(part: str, path: Path, slots: int) -> Figures:
    command = [sys.executable, "-P", "-m", "vllm_ssdkv.profiling.bench_index", "--part", part]
    command += ["--journal", str(path), "--slots", str(slots)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError(f"{part} failed:\n{done.stderr[-4000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Measure, print a table, write JSON if asked."""
    parser = bench_parser(__doc__)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--dir", help="directory of the journal (default: a temporary directory)")
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--journal", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](Path(arguments.journal), arguments.slots)))
        sys.stdout.flush()
        os._exit(0)  # as if killed: nothing is rewritten, the next process reads what there is
    with tempfile.TemporaryDirectory(dir=arguments.dir) as scratch:
        path = Path(scratch, "journal")
        figures = {"slots": float(arguments.slots), "record_bytes": float(RECORD_BYTES)}
        for part in ("fill", "recover"):
            figures |= _run(part, path, arguments.slots)
    cells = [(name, f"{value:,.3f}") for name, value in figures.items()]
    print(markdown(("figure", "value"), cells))
    write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
