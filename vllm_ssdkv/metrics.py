"""Every metric of the product, declared once, and the accumulator that the code counts in.

Nothing here knows vLLM or Prometheus: ``connector/stats.py`` carries the numbers to vLLM's
``/metrics``, and ``docs/metrics.md`` is generated from :data:`METRICS`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import quote, unquote

PREFIX: Final = "vllm:ssdkv_"
"""vLLM unregisters metrics by the prefix ``vllm:``; connectors add their own name to it."""

LATENCY_BUCKETS: Final = (
    *(50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3),
    *(100e-3, 200e-3, 500e-3, 1.0, 5.0),
)
"""Seconds. The native engines have the same in ``csrc/io/totals.hpp``, in nanoseconds."""

DEPTH_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""Requests; as in ``csrc/io/totals.hpp``."""

_BUCKET: Final = "le"
_SUM: Final = "sum"


@dataclass(frozen=True, slots=True)
class Label:
    """One label of a metric. Its values are bounded: listed here, or by the options.

    Attributes:
        values: All values, or empty when ``bounded_by`` says what bounds them.
    """

    name: str
    values: tuple[str, ...] = ()
    bounded_by: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: Short name; the code counts under it.
        unit: What the number counts, for the table.
        combine: How the values of several ranks become one. Counters and histograms always add up.
        buckets: Upper bounds of a histogram, ascending, without infinity.
    """

    name: str
    kind: Literal["counter", "gauge", "info", "histogram"]
    unit: str
    help: str
    labels: tuple[Label, ...] = ()
    combine: Literal["sum", "max", "min"] = "sum"
    buckets: tuple[float, ...] = ()

    @property
    def adds_up(self) -> bool:
        """Whether it only grows: a counter or a histogram."""
        return self.kind in {"counter", "histogram"}

    @property
    def full_name(self) -> str:
        """Name that Prometheus is given (it appends ``_total`` to counters)."""
        return PREFIX + self.name

    @property
    def exposed_name(self) -> str:
        """Name that a scrape of ``/metrics`` shows."""
        return self.full_name + ("_total" if self.kind == "counter" else "")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels in declaration order."""
        return tuple(label.name for label in self.labels)


_DEVICE: Final = Label("device", bounded_by="paths in the option devices")
_DIRECTION: Final = Label("direction", ("read", "write"))
_TIER: Final = Label("tier", ("dram", "ssd"))
_IO_KIND: Final = Label("kind", ("eio", "enospc", "short", "deadline", "other"))
_DROP_CAUSE: Final = Label("cause", ("read_error", "write_error", "device_lost", "restriped"))
_JOURNAL_CALL: Final = Label("call", ("append", "sync", "rewrite"))
_RECOMPUTE_CAUSE: Final = Label("cause", ("hit", "context"))


def _counter(name: str, unit: str, help: str, *labels: Label) -> Metric:
    return Metric(name, "counter", unit, help, labels)


def _gauge(
    name: str, unit: str, help: str, *labels: Label, combine: Literal["sum", "max", "min"] = "sum"
) -> Metric:
    return Metric(name, "gauge", unit, help, labels, combine)


