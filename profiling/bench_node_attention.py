"""Attention on nodes: what a call costs, what travels, and what several nodes gain.

    python -P -m vllm_ssdkv.profiling.bench_node_attention --json figures.json

- *Call*: queries of one token of one layer to one node that has all pages in memory, from handing
  in to the states, over a Unix socket and over TCP on loopback. Medians.
- *Traffic*: bytes that pass through a relay in a decode step, per token and layer, against the
  formula of ``docs/internals/offload.md``.
- *Nodes*: attention to a context that is read from throttled drives, on one node and on several,
  as GB/s of K and V, and as a part of linear.

Contexts are random; shapes are those of a model with 32 query heads, 8 KV heads of 128 channels.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.node.client.attention import AttentionWire
from vllm_ssdkv.node.client.session import Peer
from vllm_ssdkv.node.client.volume_link import VolumeLink
from vllm_ssdkv.node.protocol.messages import Attend, AttendShape, pack
from vllm_ssdkv.profiling.bench_node import BenchNode, write_figures
from vllm_ssdkv.profiling.rig.measure import bench_parser, write_json
from vllm_ssdkv.store.format.superblock import data_file_path

HEADS, KV_HEADS, HEAD_SIZE, PAGE_TOKENS = 32, 8, 128, 16
PAGE_BYTES: Final = 2 * PAGE_TOKENS * HEAD_SIZE * 2
DRIVE_BYTES: Final = 1 << 30
DEADLINE_S: Final = 60.0


@dataclass(slots=True)
class Result:
    """Everything that was measured.

    Attributes:
        call_us: Median microseconds of a call, by kind of socket.
        best_us: Least of them, of which other work on the machine is no part.
        traffic: Bytes per token and layer by tokens of the context: counted, and by the formula.
        rates: GB/s of K and V by number of nodes, drives throttled.
        linear: Of linear, by number of nodes.
    """

    call_us: dict[str, float] = field(default_factory=dict)
    best_us: dict[str, float] = field(default_factory=dict)
    traffic: dict[int, tuple[float, float]] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    linear: dict[int, float] = field(default_factory=dict)


class Relay:
    """Passes bytes of TCP connections on, and counts them.

    Example:
        relay = Relay(address)
        connect(relay.address, None, 3.0)
    """

    def __init__(self, target: Address):
        """``target``: of the node."""
        self.counted = 0
        self._target = target.resolve()[0]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address.parse(f"tcp://127.0.0.1:{self._listener.getsockname()[1]}")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(self._target.address[:2])
            for one in (here, there):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                self.counted += len(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End it."""
        self._listener.close()


