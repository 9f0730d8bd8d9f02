"""What is asked of a Prometheus server, by its HTTP API."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import SSDKVError

TIMEOUT_S = 30.0


class PrometheusError(SSDKVError):
    """Prometheus cannot be reached, or refuses what it is asked."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series.

    Attributes:
        labels: Its labels, without the name.
        times: Seconds since 1970, ascending, shape [n].
        values: Shape [n]; may hold NaN.
    """

    labels: dict[str, str]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


class Prometheus:
    """A server. Every call blocks for at most 30 s.

    Args:
        url: E.g. ``http://localhost:9090``.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def query_range(self, expression: str, start: float, end: float, step_s: float) -> list[Series]:
        """Values of an expression over a time.

        Args:
            expression: PromQL.
            start: Seconds since 1970.
            end: The same.
            step_s: Seconds between two values.

        Raises:
            PrometheusError: see there.
        """
        answer = self.get("query_range", query=expression, start=start, end=end, step=step_s)
        found = []
        for series in answer["result"]:
            labels = {name: value for name, value in series["metric"].items() if name != "__name__"}
            pairs = np.array([(float(t), float(v)) for t, v in series["values"]], np.float64)
            found.append(Series(labels, pairs[:, 0], pairs[:, 1]))
        return found

    def get(self, path: str, **parameters: object) -> Any:  # noqa: ANN401
        """The ``data`` of an answer of ``/api/v1/<path>``.

        Raises:
            PrometheusError: see there.
        """
        given = urllib.parse.urlencode(parameters)
        url = f"{self._url}/api/v1/{path}?{given}"
        if not url.startswith(("http://", "https://")):
            raise PrometheusError(f"{self._url} is not an http or https URL")
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            raise PrometheusError(f"{self._url} refuses {path} {parameters}: {text}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PrometheusError(
                f"{self._url} does not answer as Prometheus does ({error}); is it running there?"
            ) from error
