"""Cost of encryption at rest: the cipher alone, and a whole store with and without it.

    python -P -m vllm_ssdkv.profiling.bench_encryption --dir /mnt/nvme0 --dir /mnt/nvme1

First the cipher on one core, per size of page, by that core's CPU time: this package's native
batches, and the `cryptography` package page by page where it is installed. Then two stores on the
same directories, plain and encrypted, in turns: blocks written, loaded into DRAM frames, and
streamed as a context is. GB/s by the clock and CPU seconds per GB of all threads, medians over
rounds; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vllm_ssdkv import _io
from vllm_ssdkv.base.sizes import MIB, format_size
from vllm_ssdkv.profiling.rig.measure import (
    bench_parser,
    markdown,
    median_ratio,
    scratch_directories,
    write_json,
)
from vllm_ssdkv.profiling.rig.store import StoreRig, store_config
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

PAGES = (8192, 64 * 1024, 1024 * 1024)
CIPHER_BYTES = 16 << 20
SHAPE = SlotGeometry("paged", layers=32, heads=8, groups=1, payload_bytes=8192)
"""A block of 16 tokens of an 8-billion-parameter model: 256 pages, 2 MiB."""
PHASES = ("write", "load", "stream")


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement: GB/s by the clock, and CPU seconds of the whole process per GB."""

    rate: float
    cpu: float


# ---- the cipher ----


def _per_core(work: Callable[[], object], nbytes: int, repeat: int) -> float:
    """GB per second of this thread's CPU time, median."""
    rates = []
    for _ in range(repeat):
        begin = time.thread_time()
        work()
        rates.append(nbytes / (time.thread_time() - begin) / 1e9)
    return statistics.median(rates)


def cipher_speed(page: int, repeat: int, total: int = CIPHER_BYTES) -> dict[str, float]:
    """GB/s per core of pages of this size, by name; in place where the library can."""
    count = total // page
    data = np.frombuffer(secrets.token_bytes(total), dtype=np.uint8).copy()
    steps = np.arange(count, dtype=np.uint64)[None, :] * np.uint64(page)
    addresses = np.uint64(data.ctypes.data) + steps
    keys, identities = np.zeros((1, 32), np.uint8), np.zeros((1, 72), np.uint8)
    tags = np.zeros((1, count, 16), np.uint8)

    def seal() -> None:
        sealed = _io.gcm_seal(keys, identities, 0, addresses, addresses, page, 1)
        tags[:] = sealed.reshape(1, count, 16)

    def unseal() -> None:
        seal()
        if not _io.gcm_open(keys, identities, 0, addresses, page, tags, 1).all():
            raise RuntimeError("a page was not opened")

    found = {"native seal": _per_core(seal, total, repeat)}
    both = _per_core(unseal, total, repeat)
    found["native open"] = 1 / max(1e-9, 1 / both - 1 / found["native seal"])
    found["xxh3-64"] = _per_core(lambda: _io.checksum(addresses.ravel(), page, 1), total, repeat)
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return found
    other, nonce, associated = AESGCM(bytes(32)), bytes(12), bytes(72)
    pieces = [data[i * page : (i + 1) * page].data for i in range(count)]
    sealed = [other.encrypt(nonce, piece, associated) for piece in pieces]
    found["cryptography encrypt"] = _per_core(
        lambda: [other.encrypt(nonce, piece, associated) for piece in pieces], total, repeat
    )
    found["cryptography decrypt"] = _per_core(
        lambda: [other.decrypt(nonce, piece, associated) for piece in sealed], total, repeat
    )
    return found


# ---- the store ----


class Bench(StoreRig):
    """One store and blocks that go through it."""

    def load_all(self) -> None:
        """Load every block from the devices."""
        self.forget()
        self.load()

    def begin_stream(self) -> None:
        """Learn the seals of a context, and have none of it in DRAM."""
        self.store.extend_context("r", 0, self.slots)
        self.forget()
        self.load(to=self.slots[:0])
        self.forget()

    def stream(self) -> None:
        """Bring every layer of every block in."""
        walk = self.store.stream([self.slots])
        for layer in range(self.store.files.geometry.layers):
            for _ in walk.pieces(layer):
                pass
        walk.close()
        if walk.poisoned:
            raise RuntimeError("a block was not what was written")

    def end_stream(self) -> None:
        """The context is gone."""
        self.store.drop_context("r")


