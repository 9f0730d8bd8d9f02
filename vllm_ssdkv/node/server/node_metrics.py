"""Metrics of a node on a port of its own: its own, and those of its stores."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.metric import Metric
from vllm_ssdkv.base.metrics import (
    Counters,
    bucket_keys,
    combine_gauges,
    histogram_of,
    parse_key,
)
from vllm_ssdkv.base.metrics_node import NODE_SERVER_METRICS

logger = logging.getLogger(__name__)

MOST_READERS = 16
READER_S = 5.0
"""Seconds that a connection to ``/metrics`` has: it takes no keys, so anybody may open one."""

_STORE_LABELS = ("model_name", "store")


@dataclass(slots=True)
class Source:
    """Numbers of a store, or of the node itself.

    Attributes:
        labels: Values of the labels that name the store; empty: the node.
        counters: Of all its parts.
    """

    labels: tuple[str, ...]
    counters: Sequence[Counters]


class NodeCollector(Collector):
    """Reads the counters of the node and its stores when Prometheus asks. Any thread."""

    def __init__(self, node: Counters, stores: Callable[[], Sequence[Source]]):
        """``stores``: those that are open."""
        self._node, self._stores = node, stores

    def collect(self) -> Iterator[Family]:
        """All metrics as Prometheus has them."""
        families: dict[str, Family] = {}
        for source in (Source((), [self._node]), *self._stores()):
            totals: dict[str, float] = {}
            for counters in source.counters:
                for key, value in counters.totals().items():
                    totals[key] = totals.get(key, 0.0) + value
            self._add_totals(families, source, totals)
            gauges = [counters.gauges() for counters in source.counters]
            for key, value in combine_gauges(gauges).items():
                metric, values = parse_key(key)
                _family(families, metric, source).add_metric([*source.labels, *values], value)
        yield from families.values()

    def _add_totals(
        self, families: dict[str, Family], source: Source, totals: dict[str, float]
    ) -> None:
        histograms: dict[str, list[float]] = {}
        for key, value in totals.items():
            metric, values = parse_key(key)
            if metric.kind == "histogram":
                whole, position = histogram_of(key)
                parts = histograms.setdefault(whole, [0.0] * len(bucket_keys(whole)))
                parts[position] = value
            else:
                _family(families, metric, source).add_metric([*source.labels, *values], value)
        for key, parts in histograms.items():
            metric, values = parse_key(key)
            bounds = [*map(str, metric.buckets), "+Inf"]
            counts = itertools.accumulate(parts[:-1])
            buckets = list(zip(bounds, counts, strict=True))
            _family(families, metric, source).add_metric(
                [*source.labels, *values], buckets, parts[-1]
            )


def _family(families: dict[str, Family], metric: Metric, source: Source) -> Any:  # noqa: ANN401 - one of three kinds, whose values differ
    """Family of a metric, made when it is first asked for."""
    found = families.get(metric.name)
    if found is None:
        kinds = {"counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
        labels = [*(_STORE_LABELS if source.labels else ()), *metric.label_names]
        made = kinds.get(metric.kind, GaugeMetricFamily)
        found = families[metric.name] = made(metric.full_name, metric.help, labels=labels)
    return found


def start_at_zero(counters: Counters) -> None:
    """Show the node's own counters as 0 from the start, so that rates work."""
    for metric in NODE_SERVER_METRICS:
        for values in itertools.product(*(label.values for label in metric.labels)):
            labels = dict(zip(metric.label_names, values, strict=True))
            if metric.kind == "counter":
                counters.add(metric.name, 0, **labels)
            else:
                counters.set(metric.name, 0, **labels)


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """HTTP server with a thread for each connection: a few at a time, each for a few seconds.

    Whoever comes ends the oldest one too many, so silent connections keep no reader out, and take
    no more files from the node than these.
    """

    daemon_threads = True
    counters: Counters
    """Reasons of ``node_refusals``."""

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 - those of its base
        self._readers: dict[socket.socket, float] = {}
        """Ends of their time, the oldest first."""
        self._readers_lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base
        """Take a connection in. In the thread of ``serve_forever``."""
        with self._readers_lock:
            excess = list(self._readers)[: max(0, len(self._readers) + 1 - MOST_READERS)]
            self._readers[request] = time.monotonic() + READER_S
        self._end(excess)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections whose time is over. In the thread of ``serve_forever``, all the time."""
        now = time.monotonic()
        with self._readers_lock:
            late = [reader for reader, end in self._readers.items() if end <= now]
        self._end(late)

    def _end(self, readers: Sequence[socket.socket]) -> None:
        for reader in readers:
            with self._readers_lock:
                if self._readers.pop(reader, None) is None:
                    continue
                self.counters.add("node_refusals", 1, cause="limit")
                # Under the lock: its thread has not closed it. That thread wakes, and does so.
                with contextlib.suppress(OSError):
                    reader.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as in the base
        """Close a connection, in its own thread."""
        with self._readers_lock:
            self._readers.pop(request, None)
        super().shutdown_request(request)


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Log no requests."""


def serve_metrics(where: str, collector: Collector, counters: Counters) -> tuple[WSGIServer, int]:
    """Serve ``/metrics`` in a thread; the server, and its port.

    Args:
        where: ``host:port``, or a port of 127.0.0.1; port 0 is any.
        counters: For connections that were ended, ``node_refusals``.

    Raises:
        ConfigError: it is no such address, or not to be had.
    """
    host, _, port = where.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"metrics: {where!r} is no host:port")
    registry = CollectorRegistry()
    registry.register(collector)
    page = make_wsgi_app(registry)

    def as_text(environ: dict[str, Any], start_response: Any) -> Any:  # noqa: ANN401 - WSGI's
        # As OpenMetrics, prometheus_client writes names with an underscore in place of the colon.
        return page({**environ, "HTTP_ACCEPT": "*/*"}, start_response)

    host = host.strip("[]") or "127.0.0.1"
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        kind = type("_Server", (_MetricsServer,), {"address_family": family, "counters": counters})
        server: WSGIServer = make_server(host, int(port), as_text, kind, _SilentHandler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"metrics: cannot listen at {where}: {error}") from error
    threading.Thread(target=server.serve_forever, name="ssdkv-metrics", daemon=True).start()
    return server, int(server.server_port)