class Attending:
    """A volume on a node with blocks of random pages, and a connection that attends to them.

    Example:
        attending = Attending(address, directory, layers=1, blocks=64)
        attending.attend(0, query)
    """

    def __init__(self, address: Address, directory: Path, layers: int, blocks: int):
        """``directory``: of the node's drive."""
        peer = Peer(address, None, "volume", f"bench {os.getpid()}")
        self._link = VolumeLink(peer, Counters(), "bench/model", DEADLINE_S)
        self._link.start()
        name = uuid.uuid4()
        pages = layers * KV_HEADS
        nbytes = blocks * pages * PAGE_BYTES
        arena = np.zeros(4096, dtype=np.uint8)
        self._link.open([name.bytes], [nbytes], arena)
        data = np.random.default_rng(1).standard_normal(nbytes // 2).astype(np.float16)
        path = data_file_path(directory / "volumes" / str(name), 0)
        with path.open("r+b") as file:
            file.write(data.data)
            os.fsync(file.fileno())
        first = np.arange(blocks * pages, dtype=np.uint64) * np.uint64(PAGE_BYTES)
        digests = checksum_pages(first + np.uint64(data.ctypes.data), PAGE_BYTES)
        session = self._link.session
        if session is None:
            raise RuntimeError("the node is gone")
        shape = AttendShape(layers, KV_HEADS, 1, PAGE_TOKENS, HEADS, HEAD_SIZE, "float16", blocks)
        self.wire = AttentionWire.open(session, shape, DEADLINE_S)
        slots = np.arange(blocks, dtype=np.int64)
        places = first.astype(np.int64).reshape(blocks, pages)
        self.wire.tell_blocks(slots, places, digests.reshape(blocks, pages), DEADLINE_S)
        self.wire.tell_row(0, 0, slots, DEADLINE_S)
        self._rows = pack([0])

    def send(self, layer: int, query: NDArray[np.float16], following: int = -1) -> int:
        """Hand in queries; the number of the call."""
        message = Attend(layer, HEAD_SIZE**-0.5, self._rows, query.tobytes(), following=following)
        return self.wire.send(message, DEADLINE_S)

    def take(self, call: int) -> None:
        """Wait for an answer.

        Raises:
            RuntimeError: pages are wrong.
        """
        answer = self.wire.receive(call, time.monotonic() + DEADLINE_S)
        if answer.slots:
            raise RuntimeError("pages were not attended to")

    def close(self) -> None:
        """End the session."""
        self.wire.close()
        self._link.close(DEADLINE_S)


@contextlib.contextmanager
def node(scratch: Path, name: str, **options: object) -> Iterator[tuple[BenchNode, Path]]:
    """A node with one drive, and the directory of the drive."""
    directory = scratch / name
    directory.mkdir()
    started = BenchNode(directory, DRIVE_BYTES, 64 << 20, **options)
    try:
        yield started, directory / "device"
    finally:
        started.stop()


def measure_calls(scratch: Path, rounds: int, result: Result) -> None:
    """Time calls of one token, to a context of 64 tokens."""
    query = np.random.default_rng(2).standard_normal((1, HEADS, HEAD_SIZE)).astype(np.float16)
    with node(scratch, "calls") as (started, device):
        for kind, address in started.addresses.items():
            attending = Attending(address, device, layers=1, blocks=4)
            taken = []
            for _ in range(rounds):
                began = time.perf_counter()
                attending.take(attending.send(0, query))
                taken.append(1e6 * (time.perf_counter() - began))
            result.call_us[kind] = statistics.median(taken)
            result.best_us[kind] = min(taken)
            attending.close()


def measure_traffic(scratch: Path, lengths: Sequence[int], rounds: int, result: Result) -> None:
    """Count bytes through a relay, in calls of one token and layer."""
    query = np.random.default_rng(2).standard_normal((1, HEADS, HEAD_SIZE)).astype(np.float16)
    formula = 2 * HEADS * HEAD_SIZE + HEADS * (4 * HEAD_SIZE + 8)
    with node(scratch, "traffic", attend_gib=0.6) as (started, device):
        for tokens in lengths:
            relay = Relay(started.addresses["tcp"])
            blocks = tokens // PAGE_TOKENS
            attending = Attending(relay.address, device, layers=1, blocks=blocks)
            attending.take(attending.send(0, query))
            time.sleep(0.3)
            before = relay.counted
            for _ in range(rounds):
                attending.take(attending.send(0, query))
            result.traffic[tokens] = (relay.counted - before) / rounds, float(formula)
            attending.close()
            relay.close()


def measure_nodes(
    scratch: Path, counts: Sequence[int], bandwidth: int, rounds: int, result: Result
) -> None:
    """Time attention to a context over nodes whose drives are throttled."""
    query = np.random.default_rng(2).standard_normal((1, HEADS, HEAD_SIZE)).astype(np.float16)
    layers, blocks = 4, 512
    throttle = {"throttle": [{"bandwidth": bandwidth}], "staging": "4MiB"}
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(node(scratch, f"n{i}", io=throttle, attend_gib=0.004))
            for i in range(max(counts))
        ]
        for count in counts:
            there = [
                Attending(started.addresses["unix"], device, layers, blocks // count)
                for started, device in nodes[:count]
            ]
            began = time.perf_counter()
            for step in range(rounds * layers):
                layer = step % layers
                following = (layer + 1) % layers
                calls = [one.send(layer, query, following) for one in there]
                for one, call in zip(there, calls, strict=True):
                    one.take(call)
            taken = time.perf_counter() - began
            nbytes = rounds * layers * blocks * KV_HEADS * PAGE_BYTES
            result.rates[count] = nbytes / taken / 1e9
            for one in there:
                one.close()
    first = result.rates[counts[0]] / counts[0]
    result.linear.update({n: rate / (first * n) for n, rate in result.rates.items()})


def report(result: Result) -> str:
    """Text of the result."""
    lines = [
        f"call over {kind}: median {us:.0f} us, least {result.best_us[kind]:.0f} us"
        for kind, us in result.call_us.items()
    ]
    lines += [
        f"context of {tokens} tokens: {counted:.0f} bytes per token and layer, formula "
        f"{formula:.0f} ({100 * (counted / formula - 1):+.2f} %)"
        for tokens, (counted, formula) in result.traffic.items()
    ]
    lines += [
        f"{count} node(s): {rate:.3f} GB/s of K and V, {result.linear[count]:.2f} of linear"
        for count, rate in result.rates.items()
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all of it, and print a report."""
    parser = bench_parser(__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="calls that are timed")
    parser.add_argument("--rounds", type=int, default=3, help="walks over all layers")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[4096, 16384, 131072], help="lengths of contexts"
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 2, 4], help="numbers of nodes")
    parser.add_argument(
        "--bandwidth", type=int, default=20_000_000, help="bytes per second of a throttled drive"
    )
    parser.add_argument("--dir", type=Path, help="directory of the nodes' drives (default: /tmp)")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the cost of a call to the file that the simulator reads",
    )
    options = parser.parse_args(arguments)
    result = Result()
    with tempfile.TemporaryDirectory(prefix="ssdkv-bench-", dir=options.dir) as scratch:
        place = Path(scratch)
        measure_calls(place, options.calls, result)
        measure_traffic(place, options.tokens, 20, result)
        measure_nodes(place, options.nodes, options.bandwidth, options.rounds, result)
    print(report(result))
    write_json(options.json, asdict(result))
    if options.write:
        write_figures({kind: {"attend_s": us / 1e6} for kind, us in result.call_us.items()})


if __name__ == "__main__":
    main()