def _timed(work: Callable[[], None], nbytes: int) -> Speed:
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, spent = time.perf_counter() - begin, time.process_time() - cpu
    return Speed(nbytes / seconds / 1e9, spent / (nbytes / 1e9))


def one_round(bench: Bench) -> dict[str, Speed]:
    """Every phase once."""
    nbytes = len(bench.slots) * bench.store.files.geometry.pages * SHAPE.page_bytes
    found = {"write": _timed(bench.write, nbytes), "load": _timed(bench.load_all, nbytes)}
    bench.begin_stream()
    found["stream"] = _timed(bench.stream, nbytes)
    bench.end_stream()
    return found


@contextmanager
def _stores(
    directories: Sequence[Path], shape: SlotGeometry, blocks: int
) -> Iterator[dict[str, Bench]]:
    """A plain and an encrypted store beside each other, below each directory."""
    os.environ["SSDKV_BENCH_KEY"] = secrets.token_hex(32)
    opened: dict[str, Bench] = {}
    try:
        for name in ("plain", "encrypted"):
            encrypted = name == "encrypted"
            paths = [directory / name for directory in directories]
            for path in paths:
                path.mkdir()
            geometry = replace(shape, encrypted=encrypted)
            options: dict[str, object] = {"mode": "page"}
            if encrypted:
                options["encryption"] = {"key_env": "SSDKV_BENCH_KEY"}
            config = store_config(paths, geometry, blocks, dram=192 * MIB, **options)
            opened[name] = Bench(config, geometry, blocks, name=name)
        yield opened
    finally:
        for bench in opened.values():
            bench.close()


def store_speed(
    directories: Sequence[Path], blocks: int, rounds: int, shape: SlotGeometry = SHAPE
) -> dict[str, dict[str, list[Speed]]]:
    """Phase, then ``plain`` or ``encrypted``, to one measurement per round."""
    found: dict[str, dict[str, list[Speed]]] = {
        phase: {"plain": [], "encrypted": []} for phase in PHASES
    }
    with _stores(directories, shape, blocks) as benches:
        for bench in benches.values():
            bench.write()  # the files get their blocks
        for number in range(rounds):
            # In turns, each first as often as the other: a drive may remember who came before.
            for name in sorted(benches, reverse=number % 2 == 0):
                for phase, speed in one_round(benches[name]).items():
                    found[phase][name].append(speed)
    return found


# ---- the report ----


def _median(speeds: Sequence[Speed]) -> Speed:
    return Speed(
        statistics.median(s.rate for s in speeds), statistics.median(s.cpu for s in speeds)
    )


def report(
    ciphers: dict[int, dict[str, float]], phases: dict[str, dict[str, list[Speed]]]
) -> list[str]:
    """Two tables in Markdown."""
    version, error = _io.libcrypto()
    names = list(next(iter(ciphers.values())))
    sealed = [
        [format_size(page), *(f"{speeds[name]:.2f}" for name in names)]
        for page, speeds in ciphers.items()
    ]
    rows = []
    for phase, by_name in phases.items():
        plain, encrypted = _median(by_name["plain"]), _median(by_name["encrypted"])
        ratio = median_ratio(
            (one.rate for one in by_name["encrypted"]), (one.rate for one in by_name["plain"])
        )
        cells = (plain.rate, encrypted.rate, ratio, plain.cpu, encrypted.cpu)
        rows.append([phase, *(f"{cell:.2f}" for cell in cells)])
    columns = ("store", "plain GB/s", "encrypted GB/s", "ratio")
    return [
        f"AES-256-GCM on one core, GB/s of CPU time; {version or error}",
        "",
        markdown(("page", *names), sealed),
        "",
        markdown((*columns, "plain CPU s/GB", "encrypted CPU s/GB"), rows),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write JSON if asked."""
    parser = bench_parser(__doc__)
    parser.add_argument("--dir", action="append", type=Path, help="device (repeat for several)")
    parser.add_argument("--blocks", type=int, default=256, help="blocks of 2 MiB in each store")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    with scratch_directories(given.dir) as directories:
        ciphers = {page: cipher_speed(page, given.rounds) for page in PAGES}
        phases = store_speed(directories, given.blocks, given.rounds)
    print("\n".join(report(ciphers, phases)))
    figures = {
        phase: {name: [[s.rate, s.cpu] for s in speeds] for name, speeds in by_name.items()}
        for phase, by_name in phases.items()
    }
    write_json(given.json, {"cipher": ciphers, "store": figures})


if __name__ == "__main__":
    main()
