"""Pages ``/metrics`` as vLLM with our connector and as nodes show them, and a server of pages."""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_ssdkv.base.metrics import BY_NAME, Counters
from vllm_ssdkv.node.server.node_metrics import NodeCollector, Source, start_at_zero

THEIRS = {
    "num_requests_running": Gauge,
    "num_requests_waiting": Gauge,
    "kv_cache_usage_perc": Gauge,
    "prompt_tokens": Counter,
    "generation_tokens": Counter,
    "external_prefix_cache_queries": Counter,
    "external_prefix_cache_hits": Counter,
}
"""Kinds of vLLM's own metrics, as its loggers declare them."""

Labels = tuple[str, ...]
Values = Mapping[str, Mapping[Labels, float | list[float]]]
"""By name, the values by their labels after model and engine; of a histogram all observations."""


def page(ours: Values, theirs: Mapping[str, float] | None = None, engine: str = "0") -> str:
    """The page of one engine."""
    registry = CollectorRegistry()
    common = ("model_name", "engine")
    for name, value in (theirs or {}).items():
        kind = THEIRS[name]
        child = kind(f"vllm:{name}", "", common, registry=registry).labels("some/model", engine)
        child.inc(value)
    for name, values in ours.items():
        metric = BY_NAME[name]
        names = (*common, *metric.label_names)
        if metric.kind == "histogram":
            histogram = Histogram(
                metric.full_name, "", names, registry=registry, buckets=metric.buckets
            )
            for labels, observed in values.items():
                assert isinstance(observed, list)
                for one in observed:
                    histogram.labels("some/model", engine, *labels).observe(one)
            continue
        plain = (Counter if metric.kind == "counter" else Gauge)(
            metric.full_name, "", names, registry=registry
        )
        for labels, number in values.items():
            assert not isinstance(number, list)
            plain.labels("some/model", engine, *labels).inc(number)
    return generate_latest(registry).decode()


def count(counters: Counters, values: Values) -> None:
    """Count these values; of a gauge, show them."""
    for name, by_labels in values.items():
        metric = BY_NAME[name]
        for of_labels, value in by_labels.items():
            labels = dict(zip(metric.label_names, of_labels, strict=True))
            if isinstance(value, list):
                counts = [0.0] * (len(metric.buckets) + 1)
                for one in value:
                    counts[bisect_left(metric.buckets, one)] += 1
                counters.add_all(name, counts, sum(value), **labels)
            elif metric.kind == "counter":
                counters.add(name, value, **labels)
            else:
                counters.set(name, value, **labels)


def node_collector(
    own: Values, stores: Mapping[tuple[str, str], Values]
) -> tuple[NodeCollector, Counters, dict[tuple[str, str], Counters]]:
    """A node's collector, its own counters, and those of its stores by model and directory."""
    counters = Counters()
    start_at_zero(counters)
    count(counters, own)
    of_stores = {labels: Counters() for labels in stores}
    for labels, values in stores.items():
        of_stores[labels].start_at_zero([path for (path,) in values.get("device_state", ())])
        count(of_stores[labels], values)
    sources = [Source(labels, [counted]) for labels, counted in of_stores.items()]
    return NodeCollector(counters, lambda: sources), counters, of_stores


def node_page(own: Values, stores: Mapping[tuple[str, str], Values]) -> str:
    """The page of a node, by its own collector."""
    registry = CollectorRegistry()
    registry.register(node_collector(own, stores)[0])
    return generate_latest(registry).decode()


@contextlib.contextmanager
def served(*answers: str | int | Callable[[], str]) -> Iterator[str]:
    """A server's URL. It gives these pages, or error codes, one by one, and the last for ever.

    A page may be made when it is asked for.
    """
    left = list(answers)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                answer = left.pop(0) if len(left) > 1 else left[0]
            if self.path != "/metrics" or isinstance(answer, int):
                self.send_error(answer if isinstance(answer, int) else 404)
                return
            body = (answer() if callable(answer) else answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: the output is the test's."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
