"""Probe of the devices' read rates: once, before anything is stored on them, through the engine."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from vllm_ssdkv.base.errors import DeviceError
from vllm_ssdkv.base.host import is_block_device
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.config.io_engine import EngineOptions
from vllm_ssdkv.store.devices.data_device import make_directory
from vllm_ssdkv.store.devices.direct_io import DirectMode, turn_on_direct
from vllm_ssdkv.store.format.slot_geometry import STRIPE_UNIT, SUPERBLOCK_BYTES
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import IoEngine, Op
from vllm_ssdkv.store.memory.arena import Arena

logger = logging.getLogger(__name__)

PROBE_BYTES = 64 * MIB
PROBE_S = 0.3
"""A device is written, and then read, until so much is done or so much time is over."""

ALIKE = 0.8
"""Devices that reach this part of the fastest one's rate count as equal: what is less is noise, and
equal devices have the shortest list of lanes."""

STEP = 0.05
"""Weights of slower ones are multiples of this, which is the least weight, too."""

_REQUESTS = 16
_BATCH = _REQUESTS * STRIPE_UNIT


def weights_of(rates: Sequence[float]) -> list[float]:
    """Weights in proportion to rates (> 0), the fastest having 1."""
    shares = [rate / max(rates) for rate in rates]
    return [1.0 if s >= ALIKE else max(STEP, round(round(s / STEP) * STEP, 2)) for s in shares]


def read_rates(
    paths: Sequence[str],
    which: Collection[int],
    options: EngineOptions,
    direct: DirectMode,
    deadline_s: float,
) -> list[float]:
    """Bytes per second that devices read at, one after the other. Blocks for a second or so.

    A directory gets a temporary file for the time; what a raw block device holds is only read.

    Args:
        paths: All devices, in the order that the options name them in.
        which: Positions of those to measure.
        options: Of the engine.
        direct: As in :func:`open_device`.
        deadline_s: How long to wait for a batch.

    Returns:
        One rate per entry of ``which``, in ascending order.

    Raises:
        DeviceError: a device cannot be used; the text names it.
    """
    fds: list[int] = []
    arena = Arena(_BATCH)
    done = False
    try:
        for i, path in enumerate(paths):
            fds.append(_open(path, f"device {i} ({path})", direct))
        engine = open_engine(options, fds, list(paths), arena)
        try:
            rates = [_rate(engine, i, fds[i], paths[i], deadline_s) for i in sorted(which)]
        finally:
            done = engine.close(deadline_s)
    finally:
        for fd in fds:
            os.close(fd)
        if done:  # else an I/O may still touch it
            arena.close()
    for i, rate in zip(sorted(which), rates, strict=True):
        logger.info("ssdkv: device %s reads %.0f MB/s", paths[i], rate / 1e6)
    return rates


def _open(path: str, what: str, direct: DirectMode) -> int:
    try:
        if is_block_device(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        else:
            make_directory(Path(path), what)
            fd, name = tempfile.mkstemp(prefix="probe.", dir=path)
            os.unlink(name)
    except OSError as error:
        raise DeviceError(f"{what} cannot be measured: {error.strerror}") from error
    try:
        turn_on_direct(fd, what, direct)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _rate(engine: IoEngine, device: int, fd: int, path: str, deadline_s: float) -> float:
    if is_block_device(path):
        size = os.lseek(fd, 0, os.SEEK_END)
        room = max(1, min(PROBE_BYTES, size - SUPERBLOCK_BYTES) // _BATCH)
    else:
        written, _ = _run(engine, Op.WRITE, device, path, PROBE_BYTES // _BATCH, deadline_s)
        room = written
    count, seconds = _run(engine, Op.READ, device, path, room, deadline_s)
    return count * _BATCH / seconds


def _run(
    engine: IoEngine, op: Op, device: int, path: str, batches: int, deadline_s: float
) -> tuple[int, float]:
    """Batches done, and the time they took; at least one."""
    inside = np.arange(_REQUESTS, dtype=np.uint64) * np.uint64(STRIPE_UNIT)
    begin = now = time.monotonic()
    count = 0
    while count < batches and now - begin < PROBE_S:
        offset = np.uint64(SUPERBLOCK_BYTES + count * _BATCH)
        batch = engine.submit(
            op,
            np.full(_REQUESTS, device, dtype=np.uint16),
            offset + inside,
            np.full(_REQUESTS, STRIPE_UNIT, dtype=np.uint32),
            inside,
        )
        if not batch.wait(deadline_s):
            raise DeviceError(f"device {path} did not answer within {deadline_s:g} s")
        bad = batch.results()[batch.results() != STRIPE_UNIT]
        if bad.size:
            why = os.strerror(-int(bad[0])) if bad[0] < 0 else "fewer bytes than asked for"
            raise DeviceError(f"device {path} cannot be measured: {why}")
        count += 1
        now = time.monotonic()
    return count, max(now - begin, 1e-6)
