"""The stage ``store``: the store's memory, copies and files below a KV cache on a GPU."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.config.io_engine import EngineKind, EngineOptions
from vllm_ssdkv.connector.worker.block_copy import BlockPort, LeavingBlocks, OpaquePort
from vllm_ssdkv.connector.worker.device_memory import hot_memory
from vllm_ssdkv.connector.worker.paged_port import PagedPort
from vllm_ssdkv.connector.worker.pinning import pin_arena, unpin_arena
from vllm_ssdkv.connector.worker.step_timer import StepTimer
from vllm_ssdkv.connector.worker.stream_fence import StreamFence
from vllm_ssdkv.kernels.dense import CpuKernels, select_kernels, wait_for
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.tensor_digest import digest_tensors
from vllm_ssdkv.profiling.gpu_pack.stage import Case, StageRun, scratch
from vllm_ssdkv.profiling.gpu_pack.store_rig import PagedRig, bytes_at
from vllm_ssdkv.store.cache.frames import FrameCache, FrameState
from vllm_ssdkv.store.devices.direct_io import turn_on_direct
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry, round_up
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import IoEngine, Op
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.summary_rows import (
    SummaryRows,
    channels_offset,
    row_bytes,
    with_summaries,
)

ENGINES: Final[tuple[EngineKind, ...]] = ("threads", "uring")

_REQUEST: Final = MIB
_DEPTH: Final = 32
_PATIENCE_S: Final = 60.0
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)

Ids = NDArray[np.int64]


def run(run: StageRun) -> None:
    """Run all cases; raises ``RuntimeError`` where there is no GPU."""
    device = run.device
    with scratch(run) as folder:
        for name, work in _cases(device, folder, small=run.rehearsal):
            if not run.is_done(name):
                with run.case(name) as case:
                    work(case)


def _cases(
    device: torch.device, folder: Path, *, small: bool
) -> Iterator[tuple[str, Callable[[Case], None]]]:
    """All cases in their order."""
    arena = 64 * MIB if small else 8192 * MIB
    yield "pinning of the arena", partial(_pin, device=device, nbytes=arena)
    of_blocks: dict[str, Any] = {"device": device, "small": small}
    for together in (True, False):
        lies = "in one allocation" if together else "in one allocation each"
        opaque = partial(_opaque, together=together, **of_blocks)
        yield f"blocks as they lie, layers {lies}", opaque
    for dtype in _DTYPES[:1] if small else _DTYPES:
        for kind in ("none", "bounds", "channels"):
            name = f"pages of {str(dtype).removeprefix('torch.')}, summaries: {kind}"
            yield f"blocks in {name}", partial(_paged, dtype=dtype, kind=kind, **of_blocks)
    fence = partial(_fence, device=device, rounds=3 if small else 60)
    yield "loads behind the forward pass under random delays", fence
    yield "times of steps", partial(_times, device=device)
    weights = (16 if small else 2048) * MIB
    yield "digest of the weights", partial(_digest, device=device, nbytes=weights)
    of_store: dict[str, Any] = {"device": device, "folder": folder}
    for engine in ENGINES:
        nbytes = (16 if small else 2048) * MIB
        disk = partial(_disk, kind=engine, nbytes=nbytes, **of_store)
        yield f"reads of the disk, {engine}", disk
        store = partial(_whole_store, engine=engine, channels=False, small=small, **of_store)
        yield f"store with bounds and pages in HBM, {engine}", store
    store = partial(_whole_store, engine="auto", channels=True, small=small, **of_store)
    yield "store with channels in DRAM", store


@contextmanager
def _pinned(nbytes: int, device: torch.device) -> Iterator[Arena]:
    arena = Arena(round_up(nbytes, PAGE_ALIGN))
    pinned = False
    try:
        if device.type == "cuda":
            pin_arena(arena, device)
            pinned = True
        yield arena
    finally:
        if pinned:
            unpin_arena(arena, device)
        arena.close()


def _pin(case: Case, device: torch.device, nbytes: int) -> None:
    """Pin, look whether CUDA knows, and copy both ways."""
    begin = time.perf_counter()
    with _pinned(nbytes, device) as arena:
        seconds = time.perf_counter() - begin
        case.figure("memory", nbytes / 2**30, "GiB")
        case.figure("pinning", nbytes / seconds / 1e9, "GB/s")
        part = min(nbytes, 1024 * MIB)
        host = torch.from_numpy(arena.view(0, part))
        if device.type == "cuda" and not host.is_pinned():
            raise BenchError("CUDA does not know the arena as pinned memory")
        host.copy_(torch.arange(part // 8).view(torch.uint8))
        there = torch.empty(part, dtype=torch.uint8, device=device)
        seconds = _seconds(device, lambda: there.copy_(host, non_blocking=True))
        case.figure("to the device", part / seconds / 1e9, "GB/s")
        host.zero_()
        seconds = _seconds(device, lambda: host.copy_(there, non_blocking=True))
        case.figure("to the arena", part / seconds / 1e9, "GB/s")
        if not torch.equal(host, torch.arange(part // 8).view(torch.uint8)):
            raise BenchError("other bytes came back")
        words = np.arange(0, part // 8, 4097, dtype=np.uint64)
        found = bytes_at(np.uint64(arena.address) + words * np.uint64(8), 8, device)
        if not np.array_equal(found.view(np.uint64).ravel(), words):
            raise BenchError("a kernel reads other words of the arena than lie there")


def _opaque(case: Case, device: torch.device, *, together: bool, small: bool) -> None:
    """Blocks of reuse mode to frames and back, against what the CPU's port makes of them."""
    layers, blocks = (3, 10) if small else (32, 256)
    payload = 5000 if small else 65536
    geometry = SlotGeometry("opaque", layers, 1, 1, payload)
    memory = torch.randint(0, 256, (layers, 2 * blocks, payload), dtype=torch.uint8)
    there = memory.to(device)
    caches = list(there) if together else [layer.clone() for layer in there]
    ids = np.random.default_rng(1).permutation(blocks).astype(np.int64)
    with _pinned(2 * blocks * geometry.frame_bytes, device) as arena:
        arena.view(0, arena.nbytes)[:] = 0
        frames = FrameCache(arena, 0, geometry.frame_bytes, 2 * blocks, 2 * blocks)
        port = OpaquePort(caches, geometry, frames)
        reference = OpaquePort(list(memory), geometry, frames)
        _both_ways(case, device, (port, reference), frames, ids, (None, None), geometry)
    for cache in caches:
        if not torch.equal(cache[ids + blocks], cache[ids]):
            raise BenchError("other bytes came back")


