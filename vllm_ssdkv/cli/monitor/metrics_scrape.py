"""One look at the page ``/metrics`` of a running server, and what changed between two."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.base.metric import PREFIX

TIMEOUT_S: Final = 10.0
MAX_PAGE_BYTES: Final = 64 << 20
"""A server with hundreds of engines and devices has a tenth of that."""

_PIECE_BYTES: Final = 1 << 16
_THEIRS: Final = "vllm:"

Labels = frozenset[tuple[str, str]]


class ScrapeError(SSDKVError):
    """A server cannot be reached, or has no metrics of ours; the text names its URL."""


def page_url(text: str) -> str:
    """URL of the page, from a server's address as people write it.

    Raises:
        ScrapeError: not an http or https URL.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ScrapeError(f"{text} is not the URL of a server: write http://HOST:PORT")
    path = parts.path.rstrip("/")
    if not path.endswith("/metrics"):
        path += "/metrics"
    return parts._replace(path=path, fragment="").geturl()


@dataclass(frozen=True, slots=True)
class Scrape:
    """Every sample of a page.

    Attributes:
        at: Seconds of ``time.monotonic``, when the page was there.
        samples: By name as shown (``..._total``, ``..._sum``), the value of each set of labels.
    """

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    def series(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of each series with that name and at least those labels."""
        for found, value in self.samples.get(name, {}).items():
            if labels.items() <= found:
                yield dict(found), value

    def values(self, name: str, **labels: str) -> list[float]:
        """The values alone."""
        return [value for _, value in self.series(name, **labels)]

    def total(self, name: str, **labels: str) -> float:
        """Their sum; 0 where there are none."""
        return sum(self.values(name, **labels))


def parse(text: str, at: float, url: str, *, ours: bool = True) -> Scrape:
    """Parse a page. ``ours``: it must have metrics of ours; else vLLM's are enough.

    Raises:
        ScrapeError: it is not a page of metrics, or has none of those.
    """
    samples: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise ScrapeError(f"{url} is not a page of metrics ({error}): {_NAME_IT}") from None
    if not any(name.startswith(PREFIX if ours else _THEIRS) for name in samples):
        if any(name.startswith(_THEIRS) for name in samples):
            raise ScrapeError(
                f"{url} has no metrics of ssdkv: that vLLM runs without the SSDKVConnector; start "
                "it with --kv-transfer-config, see docs/quickstart.md"
            )
        raise ScrapeError(
            f"{url} is the page of neither an engine nor a node, it has no metrics of vLLM: "
            f"{_NAME_IT}, or start vLLM without --disable-log-stats"
        )
    return Scrape(at, samples)


_NAME_IT: Final = (
    "name the address of vllm serve, e.g. ssdkv top http://localhost:8000, or that of a node's "
    "option metrics"
)


def fetch(url: str, timeout_s: float = TIMEOUT_S, *, ours: bool = True) -> Scrape:
    """Ask a server for its page. Blocks for at most twice ``timeout_s``.

    Args:
        url: From :func:`page_url`.
        ours: As for :func:`parse`.

    Raises:
        ScrapeError: it cannot be reached, does not answer in time, or has no such metrics.
    """
    deadline = time.monotonic() + timeout_s
    page = bytearray()
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            while piece := answer.read1(_PIECE_BYTES):
                page += piece
                if len(page) > MAX_PAGE_BYTES:
                    raise ScrapeError(f"{url} is too long for a page of metrics: {_NAME_IT}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no whole answer in {timeout_s:g} s")
    except urllib.error.HTTPError as error:
        error.close()
        raise ScrapeError(f"{url} answers {error.code} ({error.reason}): {_NAME_IT}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ScrapeError(f"{url} cannot be reached ({reason}): {_NAME_IT}") from None
    return parse(page.decode("utf-8", "replace"), time.monotonic(), url, ours=ours)


def gained(older: Scrape, newer: Scrape, name: str, **labels: str) -> float:
    """Gain of the counters with that name and those labels, added up.

    One that is lower than before was started anew by its process: all of it was gained since.
    """
    before = older.samples.get(name, {})
    return sum(
        value if value < before.get(key, 0.0) else value - before.get(key, 0.0)
        for key, value in newer.samples.get(name, {}).items()
        if labels.items() <= key
    )


def mean_gained(older: Scrape, newer: Scrape, histogram: str, **labels: str) -> float | None:
    """Mean of what histograms observed between two looks; None where that is nothing.

    Count and sum of a histogram start anew together, so they are judged together.
    """
    counts, sums = 0.0, 0.0
    for key, count in newer.samples.get(f"{histogram}_count", {}).items():
        if not labels.items() <= key:
            continue
        total = newer.samples.get(f"{histogram}_sum", {}).get(key, 0.0)
        count_before = older.samples.get(f"{histogram}_count", {}).get(key, 0.0)
        sum_before = older.samples.get(f"{histogram}_sum", {}).get(key, 0.0)
        if count < count_before or total < sum_before:
            count_before = sum_before = 0.0
        counts += count - count_before
        sums += total - sum_before
    return sums / counts if counts else None
