"""How numbers look in the pictures."""

from __future__ import annotations

import numpy as np
import pytest

from tests.grafana.conftest import GRAFANA
from vllm_ssdkv.grafana.board import NAMES, read_board
from vllm_ssdkv.grafana.prometheus import Prometheus, PrometheusError, Series
from vllm_ssdkv.grafana.render import _alone, _largest, format_value


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.537, "percentunit", "53.7 %"),
        (2.0, "none", "2"),
        (1000.0, "decbytes", "1 kB"),
        (999.0, "decbytes", "999 B"),
        (5.72e6, "Bps", "5.72 MB/s"),
        (3e20, "Bps", "3e+05 PB/s"),
        (12.5, "ops", "12.5/s"),
        (12500.0, "iops", "12.5 k/s"),
        (60e-6, "s", "60 µs"),
        (0.0021, "s", "2.1 ms"),
        (0.0, "s", "0 s"),
        (75.0, "s", "75 s"),
        (4220.0, "short", "4.22 k"),
    ],
)
def test_numbers_have_their_units(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_the_legend_names_what_is_largest() -> None:
    highest = [0, 0, 5, 0, 0, 0, 0, np.nan, 2]
    series = [
        (str(i), Series({}, np.arange(2.0), np.array([0.0, value])))
        for i, value in enumerate(highest)
    ]
    assert _largest(series) == [0, 1, 2, 3, 4, 8]
    assert _largest([]) == []


@pytest.mark.parametrize(
    ("values", "alone"),
    [
        ([], []),
        ([3], [0]),
        ([3, 4], []),
        ([np.nan, 1, np.nan, 2, 3, np.nan], [1]),
        ([1, np.nan, 1], [0, 2]),
    ],
)
def test_a_sample_without_neighbours_is_seen(values: list[float], alone: list[int]) -> None:
    assert _alone(np.array(values, dtype=np.float64)) == alone


@pytest.mark.parametrize("name", NAMES)
def test_every_unit_of_the_dashboards_can_be_written(name: str) -> None:
    panels = [panel for panel in read_board(name).panels if panel.kind != "row"]
    assert all(format_value(1.0, panel.unit) for panel in panels)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://127.0.0.1", GRAFANA.as_uri()])
def test_what_is_not_prometheus_is_an_error(url: str) -> None:
    with pytest.raises(PrometheusError, match=url):
        Prometheus(url).get("query", query="up")