METRICS: Final[tuple[Metric, ...]] = (
    _counter("slots_stored", "slots", "Slots written and published."),
    _counter("slots_evicted", "slots", "Slots given up to make room for newer ones."),
    _counter(
        "slots_dropped", "slots", "Slots whose data cannot be trusted or was lost.", _DROP_CAUSE
    ),
    _counter("recovered_slots", "slots", "Slots found again in the journal at start."),
    _counter("hit_tokens", "tokens", "Prompt tokens restored from the store.", _TIER),
    _counter(
        "hit_tokens_computed",
        "tokens",
        "Prompt tokens that the store holds, computed because that was expected to be faster.",
    ),
    _counter(
        "seconds_saved",
        "seconds",
        "Estimated time to first token that requests were spared: by loading, what computing would "
        "have taken longer; by computing, what loading would have.",
        Label("by", ("loading", "computing")),
    ),
    _counter(
        "seconds_lost",
        "seconds",
        "Time that loads took longer than computing was estimated to take.",
    ),
    _counter(
        "load_probes",
        "loads",
        "Reads beside a request that was computed, to see whether the devices are faster now.",
    ),
    _counter("load_failures", "requests", "Requests for which a load did not bring all its data."),
    _counter(
        "recomputed_requests",
        "requests",
        "Requests computed again because their hit or their context could not be read.",
        _RECOMPUTE_CAUSE,
    ),
    _counter(
        "stores_skipped",
        "blocks",
        "Blocks not stored: the write buffer was full, no slot could be had, the admission filter "
        "had not seen them often enough, or a daily write budget was used up.",
        Label("cause", ("write_buffer", "store_full", "admission", "budget")),
    ),
    _counter("write_stalls", "steps", "Steps that waited for room in the write buffer (page)."),
    _counter("write_stall_seconds", "seconds", "Time that steps waited for the write buffer."),
    _counter("context_pages_streamed", "pages", "Pages of context brought in (page).", _TIER),
    _counter(
        "sparse_selections",
        "lists",
        "Times that pages were chosen: per decoded token, layer and KV head (page, sparse).",
    ),
    _counter(
        "sparse_pages_selected", "pages", "Context pages chosen, all of these lists together."
    ),
    _counter("sparse_pages_in_context", "pages", "Context pages that there were to choose from."),
    _counter(
        "sparse_pages_fetched",
        "pages",
        "Chosen pages by where they were: in a frame, in the page cache, or read from a device. A "
        "page that several requests chose at once counts once.",
        Label("tier", ("dram", "page_cache", "ssd")),
    ),
    _counter(
        "sparse_missing_mass",
        "shares",
        "Share of attention that by the selector's estimate was not attended to, added up over "
        "sparse_selections.",
    ),
    _counter(
        "sparse_rows_exact",
        "rows",
        "Decoded tokens that attended to everything, because DRAM has no room for the bounds of "
        "their pages.",
    ),
    _counter(
        "attention_seconds",
        "seconds",
        "Time that the forward pass spent in attention (page): choosing pages, waiting for bytes, "
        "attending, merging.",
        Label("part", ("select", "wait", "attend", "merge")),
    ),
    _counter("bytes_read", "bytes", "Bytes read from the device.", _DEVICE),
    _counter("bytes_written", "bytes", "Bytes written to the device.", _DEVICE),
    _counter("io_requests", "requests", "I/O requests that ended.", _DEVICE, _DIRECTION),
    Metric(
        "io_latency_seconds",
        "histogram",
        "seconds",
        "Time that an I/O request spent in the device.",
        (_DEVICE, _DIRECTION),
        buckets=LATENCY_BUCKETS,
    ),
    Metric(
        "io_queue_depth",
        "histogram",
        "requests",
        "Requests that the device had, the new one included, when one was given to it.",
        (_DEVICE,),
        buckets=DEPTH_BUCKETS,
    ),
    _counter("bytes_trimmed", "bytes", "Bytes of dropped slots that were trimmed.", _DEVICE),
    _counter("trim_errors", "errors", "Times the device refused to be trimmed.", _DEVICE),
    _counter("wear_file_errors", "errors", "Times wear.json could not be read or written."),
    _counter("io_errors", "requests", "I/O requests that failed.", _DEVICE, _IO_KIND),
    _counter("io_deadline_exceeded", "batches", "I/O batches not complete at their deadline."),
    _counter(
        "checksum_failures", "pages", "Pages whose data does not match their checksum or tag."
    ),
    _counter(
        "bad_copies",
        "slots",
        "Copies of slots on the device that were found wrong or out of date, while there was "
        "another copy (replicas).",
        _DEVICE,
    ),
    _counter(
        "single_copies",
        "slots",
        "Slots stored with one copy only, because the device of the other one failed (replicas).",
    ),
    _counter(
        "mended_copies",
        "slots",
        "Copies of slots that the scrub wrote anew from the other copy (replicas).",
    ),
    _counter("scrub_bytes", "bytes", "Bytes read again by the scrub."),
    _counter("scrub_failures", "times", "Times the scrub ended for good because of an error."),
    _counter("scrub_bad_pages", "pages", "Pages that the scrub found bad."),
    _counter(
        "header_mismatches", "slots", "Slots whose header names another block, model or version."
    ),
    _counter("journal_corrupt_records", "records", "Journal records that failed their checksum."),
    _counter(
        "journal_resets", "journals", "Journals that were set aside at start: the store is empty."
    ),
    _counter(
        "journal_lost_records", "records", "Journal records that could not be written at first."
    ),
    _counter(
        "manifest_restores",
        "files",
        "Manifests that were damaged and restored, from their copy or from superblocks.",
    ),
    _counter("journal_errors", "calls", "Calls on the journal that failed.", _JOURNAL_CALL),
    _counter("device_lost", "devices", "Times the device was taken out of service.", _DEVICE),
    _counter("manifest_errors", "errors", "Times the manifest could not be saved."),
    _gauge("slots", "slots", "Slots that the store has."),
    _gauge("slots_ready", "slots", "Slots that can be found."),
    _gauge("slots_free", "slots", "Slots that hold nothing."),
    _gauge("slots_pinned", "slots", "Slots that may not be evicted now."),
    _gauge("dram_frames", "frames", "Frames of the DRAM tier, all ranks."),
    _gauge("dram_frames_used", "frames", "Frames of the DRAM tier that hold data, all ranks."),
    _gauge(
        "dram_frames_dirty", "frames", "Frames of the DRAM tier not yet on a device, all ranks."
    ),
    _gauge("page_cache_pages", "pages", "Single pages that DRAM holds, all ranks (page, sparse)."),
    _gauge("summaries_held", "blocks", "Blocks whose page bounds DRAM holds, all ranks."),
    _gauge("journal_bytes", "bytes", "Size of the journal."),
    _gauge(
        "estimated_prefill_tokens_per_second",
        "tokens/s",
        "Measured rate of computing a full chunk without context.",
    ),
    _gauge(
        "estimated_load_tokens_per_second",
        "tokens/s",
        "Measured rate of reading a large hit from the devices.",
    ),
    _gauge(
        "estimated_load_latency_seconds",
        "seconds",
        "Measured time that a hit on the devices takes, however small.",
    ),
    _gauge("store_bytes", "bytes", "Size of the data files on the device, all ranks.", _DEVICE),
    _gauge(
        "wear_bytes",
        "bytes",
        "Bytes written to the device over the life of this store, all ranks.",
        _DEVICE,
    ),
    _gauge(
        "wear_used",
        "share",
        "wear_bytes as a share of the device's option tbw; 1 is all of its endurance.",
        _DEVICE,
    ),
    _gauge(
        "write_budget_used",
        "share",
        "Bytes written to the device since midnight UTC as a share of its daily_write_budget.",
        _DEVICE,
    ),
    _gauge(
        "device_state",
        "0 or 1",
        "1 while the device is in service, 0 once any rank has taken it out.",
        _DEVICE,
        combine="min",
    ),
    _gauge(
        "device_share",
        "0 to 1",
        "Share of the device in what is stored now, lowered while it is slow or lost.",
        _DEVICE,
    ),
    Metric(
        "info",
        "info",
        "1",
        "Always 1; the labels say what is in force.",
        (
            Label("mode", ("reuse", "page")),
            Label("io_engine", bounded_by="the I/O engine in force"),
            Label("selector", bounded_by="the option selector"),
        ),
        "max",
    ),
)

