"""Pages ``/metrics`` as vLLM with our connector shows them, and a server of such pages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_ssdkv.base.metrics import BY_NAME

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


@contextlib.contextmanager
def served(*answers: str | int) -> Iterator[str]:
    """A server's URL. It gives these pages, or error codes, one by one, and the last for ever."""
    left = list(answers)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                answer = left.pop(0) if len(left) > 1 else left[0]
            if self.path != "/metrics" or isinstance(answer, int):
                self.send_error(answer if isinstance(answer, int) else 404)
                return
            body = answer.encode()
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
