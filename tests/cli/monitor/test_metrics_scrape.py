"""Reading a page of metrics, and what is said when there is none."""

from __future__ import annotations

import socket
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.metric_pages import page, served
from vllm_ssdkv.cli.monitor import metrics_scrape
from vllm_ssdkv.cli.monitor.metrics_scrape import (
    Scrape,
    ScrapeError,
    fetch,
    gained,
    mean_gained,
    page_url,
    parse,
)

URL = "http://host/metrics"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://host:8000", "http://host:8000/metrics"),
        ("host:8000/", "http://host:8000/metrics"),
        ("https://host/metrics/", "https://host/metrics"),
        ("http://[::1]:8000/proxy?a=b#c", "http://[::1]:8000/proxy/metrics?a=b"),
    ],
)
def test_addresses_as_people_write_them(text: str, url: str) -> None:
    assert page_url(text) == url


@pytest.mark.parametrize("text", ["", "file:///etc/passwd", "http://", "http://host:x", "ftp://h"])
def test_what_is_no_address_is_told(text: str) -> None:
    with pytest.raises(ScrapeError, match="http://HOST:PORT"):
        page_url(text)


def test_a_page_is_read() -> None:
    text = page({"bytes_read": {("/a",): 5, ("/b",): 7}, "slots": {(): 9}})
    found = parse(text, 3.0, URL)
    assert found.at == 3.0
    assert found.total("vllm:ssdkv_bytes_read_total") == 12
    assert found.values("vllm:ssdkv_bytes_read_total", device="/b") == [7]
    assert found.total("vllm:ssdkv_slots", engine="1") == 0
    ((labels, value),) = found.series("vllm:ssdkv_slots")
    assert (labels, value) == ({"model_name": "some/model", "engine": "0"}, 9)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<html>\n{", "not a page of metrics"),
        ("", "has no metrics of vLLM"),
        ("up 1\n", "is the page of neither an engine nor a node"),
        ("vllm:num_requests_running 0\n", "runs without the SSDKVConnector"),
    ],
)
def test_a_page_without_our_metrics_is_told(text: str, reason: str) -> None:
    with pytest.raises(ScrapeError, match=reason) as caught:
        parse(text, 0.0, URL)
    assert URL in str(caught.value)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/metrics"
        with pytest.raises(ScrapeError, match=r"cannot be reached .*Connection refused") as caught:
            fetch(url)
    assert url in str(caught.value)
    assert "ssdkv top http://localhost:8000" in str(caught.value)


def test_an_error_of_the_server_is_told() -> None:
    with (
        served(503) as url,
        pytest.raises(ScrapeError, match=r"/metrics answers 503 \(Service Unavailable\)"),
    ):
        fetch(page_url(url))


def test_a_server_that_is_silent_has_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        with pytest.raises(ScrapeError, match="timed out"):
            fetch(url, timeout_s=0.2)


def test_a_server_that_drips_has_a_deadline() -> None:
    stop = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not stop.wait(0.01):
                try:
                    connection.sendall(b"#")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        try:
            with pytest.raises(ScrapeError, match=r"timed out|no whole answer in 0\.3 s"):
                fetch(url, timeout_s=0.3)
        finally:
            stop.set()
            thread.join(60)


def test_a_page_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_scrape, "MAX_PAGE_BYTES", 1000)
    with served("#" * 5000) as url, pytest.raises(ScrapeError, match="too long"):
        fetch(page_url(url))


def test_what_is_not_http_is_told() -> None:
    def talk(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"220 mail\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=talk, args=(listening,), daemon=True)
        thread.start()
        with pytest.raises(ScrapeError, match="cannot be reached"):
            fetch(f"http://127.0.0.1:{listening.getsockname()[1]}/metrics")
        thread.join(60)


def counts(**values: float) -> Scrape:
    return Scrape(0.0, {"n": {frozenset({("of", name)}): v for name, v in values.items()}})


def test_a_counter_that_was_reset_counts_from_zero() -> None:
    older = counts(a=10, b=100)
    assert gained(older, counts(a=15, b=100), "n") == 5
    assert gained(older, counts(a=3, b=101), "n") == 4
    assert gained(older, counts(a=10, b=100, new=2), "n") == 2
    assert gained(older, counts(a=12), "n") == 2
    assert gained(older, counts(a=12, b=107), "n", of="b") == 7
    assert gained(older, counts(a=12), "other") == 0


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=20), st.integers(0, 19))
def test_gains_add_up_over_a_restart(steps: list[int], restart: int) -> None:
    """A counter only grows between restarts, so nothing it counted after one is lost."""
    values, value = [0], 0
    for i, step in enumerate(steps):
        value = step if i == restart else value + step
        values.append(value)
    found = sum(
        gained(counts(a=before), counts(a=after), "n") for before, after in pairwise(values)
    )
    restarts = [i for i in range(1, len(steps)) if i == restart]
    # A restart is seen unless the counter has by then passed the old value.
    hidden = sum(values[i] for i in restarts if values[i + 1] >= values[i])
    assert found == sum(steps) - hidden


def histogram(count: float, total: float) -> Scrape:
    key = frozenset({("device", "/a")})
    return Scrape(0.0, {"h_count": {key: count}, "h_sum": {key: total}})


def test_the_mean_of_what_was_observed_between() -> None:
    assert mean_gained(histogram(10, 1.0), histogram(14, 3.0), "h") == 0.5
    assert mean_gained(histogram(10, 1.0), histogram(10, 1.0), "h") is None
    assert mean_gained(histogram(10, 1.0), histogram(14, 3.0), "h", device="/b") is None
    assert mean_gained(histogram(10, 1.0), histogram(2, 3.0), "h") == 1.5, "the count started anew"
    assert mean_gained(histogram(10, 9.0), histogram(12, 3.0), "h") == 0.25, "the sum shows it"
    assert mean_gained(Scrape(0.0, {}), histogram(4, 2.0), "h") == 0.5
