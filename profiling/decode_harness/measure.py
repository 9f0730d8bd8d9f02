"""Measuring a decoder: tokens per second, where a step's time goes, bytes by tier."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_ssdkv.base.metrics import counter_key
from vllm_ssdkv.connector.worker.worker import SSDKVWorker
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder
from vllm_ssdkv.profiling.decode_harness.full_cache import FullDecoder
from vllm_ssdkv.profiling.decode_harness.models import kv_bytes_per_token
from vllm_ssdkv.profiling.decode_harness.part_clock import (
    WINDOW_PART,
    AttentionTimer,
    PartClock,
)
from vllm_ssdkv.profiling.python_time import Boundary, PythonTime, native_borders
from vllm_ssdkv.sparse.protocol import Needs

Figures = dict[str, Any]
Step = Callable[[torch.Tensor], torch.Tensor]

WARM_UP: Final = 6
"""Steps of a warm-up, at most: kernels are compiled when they are first needed."""

_CALM: Final = 1.3
"""A step that takes at most so many times the fastest one is no more warming up."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Length of a measurement: at most so many steps and, about, seconds, of each kind."""

    steps: int
    seconds: float
    profiled: int


class Clocked:
    """Steps of R requests, each token the most probable one, which the host has to know."""

    def __init__(self, step: Step, requests: int, device: torch.device) -> None:
        self._step = step
        self._ids = torch.zeros(requests, dtype=torch.int64, device=device)

    def seconds(self) -> float:
        """Seconds of one more step."""
        begun = time.perf_counter()
        self._ids = self._step(self._ids).argmax(-1)
        self._ids.cpu()
        return time.perf_counter() - begun

    def run(self, steps: int, seconds: float) -> list[float]:
        """Seconds of each of some steps, one at least."""
        found: list[float] = []
        while not found or (len(found) < steps and sum(found) < seconds):
            found.append(self.seconds())
        return found

    def warm_up(self, most: int) -> list[float]:
        """Seconds of steps until one is hardly slower than the fastest so far, two at least."""
        found = [self.seconds(), self.seconds()]
        while len(found) < most and found[-1] > _CALM * min(found[:-1]):
            found.append(self.seconds())
        return found


def _layer_ms(
    attention_s: float, step_s: float, parts: dict[str, float], steps: int, layers: int
) -> Figures:
    """Milliseconds of one layer, by part; the model's includes all that is not attention."""
    each = 1e3 / (steps * layers)
    named = {name: seconds * each for name, seconds in parts.items()}
    rest = attention_s - sum(parts.values())
    return {
        "model": (step_s - attention_s) * each,
        **named,
        "attention_rest": rest * each,
    }


def measure_full(decoder: FullDecoder, requests: int, effort: Effort) -> Figures:
    """Figures of a decoder with all KV in HBM."""
    clocked = Clocked(decoder.step, requests, decoder.device)
    warm = clocked.warm_up(WARM_UP)
    found: Figures = {"warm_up_s": sum(warm), **_timed(clocked, requests, effort)}
    found["model_launches"] = decoder.passes.launches
    tokens, model = decoder.tokens, decoder.model
    timer = decoder.timer = AttentionTimer(decoder.device)
    steps = clocked.run(effort.profiled, effort.seconds)
    decoder.timer = None
    layers = model.config.num_hidden_layers
    parts = {WINDOW_PART: timer.seconds}
    found["layer_ms"] = _layer_ms(timer.seconds, sum(steps), parts, len(steps), layers)
    found["bytes_per_token"] = {
        "hbm_kv_computed": tokens * kv_bytes_per_token(model.config, model.dtype)
    }
    return found


