"""Choice of the I/O engine: the one place that turns options into an engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from vllm_ssdkv.base.errors import EngineUnavailableError
from vllm_ssdkv.config.io_engine import AUTO, ENGINES, EngineKind, EngineOptions
from vllm_ssdkv.store.io.engines.native import NativeEngine
from vllm_ssdkv.store.io.engines.protocol import IoEngine
from vllm_ssdkv.store.memory.arena import Arena

logger = logging.getLogger(__name__)


# What "auto" tries, fastest first. An engine that cannot run here raises EngineUnavailableError.
_AUTO = ("uring", "threads")


def open_engine(
    options: EngineOptions,
    fds: Sequence[int],
    paths: Sequence[str | Path],
    arena: Arena,
    *,
    joined: bool = False,
    base: IoEngine | None = None,
) -> IoEngine:
    """Start the engine that ``options`` asks for, inside the twins that they ask for.

    Args:
        options: See :class:`EngineOptions`.
        fds: Open descriptors, one per device; they stay the caller's.
        paths: Their paths, for messages, one per device.
        arena: Memory of all requests.
        joined: As :attr:`NativeEngine.joined`; engines in Python have no such calls.
        base: Engine to take in place of the one that the options name.

    Raises:
        EngineUnavailableError: the engine cannot run here.
        ConfigError: there is no such engine; a fault or throttle rule, or the fault file, is wrong.
        ValueError: ``fds`` and ``paths`` differ in length, or a number is out of range.
    """
    if len(fds) != len(paths):
        raise ValueError(f"{len(fds)} descriptors for {len(paths)} paths")
    engine = base or _open_base(options, fds, arena)
    if isinstance(engine, NativeEngine):
        engine.joined = joined
    try:
        if options.throttle:
            from vllm_ssdkv.store.io.testing.throttled import ThrottledEngine

            engine = ThrottledEngine(engine, len(fds), options.throttle)
        if options.faults or options.fault_file is not None:
            from vllm_ssdkv.store.io.testing.faulty import FaultyEngine

            engine = FaultyEngine(engine, len(fds), arena, options.faults, options.fault_file)
    except BaseException:
        engine.close(0.0)
        raise
    logger.info(
        "I/O engine %s (asked for %s), queue depth %d, on %s",
        engine.name,
        options.engine if base is None else base.name,
        options.queue_depth,
        ", ".join(map(str, paths)),
    )
    return engine


def _open_base(options: EngineOptions, fds: Sequence[int], arena: Arena) -> IoEngine:
    if options.engine != AUTO:
        return _open(options.engine, options, fds, arena)
    reasons = []
    for kind in _AUTO:
        try:
            return _open(kind, options, fds, arena)
        except EngineUnavailableError as error:
            logger.warning("I/O engine %s cannot run here: %s", kind, error)
            reasons.append(f"{kind}: {error}")
    raise EngineUnavailableError("no I/O engine can run here: " + "; ".join(reasons))


def _open(kind: EngineKind, options: EngineOptions, fds: Sequence[int], arena: Arena) -> IoEngine:
    opened: IoEngine = ENGINES.resolve(kind)(fds, arena, options.queue_depth)
    return opened
