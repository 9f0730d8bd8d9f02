"""Cost of a node: a hit and a miss against the embedded store, and bytes over TCP.

    python -P -m vllm_ssdkv.profiling.bench_node --json figures.json

In one run and in turns, medians over rounds:

- *Hit*: from the call until all blocks are where HBM would be; all of them in DRAM, or none. The
  same blocks in an embedded store, in a node behind a Unix socket, and behind TCP on loopback.
- *Miss*: a look-up of a prefix that nobody has stored, in the process, and at the node.
- *Bytes*: 64 MiB at once over a channel on loopback, with and without keys, between two processes,
  against ``iperf3``. Without that program a plain socket copy takes its place, and the table says
  so.

*Figures* are what a simulator needs: seconds per call, per block and per byte, fitted to the hits
from DRAM by least squares. ``--write`` puts them where ``profiling/simulation`` reads them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import BenchError, NodeError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.base.sizes import MIB, format_size, parse_size
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.node.client.remote_index import RemoteIndex
from vllm_ssdkv.node.client.remote_store import RemoteStore
from vllm_ssdkv.node.client.session import Peer
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.credentials import Credentials, make_keys
from vllm_ssdkv.node.protocol.frames import DEFAULT_LIMITS, VERSIONS
from vllm_ssdkv.node.protocol.messages import Copied, Done, Role, StoreSpec
from vllm_ssdkv.node.protocol.sockets import Listener, connect
from vllm_ssdkv.profiling.rig.measure import (
    bench_parser,
    by_turns,
    markdown,
    median_ratio,
    timed,
    write_json,
)
from vllm_ssdkv.profiling.rig.store import I64, Hbm, StoreRig, store_config
from vllm_ssdkv.profiling.simulation.description import DATA
from vllm_ssdkv.profiling.simulation.hardware import NODE_FIGURES
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.open import StorePlace, open_index, open_rank
from vllm_ssdkv.store.read.load_job import LoadJob
from vllm_ssdkv.store.tiered_store import TieredStore

LAYERS = 32
BLOCKS = (256 * 1024, 2 * MIB)
"""Bytes of a block, all layers."""
HITS = (8 * MIB, 32 * MIB, 64 * MIB)
DRAM_BYTES = 160 * MIB
CHAIN = 128
"""Keys of a look-up that finds nothing."""
STREAM_BYTES = 64 * MIB
TURNS = 5
PATIENCE_S = 60.0
FIGURES = DATA / NODE_FIGURES
MODEL = "bench/model"


@dataclass(frozen=True, slots=True)
class Hit:
    """One size of block and hit.

    Attributes:
        warm: All of it in DRAM, or nothing.
        ms: Median milliseconds of each way.
        best_ms: Least milliseconds, of which other work on the machine is no part.
        ratio: Median of the rounds' ratios to the embedded store.
    """

    block_bytes: int
    hit_bytes: int
    warm: bool
    ms: dict[str, float]
    best_ms: dict[str, float]
    ratio: dict[str, float]


@dataclass(slots=True)
class Result:
    """Everything that was measured.

    Attributes:
        hits: Hits from DRAM (``warm``) and from the drives.
        miss_us: Microseconds of a look-up by way.
        stream: GB/s of 64 MiB over a channel, by kind of socket.
        rival: Program that ``stream`` is compared with, and its GB/s.
        figures: Seconds per call, per block and per byte, by kind of socket.
    """

    hits: list[Hit] = field(default_factory=list)
    miss_us: dict[str, float] = field(default_factory=dict)
    stream: dict[str, float] = field(default_factory=dict)
    rival: tuple[str, float] = ("", 0.0)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)


# ---- stores ----


@dataclass(slots=True)
class Stored:
    """Blocks in a store, in the order of their keys."""

    slots: I64
    epochs: I64
    keys: list[bytes]


class Side:
    """One way to a store that holds the blocks. ``store`` is embedded, or in a node."""

    def __init__(self, store: TieredStore | RemoteStore, stored: Stored):
        self._store, self._stored = store, stored

    def load(self, blocks: slice, *, warm: bool | None) -> float:
        """Seconds in which these blocks were loaded.

        Args:
            blocks: Of those that are stored.
            warm: Whether all of them must have been in DRAM, or none; None: either.
        """
        stored, count = self._stored, blocks.stop - blocks.start
        job = LoadJob(
            "bench",
            stored.slots[blocks],
            stored.epochs[blocks],
            tuple(stored.keys[blocks]),
            np.arange(1, count + 1, dtype=np.int64),
        )
        begin = time.perf_counter()
        self._store.load(job)
        outcomes = self._store.take_load_outcomes(PATIENCE_S)
        seconds = time.perf_counter() - begin
        if len(outcomes) != 1 or not outcomes[0].complete:
            raise BenchError("a load failed, or did not end in time")
        other = outcomes[0].tokens_from_ssd if warm else outcomes[0].tokens_from_dram
        if warm is not None and other:
            raise BenchError(f"{other} tokens did not come from where they should")
        return seconds


def _save(store: TieredStore | RemoteStore, stored: Stored) -> None:
    """Save random blocks, and wait until they are on the drives."""
    random, done = np.random.default_rng(0), 0
    frames_of = store.save_frames if isinstance(store, RemoteStore) else store.frames
    while done < len(stored.slots):
        frames = store.reserve_frames(stored.slots[done : done + 16], wait=False)
        for frame in frames.tolist():
            view = frames_of.view(frame)
            view[:] = random.integers(0, 256, len(view), np.uint8)
        part = slice(done, done + len(frames))
        store.flush(stored.slots[part], stored.epochs[part], stored.keys[part])
        done += len(frames)
    written, until = 0, time.monotonic() + PATIENCE_S
    while written < done:
        good, bad = store.take_write_results()
        written += len(good)
        if bad or time.monotonic() > until:
            raise BenchError("a block was not written")
        time.sleep(0.005)


def _keys(count: int) -> list[bytes]:
    random = np.random.default_rng(1)
    return [random.bytes(32) for _ in range(count)]


@contextlib.contextmanager
def embedded(directory: Path, geometry: SlotGeometry, blocks: int, dram: int) -> Iterator[Side]:
    """Open a store in this process, with so many blocks in it."""
    config = store_config([directory], geometry, blocks, dram=dram)
    rig = StoreRig(config, geometry, blocks, hbm=Hbm(geometry, blocks), name=geometry.payload_bytes)
    stored = Stored(rig.slots, np.ones(blocks, np.int64), _keys(blocks))
    try:
        _save(rig.store, stored)
        yield Side(rig.store, stored)
    finally:
        rig.close()


# ---- a node ----


class BenchNode:
    """A node in a process of its own, at a Unix socket and on loopback.

    Example:
        node = BenchNode(directory, 2 * GIB, 160 * MIB)
        node.stop()
    """

    def __init__(self, directory: Path, capacity: int, dram: int, **more: object):
        """``more``: further options of the node."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.addresses = {
            "unix": Address.parse(f"unix://{directory}/s"),
            "tcp": Address.parse(f"tcp://127.0.0.1:{port}"),
        }
        device = directory / "device"
        device.mkdir()
        options = {
            "listen": [str(address) for address in self.addresses.values()],
            "devices": [{"path": str(device), "capacity": capacity}],
            "dram_gib": dram / 2**30,
            "store_share": 1.0,
            **more,
        }
        config = directory / "node.json"
        config.write_text(json.dumps(options))
        self._log = directory / "log"
        with self._log.open("wb") as log:
            command = [sys.executable, "-P", "-m", "vllm_ssdkv.cli.main", "node", "run"]
            self._process = subprocess.Popen(
                [*command, "--config", str(config)],
                stdout=log,
                stderr=log,
            )
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                for address in self.addresses.values():
                    connect(address, None, 1.0).close()
            except NodeError:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise BenchError(f"the node does not start: {self._log.read_text()}") from None
                time.sleep(0.1)
            else:
                return

    def stop(self) -> None:
        """End it; within the time that it has to drain."""
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _peer(address: Address, role: Role, spec: StoreSpec) -> Peer:
    return Peer(address, None, role, f"bench {os.getpid()}", 0, spec)