def measure_paged(
    decoder: PagedDecoder, names: Sequence[str], effort: Effort, needs: Needs
) -> Figures:
    """Figures of a paged decoder; ``needs`` of the selector, for bytes that nobody counts."""
    requests, counters = len(names), decoder.worker.counters
    clocked = Clocked(lambda ids: decoder.step(names, ids), requests, decoder.device)
    warm = clocked.warm_up(WARM_UP)
    before = counters.totals()
    found: Figures = {"warm_up_s": sum(warm), **_timed(clocked, requests, effort)}
    found["model_launches"] = decoder.passes.launches
    after = counters.totals()
    tokens = found["steps"] * requests
    found["bytes_per_token"] = _bytes(decoder, names, before, after, tokens, needs)
    # The first step with clocks is not measured: the model may be captured anew for it.
    decoder.timer = AttentionTimer(decoder.device)
    clocked.seconds()
    timer = decoder.timer = AttentionTimer(decoder.device)
    parts = PartClock(decoder.device)
    decoder.time_parts(parts)
    steps = clocked.run(effort.profiled, effort.seconds)
    found["parts_launches"] = decoder.passes.launches
    decoder.timer = None
    decoder.time_parts(None)
    layers = len(decoder.layout.layer_names)
    found["layer_ms"] = _layer_ms(timer.seconds, sum(steps), parts.by_part, len(steps), layers)
    clocked.seconds()  # not measured: the first one without clocks
    whose = PythonTime(lambda: _borders(decoder.device))
    whose.start()
    try:
        steps = clocked.run(effort.profiled, effort.seconds)
    finally:
        whose.stop()
    shares = whose.figures(len(steps))
    found["python_share"] = shares["python_share"]
    found["whose_ms"] = {name: 1e3 * s / len(steps) for name, s in whose.seconds.items()}
    return found


def _timed(clocked: Clocked, requests: int, effort: Effort) -> Figures:
    found = clocked.run(effort.steps, effort.seconds)
    return {
        "tokens_per_s": requests * len(found) / sum(found),
        "step_ms": 1e3 * statistics.median(found),
        "step_ms_slowest": 1e3 * max(found),
        "steps": len(found),
    }


def _borders(device: torch.device) -> Iterator[Boundary]:
    """Calls from the model into this package, and from it into native code and into waiting."""
    yield PagedDecoder, "_attend", "python"
    for name in ("begin", "end", "collect", "take_report"):
        yield SSDKVWorker, name, "python"
    yield from native_borders()
    if device.type == "cuda":
        # What waits for the device is not Python's time.
        yield torch.cuda.Stream, "synchronize", "native"
        yield torch.Tensor, "cpu", "native"


def _bytes(
    decoder: PagedDecoder,
    names: Sequence[str],
    before: dict[str, float],
    after: dict[str, float],
    tokens: int,
    needs: Needs,
) -> Figures:
    """Bytes that a token reads, by tier, in whole pages: what the worker counts, and what follows
    from sizes, whose names end with ``_computed``."""

    def gained(name: str, **labels: str) -> float:
        key = counter_key(name, **labels)
        return after.get(key, 0.0) - before.get(key, 0.0)

    page = decoder.layout.geometry.page_bytes
    found: Figures = {}
    for tier in ("dram", "ssd"):
        pages = gained("context_pages_streamed", tier=tier)
        found[f"{tier}_whole_context"] = pages * page / tokens
    for tier in ("hbm", "dram", "page_cache", "ssd"):
        for kind in ("token", "channel", "summary"):
            nbytes = gained("sparse_bytes_fetched", pages=kind, tier=tier) / tokens
            if nbytes:
                found[f"{tier}_{kind}_pages"] = nbytes
    drives = [str(path) for path in decoder.opened.files.health.paths]
    found["drive_read"] = sum(gained("bytes_read", device=path) for path in drives) / tokens
    each = kv_bytes_per_token(decoder.model.config, decoder.model.dtype)
    held = sum(decoder.tokens(name) for name in names) / len(names)
    context = sum(decoder.context_tokens(name) for name in names) / len(names)
    found["hbm_window_computed"] = (held - context) * each
    if needs.bounds:
        tier = "hbm" if decoder.opened.plan.summaries_on_device else "dram"
        found[f"{tier}_bounds_computed"] = context / decoder.config.page_tokens * each
    return found