BATCH_METRICS: Final[tuple[Metric, ...]] = (
    _gauge("batches_unended", "batches", "Batches that have not ended."),
    _counter(
        "batches_ended",
        "batches",
        "Batches that have ended.",
        Label("outcome", ("completed", "failed", "expired", "cancelled")),
    ),
    _counter(
        "batch_requests",
        "requests",
        "Requests of batches that got a line in the output file or the error file.",
        Label("outcome", ("completed", "failed")),
    ),
    _gauge("batch_requests_running", "requests", "Requests of batches that run now."),
    _counter("batch_prompt_tokens", "tokens", "Prompt tokens of answered requests of batches."),
    _counter(
        "batch_saved_tokens",
        "tokens",
        "Those whose KV was found in a cache, so that their prefill was saved.",
    ),
    _gauge("batch_bytes", "bytes", "Size of the files and results of the Batch API."),
    _counter(
        "batch_errors",
        "errors",
        "Times the batch runner could not read or write its files; it tries again.",
    ),
)
"""Metrics of the Batch API. They live in the API server, not in the engine."""

BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in (*METRICS, *BATCH_METRICS)}


def metric_key(name: str, labels: dict[str, str]) -> str:
    """``name|label=value,...`` in declaration order; values are percent-encoded.

    The keys of a histogram have one more part: see :func:`bucket_keys`.

    Raises:
        ValueError: the metric, a label or a label's value is not declared.
    """
    metric = BY_NAME.get(name)
    if metric is None:
        raise ValueError(f"no metric {name!r} is declared")
    if len(labels) != len(metric.labels):
        raise ValueError(f"metric {name} has the labels {metric.label_names}, got {tuple(labels)}")
    parts: list[str] = []
    for label in metric.labels:
        value = labels.get(label.name)
        if value is None or (label.values and value not in label.values):
            raise ValueError(f"metric {name}: label {label.name} cannot be {value!r}")
        parts.append(f"{label.name}={quote(value, safe='/')}")
    return f"{name}|{','.join(parts)}" if parts else name


@functools.lru_cache(maxsize=4096)
def bucket_keys(key: str) -> tuple[str, ...]:
    """Keys of a histogram's parts, from its :func:`metric_key`: buckets, infinity, sum.

    A bucket's number is of those values that are in no lower one.
    """
    metric, _ = parse_key(key)
    start = key + ("," if metric.labels else "|")
    bounds = (*map(repr, metric.buckets), "inf")
    return (*(f"{start}{_BUCKET}={bound}" for bound in bounds), f"{start}{_SUM}=")