@contextlib.contextmanager
def at_node(
    address: Address, geometry: SlotGeometry, blocks: int, *, fill: bool
) -> Iterator[tuple[RemoteIndex, Side]]:
    """Open both halves of an engine at a node; ``fill``: save the blocks first."""
    fields: dict[str, str | int] = {"bench": geometry.payload_bytes}
    spec = StoreSpec(fields, LAYERS, geometry.payload_bytes, 1, 16, MODEL, "")
    index = RemoteIndex.open([_peer(address, "scheduler", spec)], [str(address)], Counters())
    store = RemoteStore([_peer(address, "worker", spec)], Counters(), PATIENCE_S)
    hbm = Hbm(geometry, blocks)
    try:
        store.open()
        store.start(lambda frames, ids: hbm.copy(store.load_frames.address(frames), ids))
        keys = _keys(blocks)
        if fill:
            slots = index.claim(keys)
            if (slots < 0).any():
                raise BenchError("the node has no room for the blocks")
            _save(store, Stored(slots, index.epochs(slots), keys))
            index.unpin(slots)
        slots = index.lookup(keys)
        if len(slots) != blocks:
            raise BenchError(f"the node has {len(slots)} of {blocks} blocks")
        yield index, Side(store, Stored(slots, index.epochs(slots), keys))
    finally:
        store.close()
        index.close()