def _paged(case: Case, device: torch.device, dtype: torch.dtype, kind: str, *, small: bool) -> None:
    """Blocks of page mode to frames and rows and back, against what the native kernels make."""
    layers, blocks = (2, 6) if small else (16, 64)
    layout = BlockLayout.unpadded(32, 16, 2 if small else 8, 64 if small else 128, dtype)
    geometry = _geometry(layout, layers, kind)
    elements = layout.block_bytes // dtype.itemsize
    memory = [torch.randn((2 * blocks, elements)).to(dtype) for _ in range(layers)]
    caches = [layer.to(device) for layer in memory]
    ids = np.random.default_rng(2).permutation(blocks).astype(np.int64)
    frame_bytes = 2 * blocks * geometry.frame_bytes
    channels = kind == "channels"
    size = blocks * row_bytes(geometry, layout.page_tokens, channels=channels)
    with _pinned(frame_bytes + 2 * size, device) as arena:
        arena.view(0, arena.nbytes)[:] = 0
        frames = FrameCache(arena, 0, geometry.frame_bytes, 2 * blocks, 2 * blocks)
        port = PagedPort(select_kernels(device), caches, layout, geometry, frames)
        reference = PagedPort(CpuKernels(), memory, layout, geometry, frames)

        def rows(which: int) -> SummaryRows | None:
            if kind == "none":
                return None
            first = np.uint64(arena.address + frame_bytes + which * size)
            places = first + np.arange(blocks, dtype=np.uint64) * np.uint64(size // blocks)
            at = channels_offset(geometry, layout.page_tokens) if channels else -1
            return SummaryRows(places, at)

        ports = port, reference
        _both_ways(case, device, ports, frames, ids, (rows(0), rows(1)), geometry)
        made = [arena.view(frame_bytes + which * size, size) for which in range(2)]
        if not np.array_equal(made[0], made[1]):
            raise BenchError("other summaries than the native kernels make")
    for cache in caches:
        if not torch.equal(cache[ids + blocks], cache[ids]):
            raise BenchError("other bytes came back")


def _both_ways(
    case: Case,
    device: torch.device,
    ports: tuple[BlockPort, BlockPort],
    frames: FrameCache,
    ids: Ids,
    rows: tuple[SummaryRows | None, SummaryRows | None],
    geometry: SlotGeometry,
) -> None:
    """Save blocks ``ids`` with both ports, with the first one layer by layer, too, compare the
    frames, and load them behind."""
    count = len(ids)
    held = frames.take(np.arange(2 * count, dtype=np.int64), FrameState.HELD)
    taken, wanted = held[:count], held[count:]
    port, reference = ports
    reference.save(LeavingBlocks(ids, wanted, rows[1]))
    blocks = LeavingBlocks(ids, taken, rows[0])
    nbytes = count * geometry.kv_pages * geometry.payload_bytes

    def by_layers() -> None:
        for layer in range(geometry.layers):
            port.save_layer(layer, blocks)

    def whole() -> None:
        port.save(blocks)

    for name, save in (("", whole), (", layer by layer", by_layers)):
        for frame in taken.tolist():
            frames.view(frame)[:] = 0
        save()
        for one, other in zip(taken.tolist(), wanted.tolist(), strict=True):
            if not np.array_equal(frames.view(one), frames.view(other)):
                raise BenchError(f"frame {one} holds other bytes than the CPU's port puts there")
        case.figure(f"to frames{name}", nbytes / _seconds(device, save) / 1e9, "GB/s")
    seconds = _seconds(device, lambda: port.load(taken, ids + count))
    case.figure("to blocks", nbytes / seconds / 1e9, "GB/s")


def _geometry(layout: BlockLayout, layers: int, kind: str) -> SlotGeometry:
    plain = SlotGeometry("paged", layers, layout.kv_heads, layout.groups, layout.page_payload_bytes)
    if kind == "none":
        return plain
    return with_summaries(plain, layout.page_tokens, channels=kind == "channels")


def _fence(case: Case, device: torch.device, rounds: int) -> None:
    """A loader's copies must come after what the forward pass has queued to write to their blocks.

    The same without a fence must be seen to go wrong, or else the delays show nothing.
    """
    wrong = sum(_race(device, seed, fenced=True) for seed in range(rounds))
    case.figure("rounds", rounds)
    case.figure("overwritten loads", wrong)
    if wrong:
        raise BenchError(f"{wrong} of {rounds} loads were overwritten by the step before")
    if device.type == "cuda":
        control = sum(_race(device, seed, fenced=False) for seed in range(10))
        case.figure("overwritten without a fence, of 10", control)
        if control == 0:
            raise BenchError("without a fence nothing went wrong either: the delays were too short")


def _race(device: torch.device, seed: int, *, fenced: bool) -> bool:
    """Check a load for bytes that a step overwrote, which had been queued before it."""
    draw = np.random.default_rng(seed)
    layers, blocks, payload = 4, 16, 65536
    geometry = SlotGeometry("opaque", layers, 1, 1, payload)
    caches = list(torch.zeros((layers, blocks, payload), dtype=torch.uint8, device=device))
    ids = draw.permutation(blocks)[:8].astype(np.int64)
    which = torch.from_numpy(ids).to(device)
    late, busy = float(draw.uniform(0, 0.002)), float(draw.uniform(0.004, 0.02))
    with _pinned(8 * geometry.frame_bytes, device) as arena:
        arena.view(0, arena.nbytes)[:] = 7
        frames = FrameCache(arena, 0, geometry.frame_bytes, 8, 8)
        held = frames.take(np.arange(8, dtype=np.int64), FrameState.HELD)
        port = OpaquePort(caches, geometry, frames)
        fence = StreamFence(device)
        failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        queued = threading.Event()

        def loader() -> None:
            try:
                queued.wait(_PATIENCE_S)
                time.sleep(late)
                if fenced:
                    fence.follow()
                port.load(held, ids)
            except Exception as failure:  # noqa: BLE001 - told by the thread that waits
                failures.put(failure)

        thread = threading.Thread(target=loader)
        thread.start()
        with _side_stream(device):
            _delay(device, busy)
            for cache in caches:
                cache.index_fill_(0, which, 9)
            fence.set()
            queued.set()
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            raise BenchError("a load did not end")
        if not failures.empty():
            raise failures.get()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return not all(bool((cache[which] == 7).all()) for cache in caches)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """The forward pass's stream: another one than the loader's."""
    if device.type == "cpu":
        yield
        return
    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    stream.wait_stream(cuda.current_stream(device))
    with cuda.stream(stream):
        yield


def _delay(device: torch.device, seconds: float) -> None:
    """Keep the current stream busy for about so long."""
    if device.type == "cuda":
        cuda: Any = torch.cuda
        cuda._sleep(int(seconds * 1.5e9))


def _times(case: Case, device: torch.device) -> None:
    """A step's time is that of the device, and asking for it waits for nothing."""
    timer = StepTimer(device)
    timer.begin(3)
    begin = time.perf_counter()
    _delay(device, 0.05)
    if device.type == "cpu":
        time.sleep(0.05)
    timer.end()
    queued = time.perf_counter() - begin
    early = timer.take()
    wait_for(device)
    passed = time.perf_counter() - begin
    found = early or timer.take()
    case.figure("queued in", queued * 1e3, "ms")
    case.figure("step", found[0][1] * 1e3 if found else 0.0, "ms")
    case.figure("wall", passed * 1e3, "ms")
    if device.type == "cuda" and early:
        raise BenchError("a step counts as over that the device had not ended")
    if len(found) != 1 or found[0][0] != 3 or not 0.5 * passed < found[0][1] <= passed + 1e-3:
        raise BenchError(f"step 3 took {passed:.4f} s, the timer says {found}")


def _digest(case: Case, device: torch.device, nbytes: int) -> None:
    """Digests of weights of several dtypes on the device and the host, and how fast they are."""
    shapes: list[tuple[torch.dtype, int]] = [(torch.bfloat16, 2), (torch.float32, 4)]
    tensors = [
        torch.randint(0, 256, (nbytes // 4,), dtype=torch.uint8).view(dtype).view(-1, 16)
        for dtype, _ in shapes
    ]
    there = [tensor.to(device) for tensor in tensors]
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    want = digest_tensors(tensors)
    if not np.array_equal(digest_tensors(there), want):
        raise BenchError("the device's digest is another one than the host's")
    for name, held, where in (("device", there, device), ("host", tensors, torch.device("cpu"))):
        seconds = _seconds(where, partial(digest_tensors, held))
        case.figure(f"on the {name}", total / seconds / 1e9, "GB/s")


def _disk(case: Case, device: torch.device, folder: Path, kind: EngineKind, nbytes: int) -> None:
    """Write a file, read it into pinned memory, and read it on into the device's memory.

    Raises ``EngineUnavailableError`` where the engine cannot run.
    """
    path = folder / f"{kind}.bin"
    piece = min(nbytes // 4, 256 * MIB)
    with _pinned(2 * piece, device) as arena:
        arena.view(0, 2 * piece)[:] = np.random.default_rng(3).integers(0, 256, 2 * piece, np.uint8)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            direct = turn_on_direct(fd, str(path), "auto")
            case.figure("O_DIRECT", "yes" if direct else "no")
            engine = open_engine(
                EngineOptions(engine=kind, queue_depth=_DEPTH), [fd], [path], arena
            )
            try:
                _write_and_read(case, device, engine, arena, piece, nbytes)
            finally:
                engine.close(_PATIENCE_S)
        finally:
            os.close(fd)
            path.unlink()


def _write_and_read(
    case: Case, device: torch.device, engine: IoEngine, arena: Arena, piece: int, nbytes: int
) -> None:
    """The two halves of the arena in turns: one is read into while the other is copied on."""
    halves = [torch.from_numpy(arena.view(half * piece, piece)) for half in range(2)]
    want = digest_tensors(halves)
    pieces = nbytes // piece

    def move(op: Op, number: int) -> Callable[[], None]:
        offset = np.arange(0, piece, _REQUEST, dtype=np.uint64)
        length = np.full(len(offset), _REQUEST, np.uint32)
        batch = engine.submit(
            op,
            np.zeros(len(offset), np.uint16),
            offset + np.uint64(number * piece),
            length,
            offset + np.uint64(number % 2 * piece),
        )

        def end() -> None:
            if not batch.wait(_PATIENCE_S) or (batch.results() != length).any():
                raise BenchError(f"{op.name.lower()} {number} failed: {batch.results().min()}")

        return end

    begin = time.perf_counter()
    for number in range(pieces):
        move(Op.WRITE, number)()
    case.figure("writes", nbytes / (time.perf_counter() - begin) / 1e9, "GB/s")
    arena.view(0, 2 * piece)[:] = 0
    begin = time.perf_counter()
    for number in range(pieces):
        move(Op.READ, number)()
    case.figure("reads to pinned memory", nbytes / (time.perf_counter() - begin) / 1e9, "GB/s")
    arena.view(0, 2 * piece)[:] = 0
    there = torch.zeros((pieces, piece), dtype=torch.uint8, device=device)
    begin = time.perf_counter()
    ends = move(Op.READ, 0)
    for number in range(pieces):
        ends()
        following = move(Op.READ, number + 1) if number + 1 < pieces else _nothing
        there[number].copy_(halves[number % 2], non_blocking=True)
        wait_for(device)
        ends = following
    case.figure("reads to the device", nbytes / (time.perf_counter() - begin) / 1e9, "GB/s")
    found = digest_tensors(list(there))
    if not np.array_equal(found, np.resize(want, pieces)):
        raise BenchError("other bytes reached the device than were written")


def _nothing() -> None:
    """Nothing is on its way."""


def _whole_store(
    case: Case,
    device: torch.device,
    folder: Path,
    engine: EngineKind,
    channels: bool,
    *,
    small: bool,
) -> None:
    """Blocks from the device to the disk and back; chosen pages and channels where they belong."""
    layout = BlockLayout.unpadded(64, 16, 2 if small else 8, 128, torch.bfloat16)
    layers, blocks = (2, 8) if small else (8, 256)
    place = folder / f"store-{engine}-{channels}"
    place.mkdir()
    rig = PagedRig(place, layout, layers, blocks, device, engine=engine, channels=channels)
    try:
        case.figure("engine", rig.engine)
        if not channels:
            pages = blocks * rig.geometry.kv_pages // 4
            nbytes = pages * rig.geometry.page_bytes
            rig.store.keep_hot_pages(hot_memory(nbytes, layout, rig.geometry, device))
        nbytes = blocks * rig.geometry.slot_bytes
        case.figure("stored", nbytes / rig.save() / 1e9, "GB/s")
        rig.forget()
        outcome = rig.load_back()
        case.figure("loaded from the disk", nbytes / outcome.ssd_s / 1e9, "GB/s")
        _compare_blocks(rig, "from the disk")
        for cache in rig.caches:
            cache[blocks:] = 0
        outcome = rig.load_back()
        case.figure("loaded from DRAM", nbytes / outcome.dram_s / 1e9, "GB/s")
        if outcome.tokens_from_ssd:
            raise BenchError("what was in DRAM was read again")
        _compare_blocks(rig, "from DRAM")
        rig.forget()
        if channels:
            _look_at_channels(rig)
        else:
            _choose_pages(case, rig)
    finally:
        rig.close()


def _compare_blocks(rig: PagedRig, what: str) -> None:
    blocks = len(rig.slots)
    for layer, cache in enumerate(rig.caches):
        if not torch.equal(cache[blocks:], cache[:blocks]):
            raise BenchError(f"layer {layer}: other bytes came {what}")


def _choose_pages(case: Case, rig: PagedRig) -> None:
    """The same pages chosen in two steps: in the second they lie in the device's memory."""
    draw = np.random.default_rng(4)
    layer = rig.geometry.layers - 1
    saved = rig.pages(layer)
    hot: list[int] = []
    blocks = draw.integers(0, len(rig.slots), len(rig.slots))
    numbers = draw.integers(0, rig.geometry.pages_per_layer, len(rig.slots))
    for _ in range(2):
        chosen = rig.store.choose([rig.slots], [0])
        try:
            for start in range(0, len(blocks), chosen.room):
                block, number = (part[start : start + chosen.room] for part in (blocks, numbers))
                fetch = chosen.fetch_hot(chosen.pages(layer, block, number))
                good = chosen.complete(fetch, block)
                if not good.all():
                    raise BenchError(f"{(~good).sum()} of {len(good)} pages did not come")
                found = bytes_at(fetch.address, rig.geometry.payload_bytes, rig.device)
                if not np.array_equal(found, saved[block, number]):
                    raise BenchError("a chosen page holds other bytes than were saved")
                chosen.release(fetch)
            hot.append(chosen.fetched.hot)
        finally:
            chosen.close()
    case.figure("pages in the device's memory, first step", hot[0])
    case.figure("second step", hot[1])
    if not hot[1]:
        raise BenchError("no page was found in the device's memory")


def _look_at_channels(rig: PagedRig) -> None:
    """Channel-major K of every block, where selectors look for it."""
    layout = rig.layout
    chosen = rig.store.choose([rig.slots], [0])
    try:
        if chosen.left_out or not chosen.holds_channels:
            raise BenchError("channels are not where they were asked for")
        shape = layout.kv_heads, layout.groups, 2, layout.page_tokens, layout.head_size
        size = layout.kv_heads * layout.head_size * layout.block_tokens * layout.dtype.itemsize
        for layer, cache in enumerate(rig.caches):
            found = bytes_at(chosen.channels(layer), size, rig.device)
            key = cache[: len(rig.slots)].view(-1, *shape)[:, :, :, 0]
            want = key.permute(0, 1, 4, 2, 3).reshape(len(rig.slots), -1).contiguous()
            if not np.array_equal(found, want.view(torch.uint8).cpu().numpy()):
                raise BenchError(f"layer {layer}: channels hold other bytes than K")
    finally:
        chosen.close()


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median of three runs after a first one, until the device has ended."""
    work()
    wait_for(device)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - begin)
    return sorted(times)[1]
