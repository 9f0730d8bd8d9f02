"""An engine whose batches are late because of injected faults only, however slow the machine is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from vllm_ssdkv.config.io_engine import EngineOptions
from vllm_ssdkv.store import open as opening
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import I32, U16, U32, U64, Batch, IoEngine, Op
from vllm_ssdkv.store.io.testing.held import FaultyBatch

PATIENCE_S = 60.0


def open_unhurried_engines(patch: pytest.MonkeyPatch) -> None:
    """Stores that are opened from now on have such engines, but those with throttled devices."""

    def open_unhurried(options: EngineOptions, *rest: Any, **more: Any) -> IoEngine:  # noqa: ANN401 - handed on
        engine = open_engine(options, *rest, **more)
        return engine if options.throttle else UnhurriedEngine(engine)

    patch.setattr(opening, "open_engine", open_unhurried)


class UnhurriedEngine:
    """See :class:`vllm_ssdkv.store.io.engines.protocol.IoEngine`; wraps a faulty one.

    A wait ends at its time while a rule holds requests back. The others get all the time they need
    before the clock is looked at, so that a test may have a short deadline on a machine that
    stands still for longer than that.
    """

    def __init__(self, inner: IoEngine) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> Batch:
        return _UnhurriedBatch(self._inner.submit(op, device, offset, length, buffer))

    def statistics(self) -> Mapping[str, int]:
        return self._inner.statistics()

    def close(self, timeout_s: float) -> bool:
        return self._inner.close(timeout_s)


class _UnhurriedBatch:
    def __init__(self, inner: Batch) -> None:
        self._inner = inner

    def done(self) -> bool:
        return self._inner.done()

    def results(self) -> I32:
        return self._inner.results()

    def wait(self, timeout_s: float) -> bool:
        healthy: list[Batch] = [self._inner]
        if isinstance(self._inner, FaultyBatch):
            healthy = [part for part in self._inner._parts if part.results() is not None]  # type: ignore[misc]  # parts wait as batches do
        for batch in healthy:
            assert batch.wait(PATIENCE_S), "a healthy device does not answer"
        return self._inner.wait(timeout_s)