# ---- hits and misses ----


def hits(
    sides: dict[str, Side], geometry: SlotGeometry, sizes: Sequence[int], rounds: int, blocks: int
) -> list[Hit]:
    """Hits of each size, warm and cold, on all sides in turns."""
    block_bytes = geometry.pages * geometry.payload_bytes
    found = []
    for size in sizes:
        asked = slice(0, size // block_bytes)
        others = slice(asked.stop, blocks)
        for warm in (True, False):
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(rounds):
                for name, side in sides.items():
                    side.load(asked if warm else others, warm=None)
                    seconds[name].append(side.load(asked, warm=warm))
            ratio = {
                name: median_ratio(times, seconds["embedded"]) for name, times in seconds.items()
            }
            ms = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
            best = {name: min(times) * 1e3 for name, times in seconds.items()}
            found.append(Hit(block_bytes, size, warm, ms, best, ratio))
    return found


def _look_anew(index: RemoteIndex, keys: Sequence[bytes]) -> I64:
    """Look keys up as in a new step: within one, a node is asked once for each."""
    index.step()
    return index.lookup(keys)


def misses(
    look: Mapping[str, Callable[[Sequence[bytes]], object]], rounds: int
) -> dict[str, float]:
    """Median microseconds of a look-up that finds nothing."""
    random = np.random.default_rng(2)
    keys = [random.bytes(32) for _ in range(CHAIN)]
    turns = {name: timed(functools.partial(lookup, keys)) for name, lookup in look.items()}
    seconds = by_turns(turns, rounds)
    return {name: statistics.median(times) * 1e6 for name, times in seconds.items()}


@contextlib.contextmanager
def _own_index(directory: Path, geometry: SlotGeometry) -> Iterator[SlotIndex]:
    config = SSDKVConfig.from_extra_config(
        {"devices": [{"path": str(directory), "capacity": "64MiB"}], "dram_gib": "64MiB"}
    )
    place = StorePlace(config, [geometry], Fingerprint({"bench": 0}))
    opened = open_rank(place, 0, Counters())
    index, rebalancer = open_index(place, Counters())
    try:
        yield index
    finally:
        rebalancer.close()
        index.close()
        opened.close()


def measure_stores(
    scratch: Path,
    block_bytes: Sequence[int],
    sizes: Sequence[int],
    rounds: int,
    dram: int = DRAM_BYTES,
) -> tuple[list[Hit], dict[str, float]]:
    """Hits and misses of an embedded store and of nodes, with so much memory each, in directories
    below ``scratch``."""
    rows: list[Hit] = []
    missed: dict[str, float] = {}
    for block in block_bytes:
        geometry = SlotGeometry("opaque", LAYERS, 1, 1, block // LAYERS)
        # What is loaded between cold hits pushes them out of DRAM.
        blocks = (max(sizes) + dram) // block
        root = scratch / f"block-{block}"
        for name in ("node", "own", "index"):
            (root / name).mkdir(parents=True)
        node = BenchNode(root / "node", 2 * blocks * geometry.slot_bytes + 64 * MIB, dram)
        try:
            with contextlib.ExitStack() as stack:
                at = {}
                for kind, address in node.addresses.items():
                    way = at_node(address, geometry, blocks, fill=kind == "unix")
                    at[kind] = stack.enter_context(way)
                own = stack.enter_context(embedded(root / "own", geometry, blocks, dram))
                sides = {"embedded": own} | {kind: side for kind, (_, side) in at.items()}
                rows += hits(sides, geometry, sizes, rounds, blocks)
                index = stack.enter_context(_own_index(root / "index", geometry))
                look = {"embedded": index.lookup}
                look |= {kind: functools.partial(_look_anew, far) for kind, (far, _) in at.items()}
                missed = misses(look, 50 * rounds)
        finally:
            node.stop()
            shutil.rmtree(root)
    return rows, missed


# ---- bytes over a channel ----


def _stream_child(address: str, keys: str) -> None:
    """Receive payloads and answer them, in a process of its own."""
    credentials = Credentials.load(Path(keys), "engine") if keys else None
    channel = connect(Address.parse(address), credentials, PATIENCE_S)
    channel.agree(VERSIONS[-1], DEFAULT_LIMITS)
    into = np.ones(STREAM_BYTES, np.uint8)
    channel.grant(2 * STREAM_BYTES)
    with contextlib.suppress(NodeError):
        while True:
            frame = channel.receive(PATIENCE_S)
            if frame.payload_bytes:
                channel.receive_payload([into.data], PATIENCE_S)
                channel.grant(frame.payload_bytes)
            channel.send(Done(), call_id=frame.call_id, answer=True, timeout=PATIENCE_S)
    channel.close()


@dataclass(frozen=True, slots=True)
class Streamed:
    """One kind of socket: GB/s of a large payload, seconds of a call without one."""

    gb_per_s: float
    call_s: float


def stream(address: Address, keys: Path | None, rounds: int) -> Streamed:
    """Measure a channel between this process and a child."""
    credentials = None if keys is None else Credentials.load(keys, "node")
    listener = Listener(address, credentials)
    code = f"from {__spec__.name} import _stream_child; import sys; _stream_child(*sys.argv[1:])"
    given = [str(listener.address), "" if keys is None else str(keys)]
    child = subprocess.Popen([sys.executable, "-P", "-c", code, *given])
    try:
        channel = listener.accept()
        if channel is None:
            raise BenchError("nobody connected")
        channel.handshake(PATIENCE_S)
        channel.agree(VERSIONS[-1], DEFAULT_LIMITS)
        found = _stream(channel, rounds)
        channel.close()
    finally:
        child.terminate()
        child.wait()
        listener.close()
    return found


def _stream(channel: Channel, rounds: int) -> Streamed:
    data = np.arange(STREAM_BYTES // 8, dtype=np.int64).data.cast("B")

    def call(payload: Sequence[memoryview]) -> float:
        begin = time.perf_counter()
        channel.send(Copied(0), payload, call_id=1, timeout=PATIENCE_S)
        channel.receive(PATIENCE_S)
        return time.perf_counter() - begin

    def with_credit() -> float:
        until = time.monotonic() + PATIENCE_S
        while channel.credits.left < STREAM_BYTES:  # comes with, or soon after, an answer
            call([])
            if time.monotonic() > until:
                raise BenchError("the other process gives no credit")
        return call([data])

    large = statistics.median(with_credit() for _ in range(rounds))
    small = statistics.median(call([]) for _ in range(100 * rounds))
    return Streamed(STREAM_BYTES / large / 1e9, small)


def iperf3(seconds: int) -> float | None:
    """GB/s of one TCP connection on loopback by iperf3; None: it is not installed."""
    program = shutil.which("iperf3")
    if program is None:
        return None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    quiet = subprocess.DEVNULL
    with subprocess.Popen([program, "-s", "-1", "-p", port], stdout=quiet) as server:
        try:
            time.sleep(0.3)
            client = [program, "-c", "127.0.0.1", "-p", port, "-J", "-t", str(seconds)]
            ended = subprocess.run(client, capture_output=True, check=True, timeout=PATIENCE_S)
        finally:
            server.terminate()
    return float(json.loads(ended.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9


def plain_copy(rounds: int) -> float:
    """GB/s of ``sendall`` to ``recv_into`` of 64 MiB between two threads over loopback."""
    server = socket.create_server(("127.0.0.1", 0))
    data, into = bytes(STREAM_BYTES), memoryview(bytearray(STREAM_BYTES))

    def send() -> None:
        with socket.create_connection(server.getsockname()) as sock:
            for _ in range(rounds):
                sock.sendall(data)

    thread = threading.Thread(target=send)
    thread.start()
    sock, _ = server.accept()
    begin = time.perf_counter()
    for _ in range(rounds):
        got = 0
        while got < STREAM_BYTES:
            got += sock.recv_into(into[got:])
    seconds = time.perf_counter() - begin
    thread.join(PATIENCE_S)
    sock.close()
    server.close()
    return rounds * STREAM_BYTES / seconds / 1e9


def measure_streams(scratch: Path, rounds: int) -> tuple[dict[str, Streamed], tuple[str, float]]:
    """Channels of each kind, and what they are compared with, in :data:`TURNS` turns."""
    keys = scratch / "keys"
    make_keys(keys, 1)
    loopback = Address.parse("tcp://127.0.0.1:0")
    name, speeds = "iperf3", []
    turns: dict[str, list[Streamed]] = {"tcp": [], "unix": [], "tls": []}
    for _ in range(TURNS):
        speed = iperf3(1)
        if speed is None:
            name, speed = "a plain socket copy (iperf3 is not installed)", plain_copy(rounds)
        speeds.append(speed)
        turns["tcp"].append(stream(loopback, None, rounds))
        turns["unix"].append(stream(Address.parse(f"unix://{scratch}/s"), None, rounds))
        turns["tls"].append(stream(loopback, keys, rounds))
    found = {
        kind: Streamed(
            statistics.median(one.gb_per_s for one in each),
            statistics.median(one.call_s for one in each),
        )
        for kind, each in turns.items()
    }
    return found, (name, statistics.median(speeds))


def figures(rows: Sequence[Hit], streams: dict[str, Streamed]) -> dict[str, dict[str, float]]:
    """Seconds per call, per block and per byte, by kind of socket.

    Per load, block and byte are of hits from DRAM, of the best round, beyond the embedded store's
    time for them: the copy into HBM that both make is not in it. None is less than 0.
    """
    found = {}
    for kind, streamed in streams.items():
        found[kind] = {"call_s": streamed.call_s, "bytes_per_s": streamed.gb_per_s * 1e9}
        warm = [row for row in rows if row.warm and kind in row.ms]
        if len(warm) < 3:
            continue
        terms = np.array([[1, row.hit_bytes // row.block_bytes, row.hit_bytes] for row in warm])
        extra = np.array([(row.best_ms[kind] - row.best_ms["embedded"]) / 1e3 for row in warm])
        load, block, byte = _fitted(terms.astype(np.float64), extra)
        found[kind] |= {"load_s": load, "block_s": block, "byte_s": byte}
    return found


def _fitted(terms: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """Fit coefficients of at least 0 by least squares; negative ones are left out, one by one."""
    kept = list(range(terms.shape[1]))
    while kept:
        found = np.linalg.lstsq(terms[:, kept], values, rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int((found * np.abs(terms[:, kept]).max(axis=0)).argmin()))
    coefficients = [0.0] * terms.shape[1]
    for place, value in zip(kept, found if kept else (), strict=True):
        coefficients[place] = float(value)
    return coefficients


def write_figures(found: Mapping[str, Mapping[str, float]]) -> None:
    """Put figures, by kind of socket, where the simulator reads them; others stay."""
    known = json.loads(FIGURES.read_text())
    for kind, figures_of_kind in found.items():
        known.setdefault(kind, {}).update(figures_of_kind)
    FIGURES.write_text(json.dumps(known, indent=1) + "\n")


def report(result: Result) -> str:
    """The tables in Markdown."""
    rows = []
    for row in result.hits:
        cells = [format_size(row.block_bytes), format_size(row.hit_bytes)]
        cells.append("DRAM" if row.warm else "drives")
        for way in ("embedded", "unix", "tcp"):
            cells.append(f"{row.ms[way]:.2f} ({row.best_ms[way]:.2f})")
        for way in ("unix", "tcp"):
            best = row.best_ms[way] / row.best_ms["embedded"]
            cells.append(f"{row.ratio[way]:.2f} ({best:.2f})")
        rows.append(cells)
    columns = ("block", "hit", "from", "embedded ms (best)", "unix", "tcp")
    lines = [markdown((*columns, "unix / embedded (of the best)", "tcp"), rows)]
    told = ", ".join(f"{way} {value:.0f} us" for way, value in result.miss_us.items())
    lines += ["", f"Miss of {CHAIN} blocks: {told}.", ""]
    name, speed = result.rival
    lines.append(f"{format_size(STREAM_BYTES)} over a channel; {name} over TCP: {speed:.2f} GB/s.")
    for kind, value in result.stream.items():
        ratio = f", {value / speed:.2f} of {name}" if kind != "unix" else ""
        lines.append(f"- {kind}: {value:.2f} GB/s{ratio}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write JSON if asked."""
    parser = bench_parser(__doc__)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="directory on an SSD")
    parser.add_argument(
        "--block", action="append", type=parse_size, help="bytes of a block, all layers"
    )
    parser.add_argument("--hit", action="append", type=parse_size, help="bytes of a hit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--write", action="store_true", help="write the numbers that the simulator reads"
    )
    given = parser.parse_args(arguments)
    result = Result()
    with tempfile.TemporaryDirectory(prefix="ssdkv-bench-", dir=given.dir) as directory:
        scratch = Path(directory)
        blocks, sizes = given.block or BLOCKS, given.hit or HITS
        result.hits, result.miss_us = measure_stores(scratch, blocks, sizes, given.rounds)
        streams, result.rival = measure_streams(scratch, given.rounds)
    result.stream = {kind: streamed.gb_per_s for kind, streamed in streams.items()}
    result.figures = figures(result.hits, streams)
    print(report(result))
    write_json(given.json, asdict(result))
    if given.write:
        write_figures(result.figures)


if __name__ == "__main__":
    main()
