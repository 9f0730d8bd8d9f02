"""Every metric of the product, declared once, and the accumulator that the code counts in.

Nothing here knows vLLM or Prometheus: ``connector/metrics/stats.py`` carries the numbers to vLLM's
``/metrics``, and ``docs/metrics.md`` is generated from :data:`METRICS`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import quote, unquote

from vllm_ssdkv import _io
from vllm_ssdkv.base.metric import (
    DEPTH_BUCKETS,
    LATENCY_BUCKETS,
    Label,
    Metric,
    counter,
    gauge,
)
from vllm_ssdkv.base.metrics_node import NODE_METRICS, NODE_SERVER_METRICS
from vllm_ssdkv.base.metrics_offload import OFFLOAD_METRICS
from vllm_ssdkv.base.metrics_sparse import SPARSE_METRICS
from vllm_ssdkv.base.wait_reason import WaitReason

TELL_INTERVAL_S: Final = 0.5
"""Interval at which a process updates its gauges, and at which the engine reports its counters
while requests run: a step may be shorter than a report takes. So ``/metrics`` lags by at most
twice this, and a step."""

_BUCKET: Final = "le"
_SUM: Final = "sum"


_DEVICE: Final = Label("device", bounded_by="paths in the option devices")
_DIRECTION: Final = Label("direction", ("read", "write"))
_TIER: Final = Label("tier", ("dram", "ssd"))
_IO_KIND: Final = Label("kind", ("eio", "enospc", "short", "deadline", "other"))
_DROP_CAUSE: Final = Label(
    "cause",
    (
        "read_error",
        "write_error",
        "device_lost",
        "restriped",
        "replaced",
        "reset",
        "weights",
        "unverified",
        "engine",
    ),
)
_JOURNAL_CALL: Final = Label("call", ("append", "sync", "rewrite", "look"))
_STATE_FILE: Final = Label("file", ("journal", "store.json", "store.json.copy"))
_RECOMPUTE_CAUSE: Final = Label("cause", ("hit", "context"))


METRICS: Final[tuple[Metric, ...]] = (
    counter("slots_stored", "slots", "Slots written and published."),
    counter("slots_evicted", "slots", "Slots given up to make room for newer ones."),
    counter(
        "retentions_cut",
        "slots",
        "Slots that lost their `retain` before its time: more were retained than retain_share "
        "allows, no other slot was evictable, or their data was lost.",
    ),
    counter(
        "slots_dropped", "slots", "Slots whose data cannot be trusted or was lost.", _DROP_CAUSE
    ),
    counter("recovered_slots", "slots", "Slots found again in the journal at start."),
    counter("hit_tokens", "tokens", "Prompt tokens restored from the store.", _TIER),
    counter(
        "load_seconds",
        "seconds",
        "Time spent in loads. A load that reads from SSDs and copies from DRAM counts for both.",
        _TIER,
    ),
    counter(
        "hit_tokens_computed",
        "tokens",
        "Prompt tokens that the store holds but that were recomputed, because that was expected "
        "to be faster.",
    ),
    counter(
        "seconds_saved",
        "seconds",
        "Estimated time to first token saved, by `loading` (against recomputing) or by "
        "`computing` (against loading).",
        Label("by", ("loading", "computing")),
    ),
    counter(
        "seconds_lost",
        "seconds",
        "Time by which loads exceeded the estimated time of computing.",
    ),
    counter(
        "verified_hits",
        "hits",
        "Hits whose stored last block was computed again and compared (verify_hits).",
        Label("result", ("same", "differs", "skipped")),
    ),
    gauge(
        "store_suspended",
        "state",
        "1 after a verified hit differed from the computed block: nothing is found in the store "
        "until `ssdkv resume`.",
    ),
    counter(
        "suspensions_not_saved",
        "suspensions",
        "Suspensions that a later start will miss, because the manifest could not be saved.",
    ),
    counter(
        "weights_changed",
        "changes",
        "Changes of the weights in memory. Blocks stored before are found only with the old "
        "weights.",
    ),
    counter(
        "load_probes",
        "loads",
        "Reads beside a recomputed request that measure whether the devices are faster now.",
    ),
    counter("load_failures", "loads", "Loads that did not return all their data, on any rank."),
    counter(
        "recomputed_requests",
        "requests",
        "Requests recomputed because their hit or their context could not be read.",
        _RECOMPUTE_CAUSE,
    ),
    counter(
        "stores_skipped",
        "blocks",
        "Blocks not stored: the write buffer was full, no slot was free, the admission filter had "
        "not seen them often enough, a daily write budget was used up, writes are paused, the "
        "node did not answer, or a tier does not know whose KV they are (docs/tier.md).",
        Label(
            "cause",
            (
                *("write_buffer", "store_full", "admission", "budget", "writes_paused", "node"),
                "unknown",
            ),
        ),
        combine="max",
    ),
    counter(
        "waits",
        "times",
        "Number of times that a request began to wait before it could run, by reason "
        "(docs/messages.md lists them).",
        Label("reason", tuple(reason.label for reason in WaitReason)),
    ),
    counter(
        "slot_waits",
        "times",
        "Number of times that a request could not start for lack of slots; it asks again every "
        "step (page).",
    ),
    counter(
        "write_stalls",
        "times",
        "Number of times that steps waited for room in the write buffer (page).",
        combine="max",
    ),
    counter(
        "write_stall_seconds",
        "seconds",
        "Time that steps waited for the write buffer.",
        combine="max",
    ),
    counter(
        "step_copies",
        "steps",
        "Steps that completed blocks, by how these were copied to DRAM. `layers`: each layer "
        "while later ones computed. The others copied all at the end: the model computes on the "
        "`cpu`, a layer is `small`, layers have states (`states`), some are stored as X "
        "(`inputs`), DRAM had no free frame (`frames`), or vLLM reported no layer, as in a full "
        "CUDA graph (`untold`).",
        Label("way", ("layers", "cpu", "small", "states", "inputs", "frames", "untold")),
        combine="max",
    ),
    counter(
        "layers_copied",
        "layers",
        "Layers of the steps in `layers`: copied before the forward pass was over (`beside`), or "
        "awaited or copied after it (`end`).",
        Label("when", ("beside", "end")),
        combine="max",
    ),
    counter(
        "layer_copy_waits",
        "times",
        "Number of times that a step waited because two of its layers were still to be copied.",
        combine="max",
    ),
    counter(
        "layer_copy_wait_seconds",
        "seconds",
        "Time of the waits in layer_copy_waits.",
        combine="max",
    ),
    gauge(
        "layers_waiting",
        "layers",
        "Maximum number of layers that waited to be copied, or were being copied, since the start.",
        combine="max",
    ),
    counter(
        "context_pages_streamed",
        "pages",
        "Pages of context streamed to the accelerator (page).",
        _TIER,
    ),
    counter(
        "context_steps",
        "steps",
        "Steps that streamed pages of context for exact attention, and steps in which tokens "
        "chose pages; a step may be both (page).",
        Label("attention", ("exact", "sparse")),
        combine="max",
    ),
    counter(
        "context_steps_native",
        "steps",
        "Steps whose layers took one native call each, or two where chosen pages were read (page).",
        combine="max",
    ),
    counter(
        "context_blocks_promoted",
        "blocks",
        "Blocks promoted to DRAM because a running request read them from the devices in every "
        "step (page).",
    ),
    counter(
        "blocks_rewritten",
        "blocks",
        "Stored blocks that were stored again after a hit for faster reads: a device has become "
        "slow, or was added.",
    ),
    *SPARSE_METRICS,
    *OFFLOAD_METRICS,
    *NODE_METRICS,
    counter(
        "attention_seconds",
        "seconds",
        "Time that the forward pass spent in attention (page): choosing pages, looking them up and "
        "checking them, reading ahead, waiting for bytes, attending, merging.",
        Label("part", ("select", "fetch", "ahead", "wait", "attend", "merge")),
        combine="max",
    ),
    counter("bytes_read", "bytes", "Bytes read from the device.", _DEVICE),
    counter("bytes_written", "bytes", "Bytes written to the device.", _DEVICE),
    counter(
        "bytes_used",
        "bytes",
        "Bytes of KV that were read, verified, and used by a request, each once. bytes_read is "
        "larger by headers, padding, summaries, reads of the scrub, and prefetches in vain. Their "
        "ratio is the read amplification.",
    ),
    counter("io_requests", "requests", "I/O requests that ended.", _DEVICE, _DIRECTION),
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
        "Number of requests in the device when one was submitted, including it.",
        (_DEVICE,),
        buckets=DEPTH_BUCKETS,
    ),
    counter("bytes_trimmed", "bytes", "Bytes of dropped slots that were trimmed.", _DEVICE),
    counter(
        "trim_errors", "errors", "Number of times that the device refused to be trimmed.", _DEVICE
    ),
    counter(
        "wear_file_errors", "errors", "Number of times that wear.json could not be read or written."
    ),
    counter("amx_refusals", "processes", "Workers to which Linux refused AMX tiles."),
    counter("io_errors", "requests", "I/O requests that failed.", _DEVICE, _IO_KIND),
    counter(
        "thread_errors",
        "errors",
        "Unexpected errors in threads that write and load. The request in progress failed, and "
        "the thread goes on. The log has the first of each minute.",
        Label("thread", ("writer", "loader", "misses", "prober", "node", "tier")),
    ),
    counter("io_deadline_exceeded", "batches", "I/O batches not complete at their deadline."),
    counter("checksum_failures", "pages", "Pages whose data does not match their checksum or tag."),
    counter(
        "bad_copies",
        "slots",
        "Copies of slots on the device that were found wrong or out of date, while there was "
        "another copy (replicas).",
        _DEVICE,
    ),
    counter(
        "single_copies",
        "slots",
        "Slots stored with one copy only, because the device of the other one failed (replicas).",
    ),
    counter(
        "mended_copies",
        "slots",
        "Copies of slots that the scrub rewrote from the other copy (replicas).",
    ),
    counter("scrub_bytes", "bytes", "Bytes read again by the scrub."),
    counter(
        "scrub_failures",
        "times",
        "Number of times that the scrub ended for good because of an error.",
    ),
    counter("scrub_bad_pages", "pages", "Pages that the scrub found bad."),
    counter(
        "header_mismatches", "slots", "Slots whose header names another block, model or version."
    ),
    counter("journal_corrupt_records", "records", "Journal records that failed their checksum."),
    counter(
        "journal_resets", "journals", "Journals that were set aside at start: the store is empty."
    ),
    counter(
        "journal_lost_records", "records", "Journal records that could not be written at first."
    ),
    counter(
        "journal_rebuilds",
        "journals",
        "Journals that were lost or damaged at start, and rebuilt from the headers of slots.",
    ),
    counter(
        "manifest_restores",
        "files",
        "Manifests that were damaged or lost, and restored from a copy or from superblocks.",
    ),
    counter(
        "manifest_copy_errors",
        "errors",
        "Number of times that the copy of the manifest on a device could not be written.",
    ),
    counter(
        "state_files_restored",
        "files",
        "Files of the store that were deleted, replaced or truncated under a running engine, and "
        "written again.",
        _STATE_FILE,
    ),
    counter("journal_errors", "calls", "Calls on the journal that failed.", _JOURNAL_CALL),
    counter(
        "device_lost",
        "times",
        "Number of times that a rank took the device out of service.",
        _DEVICE,
    ),
    counter(
        "device_returned",
        "times",
        "Number of times that a rank took the device into service again.",
        _DEVICE,
    ),
    counter(
        "growth_errors",
        "times",
        "Number of times that a store which grows as it fills found no room to grow.",
    ),
    counter("manifest_errors", "errors", "Number of times that the manifest could not be saved."),
    gauge(
        "slots",
        "slots",
        "Blocks that fit into the store, without lost devices, and including future growth.",
    ),
    gauge("slots_ready", "slots", "Slots that can be found."),
    gauge(
        "slots_free",
        "slots",
        "Blocks that the store has free room for: `1 - slots_free / slots` is in use.",
    ),
    gauge("slots_to_come", "slots", "Part of `slots` that the store has yet to grow by."),
    gauge("slots_pinned", "slots", "Slots that may not be evicted now."),
    gauge("slots_retained", "slots", "Slots that requests retain for a time (`retain`)."),
    gauge(
        "slots_masked",
        "slots",
        "Slots with durable blocks that cannot be read until a device is back.",
    ),
    gauge("dram_frames", "frames", "Frames of the DRAM tier, all ranks."),
    gauge("dram_frames_used", "frames", "Frames of the DRAM tier that hold data, all ranks."),
    gauge("dram_frames_dirty", "frames", "Frames of the DRAM tier not yet on a device, all ranks."),
    gauge(
        "page_cache_places",
        "pages",
        "Single pages that fit into DRAM, all ranks (page, sparse).",
    ),
    gauge("page_cache_pages", "pages", "Single pages that DRAM holds, all ranks."),
    gauge(
        "hot_pages_places",
        "pages",
        "Single pages that fit into the GPU's reserved memory, all ranks (page, sparse). Missing "
        "where CUDA graphs manage it.",
    ),
    gauge(
        "hot_pages_held", "pages", "Single pages that the GPU's reserved memory holds, all ranks."
    ),
    gauge(
        "summaries_places",
        "blocks",
        "Blocks whose summaries fit into DRAM, all ranks (page, sparse).",
    ),
    gauge("summaries_held", "blocks", "Blocks whose summaries DRAM holds, all ranks."),
    gauge("journal_bytes", "bytes", "Size of the journal."),
    gauge(
        "estimated_prefill_tokens_per_second",
        "tokens/s",
        "Measured rate of computing a full chunk without context.",
    ),
    gauge(
        "estimated_load_tokens_per_second",
        "tokens/s",
        "Measured rate of reading a large hit from the devices.",
    ),
    gauge(
        "estimated_load_latency_seconds",
        "seconds",
        "Measured minimum time of a hit on the devices, independent of its size.",
    ),
    gauge("store_bytes", "bytes", "Size of the data files on the device, all ranks.", _DEVICE),
    gauge(
        "wear_bytes",
        "bytes",
        "Bytes written to the device over the life of this store, all ranks.",
        _DEVICE,
    ),
    gauge(
        "wear_used",
        "share",
        "Share of the device's option tbw that wear_bytes has used; 1 is all of its endurance.",
        _DEVICE,
    ),
    gauge(
        "write_budget_used",
        "share",
        "Share of the device's daily_write_budget that was written since midnight UTC.",
        _DEVICE,
    ),
    gauge(
        "device_state",
        "0 or 1",
        "1 while the device is in service, 0 once any rank has taken it out.",
        _DEVICE,
        combine="min",
    ),
    gauge(
        "writes_paused",
        "0 or 1",
        "1 while a rank writes nothing to the device, which has no room, is read-only or fails; "
        "its blocks can still be read.",
        _DEVICE,
        combine="max",
    ),
    gauge(
        "device_share",
        "0 to 1",
        "Share of the device in newly stored data, lowered while it is slow or lost.",
        _DEVICE,
    ),
    Metric(
        "info",
        "info",
        "1",
        "Always 1; the labels name the configuration in force.",
        (
            Label("mode", ("reuse", "page")),
            Label("io_engine", bounded_by="the I/O engine in force"),
            Label("selector", bounded_by="the option selector"),
        ),
        "max",
    ),
)

BATCH_METRICS: Final[tuple[Metric, ...]] = (
    gauge("batches_unended", "batches", "Batches that have not ended."),
    counter(
        "batches_ended",
        "batches",
        "Batches that have ended.",
        Label("outcome", ("completed", "failed", "expired", "cancelled")),
    ),
    counter(
        "batch_requests",
        "requests",
        "Batch requests that got a line in the output file or the error file.",
        Label("outcome", ("completed", "failed")),
    ),
    gauge("batch_requests_running", "requests", "Batch requests that run now."),
    gauge(
        "batches_held",
        "batches",
        "Batches whose next request waits for KV that users have, or wait for.",
    ),
    counter("batch_prompt_tokens", "tokens", "Prompt tokens of answered batch requests."),
    counter(
        "batch_saved_tokens",
        "tokens",
        "Part of batch_prompt_tokens whose KV was found in a cache, so that their prefill was "
        "saved.",
    ),
    gauge("batch_bytes", "bytes", "Size of the files and results of the Batch API."),
    counter(
        "batch_errors",
        "errors",
        "Number of times that the batch runner could not read or write its files, or vLLM aborted "
        "one of its requests, as `/pause` does; it retries.",
    ),
)
"""Metrics of the Batch API. They live in the API server, not in the engine."""

BY_NAME: Final[dict[str, Metric]] = {
    metric.name: metric for metric in (*METRICS, *BATCH_METRICS, *NODE_SERVER_METRICS)
}


def metric_key(name: str, labels: dict[str, str]) -> str:
    """``name|label=value,...`` in declaration order; values are percent-encoded.

    The keys of a histogram have one more part: see :func:`bucket_keys`.

    Raises:
        ValueError: the metric, a label or a label's value is not declared.
    """
    return _metric_key(name, tuple(labels.items()))


@functools.lru_cache(maxsize=4096)
def _metric_key(name: str, items: tuple[tuple[str, str], ...]) -> str:
    """See :func:`metric_key`. Every step asks for the same few."""
    labels = dict(items)
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


def counter_key(name: str, **labels: str) -> str:
    """The :func:`metric_key` of a counter.

    Raises:
        ValueError: not a declared counter, or its labels do not fit.
    """
    return _counter_key(name, tuple(labels.items()))


@functools.lru_cache(maxsize=4096)
def _counter_key(name: str, items: tuple[tuple[str, str], ...]) -> str:
    """See :func:`counter_key`."""
    key = _metric_key(name, items)
    if BY_NAME[name].kind != "counter":
        raise ValueError(f"cannot add to the {BY_NAME[name].kind} {name}")
    return key


MOST_OF_RANKS: Final[frozenset[str]] = frozenset(
    metric_key(metric.name, dict(zip(metric.label_names, values, strict=True)))
    for metric in METRICS
    if metric.kind == "counter" and metric.combine == "max"
    for values in itertools.product(*(label.values for label in metric.labels))
)
"""Keys of the counters of which a step counts what the rank did that did most."""


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
        self._counted = _io.Counters()
        self._gauges: dict[str, float] = {}
        self._changed: dict[str, float] = {}
        """Gauges that have other values than at the last :meth:`take_gauges`."""

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Increase a counter.

        Raises:
            ValueError: not a declared counter, its labels do not fit, or ``value`` is negative.
        """
        self.add_keyed((counter_key(name, **labels),), (value,))

    def add_keyed(self, keys: Iterable[str], values: Iterable[float]) -> None:
        """Increase counters, by keys that :func:`counter_key` or :meth:`take_gained` has made.

        What every step counts is counted so: to find a key takes longer than to add to it.

        Raises:
            ValueError: keys and values differ in length, or a value is negative or not a number;
                those before it are counted.
        """
        self._counted.add(keys, values)

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
        self.add_keyed(parts, (*counts, total))

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
            if self._gauges.get(key) != value:
                self._gauges[key] = self._changed[key] = value

    def total(self, name: str, **labels: str) -> float:
        """A counter since the start of the process.

        Raises:
            ValueError: not a declared metric, or its labels do not fit.
        """
        return self.value(metric_key(name, labels))

    def value(self, key: str) -> float:
        """The counter with this :func:`counter_key` since the start of the process."""
        return self._counted.total(key)

    def totals(self) -> dict[str, float]:
        """All counters, and the parts of histograms, since the start of the process."""
        return self._counted.totals()

    def take_gained(self) -> dict[str, float]:
        """Take the gains of counters since the last call; new ones also if that is nothing."""
        return self._counted.take()

    def gauges(self) -> dict[str, float]:
        """All gauges, a copy."""
        with self._lock:
            return dict(self._gauges)

    def take_gauges(self) -> dict[str, float]:
        """Gauges that have another value than at the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
            return changed