@functools.lru_cache(maxsize=4096)
def histogram_of(key: str) -> tuple[str, int]:
    """The :func:`metric_key` of the histogram that one of its :func:`bucket_keys` belongs to.

    And the position of the key among them.
    """
    metric, _ = parse_key(key)
    name, _, parts = key.partition("|")
    labels = ",".join(parts.split(",")[: len(metric.labels)])
    whole = f"{name}|{labels}" if labels else name
    return whole, bucket_keys(whole).index(key)


@functools.lru_cache(maxsize=4096)
def parse_key(key: str) -> tuple[Metric, tuple[str, ...]]:
    """The metric and its label values, from a key of :func:`metric_key`.

    After the label values of a part of a histogram comes its bound, or nothing for the sum.

    Raises:
        KeyError: the metric is not declared.
    """
    name, _, labels = key.partition("|")
    values = tuple(unquote(part.partition("=")[2]) for part in labels.split(",")) if labels else ()
    return BY_NAME[name], values


def combine_gauges(snapshots: list[dict[str, float]]) -> dict[str, float]:
    """Gauges of several ranks as one set, each combined as its metric declares."""
    combined: dict[str, float] = {}
    for snapshot in snapshots:
        for key, value in snapshot.items():
            if key not in combined:
                combined[key] = value
                continue
            how = parse_key(key)[0].combine
            if how == "sum":
                combined[key] += value
            else:
                combined[key] = (max if how == "max" else min)(combined[key], value)
    return combined


class Counters:
    """Accumulator of one process. Any thread may call any method; none blocks on I/O.

    Holds one number per declared metric and label value (those of a histogram hold one per bucket
    and the sum), so its size is bounded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._reported: dict[str, float] = {}
        self._gauges: dict[str, float] = {}

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Increase a counter.

        Raises:
            ValueError: not a declared counter, its labels do not fit, or ``value`` is negative.
        """
        key = metric_key(name, labels)
        if BY_NAME[name].kind != "counter" or not value >= 0:
            raise ValueError(f"cannot add {value} to the {BY_NAME[name].kind} {name}")
        with self._lock:
            self._totals[key] = self._totals.get(key, 0) + value

    def add_all(self, name: str, counts: Sequence[float], total: float, **labels: str) -> None:
        """Take values into a histogram.

        Args:
            name: The histogram.
            counts: How many values fell into each bucket, the last one being infinity.
            total: Their sum.
            labels: As declared.

        Raises:
            ValueError: not a declared histogram, its labels or buckets do not fit, or a number is
                negative.
        """
        key = metric_key(name, labels)
        parts = bucket_keys(key) if BY_NAME[name].kind == "histogram" else ()
        if len(counts) + 1 != len(parts) or not all(value >= 0 for value in (*counts, total)):
            raise ValueError(f"cannot add {counts} and {total} to the {BY_NAME[name].kind} {name}")
        with self._lock:
            for part, value in zip(parts, (*counts, total), strict=True):
                self._totals[part] = self._totals.get(part, 0) + value

    def start_at_zero(self, devices: Sequence[str]) -> None:
        """Let the counters of devices exist before they count.

        What appears with its first error has no earlier value, so no rate sees that error.
        """
        for metric in METRICS:
            if metric.kind != "counter" or _DEVICE not in metric.labels:
                continue
            choices = (devices if label is _DEVICE else label.values for label in metric.labels)
            for values in itertools.product(*choices):
                self.add(metric.name, 0, **dict(zip(metric.label_names, values, strict=True)))

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge, or an info metric (to 1).

        Raises:
            ValueError: not a declared gauge, or its labels do not fit.
        """
        key = metric_key(name, labels)
        if BY_NAME[name].adds_up:
            raise ValueError(f"{name} is a {BY_NAME[name].kind}; use add")
        with self._lock:
            self._gauges[key] = value

    def total(self, name: str, **labels: str) -> float:
        """A counter since the start of the process.

        Raises:
            ValueError: not a declared metric, or its labels do not fit.
        """
        key = metric_key(name, labels)
        with self._lock:
            return self._totals.get(key, 0)

    def snapshot_delta(self) -> dict[str, float]:
        """What counters gained since the last call (those that gained or are new), and every gauge.

        Gauges are repeated each time: with several API servers each of them sees only some of
        the snapshots.
        """
        with self._lock:
            delta = {
                key: total - self._reported.get(key, 0)
                for key, total in self._totals.items()
                if total != self._reported.get(key)
            }
            self._reported = dict(self._totals)
            return {**delta, **self._gauges}
