"""Choice of the I/O engine: the one place that turns options into an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, get_args

from vllm_ssdkv.base.errors import EngineUnavailableError
from vllm_ssdkv.config.io_engine import EngineKind, EngineOptions
from vllm_ssdkv.store.io.engines.aiofiles import AiofilesEngine
from vllm_ssdkv.store.io.engines.kvikio import KvikioEngine
from vllm_ssdkv.store.io.engines.native import NativeEngine
from vllm_ssdkv.store.io.engines.protocol import IoEngine
from vllm_ssdkv.store.io.engines.threads import ThreadsEngine
from vllm_ssdkv.store.io.engines.uring import UringEngine
from vllm_ssdkv.store.io.testing.faulty import FaultyEngine
from vllm_ssdkv.store.io.testing.noop import NoopEngine
from vllm_ssdkv.store.io.testing.throttled import ThrottledEngine
from vllm_ssdkv.store.memory.arena import Arena

logger = logging.getLogger(__name__)


_Opener: TypeAlias = Callable[[EngineOptions, Sequence[int], Arena], IoEngine]

_OPENERS: dict[str, _Opener] = {
    "uring": lambda options, fds, arena: UringEngine(fds, arena, options.queue_depth),
    "threads": lambda options, fds, arena: ThreadsEngine(fds, arena, options.queue_depth),
    "kvikio": lambda options, fds, arena: KvikioEngine(fds, arena, options.queue_depth),
    "aiofiles": lambda options, fds, arena: AiofilesEngine(fds, arena, options.queue_depth),
    "noop": lambda _options, fds, arena: NoopEngine(len(fds), arena),
}

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
        EngineUnavailableError: the engine does not exist or cannot run here.
        ConfigError: a fault or throttle rule, or the fault file, is wrong.
        ValueError: ``fds`` and ``paths`` differ in length, or a number is out of range.
    """
    if len(fds) != len(paths):
        raise ValueError(f"{len(fds)} descriptors for {len(paths)} paths")
    engine = base or _open_base(options, fds, arena)
    if isinstance(engine, NativeEngine):
        engine.joined = joined
    try:
        if options.throttle:
            engine = ThrottledEngine(engine, len(fds), options.throttle)
        if options.faults or options.fault_file is not None:
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
    if options.engine != "auto":
        opener = _OPENERS.get(options.engine)
        if opener is None:
            raise EngineUnavailableError(
                f"there is no I/O engine {options.engine!r}; choose one of "
                + ", ".join(get_args(EngineKind))
            )
        return opener(options, fds, arena)
    reasons = []
    for kind in _AUTO:
        try:
            return _OPENERS[kind](options, fds, arena)
        except EngineUnavailableError as error:
            logger.warning("I/O engine %s cannot run here: %s", kind, error)
            reasons.append(f"{kind}: {error}")
    raise EngineUnavailableError("no I/O engine can run here: " + "; ".join(reasons))
