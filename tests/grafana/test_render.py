"""Numbers, names and gaps in the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.grafana.conftest import GRAFANA
from vllm_ssdkv.grafana.board import NAMES, Panel, read_board
from vllm_ssdkv.grafana.legend import ShortLabels, distinct_parts
from vllm_ssdkv.grafana.prometheus import Prometheus, PrometheusError, Series
from vllm_ssdkv.grafana.render import Period, _alone, _draw_lines, _in_legend, time_ticks
from vllm_ssdkv.grafana.values import format_value


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.537, "percentunit", "53.7 %"),
        (2.0, "none", "2"),
        (9999.0, "none", "9999"),
        (120_000.0, "none", "120 k"),
        (0.0, "none", "0"),
        (1000.0, "decbytes", "1 kB"),
        (999.0, "decbytes", "999 B"),
        (999.7, "decbytes", "1000 B"),
        (1023.0, "bytes", "1023 B"),
        (9999.7, "none", "10000"),
        (999.7, "percentunit", "99970 %"),
        (0.9997e-3, "s", "1000 µs"),
        (5.72e6, "Bps", "5.72 MB/s"),
        (3e20, "Bps", "300000 PB/s"),
        (512.0, "bytes", "512 B"),
        (1.5 * 2**40, "bytes", "1.5 TiB"),
        (0.0, "si:tok/s", "0 tok/s"),
        (4200.0, "si:tok/s", "4.2 ktok/s"),
        (0.25, "si:s/s", "0.25 s/s"),
        (12.5, "ops", "12.5/s"),
        (12500.0, "iops", "12.5 k/s"),
        (60e-6, "s", "60 µs"),
        (0.0021, "s", "2.1 ms"),
        (0.0, "s", "0 s"),
        (42.0, "s", "42 s"),
        (75.0, "s", "1.25 min"),
        (9439.0, "s", "2.62 h"),
        (1e6, "s", "11.6 d"),
        (1.5768e8, "s", "5 years"),
        (4220.0, "short", "4.22 k"),
    ],
)
def test_numbers_have_their_units(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_the_legend_names_what_is_largest() -> None:
    def named(*highest: float) -> tuple[list[int], str]:
        return _in_legend([(str(i), np.array([0.0, value])) for i, value in enumerate(highest)])

    assert named(0, 0, 5, 0, 0, 0, 0, np.nan, 2) == ([2, 8], "and 7 more, all 0")
    assert named(*range(1, 9)) == ([2, 3, 4, 5, 6, 7], "and 2 more")
    assert named(*[0] * 9) == ([0], "and 8 more, all 0")
    assert named(0, 1, 0) == ([0, 1, 2], "")
    assert named() == ([], "")


def test_a_series_without_a_name_has_that_of_its_panel() -> None:
    """As the only node's, whose legend is its label ``instance`` alone."""
    from matplotlib.figure import Figure

    panel = Panel("Sessions", "graph", "none", False, False, (), 0, 0, 12, 8, ())
    period = Period(0.0, 600.0, 60.0)
    values = np.ones(len(period.times()))
    axes = Figure().subplots()
    _draw_lines(axes, panel, [("", values), ("_hidden", values), ("b", values)], period)
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["Sessions", "_hidden", "b"]


def test_where_there_is_no_data_there_is_a_gap() -> None:
    """Prometheus leaves out what it does not have: a line through the rest would hide that."""
    period = Period(1000.0, 1100.0, 80.0)
    assert period.step_s == 10
    known = np.array([1000.0, 1010.0, 1040.004, 1100.0])
    values = period.on_grid(Series({}, known, np.arange(1.0, 5.0)))
    gaps = np.isnan(values)
    assert len(values) == len(period.times()) == 11
    assert np.flatnonzero(~gaps).tolist() == [0, 1, 4, 10]
    assert values[~gaps].tolist() == [1, 2, 3, 4]


@given(st.floats(1e9, 2e9), st.floats(10, 1e7))
def test_ticks_are_few_and_round(start: float, length: float) -> None:
    ticks = np.array(time_ticks(Period(start, start + length, 60.0))) * 86400
    assert 1 <= len(ticks) <= 7
    assert start - 1 <= ticks[0] <= ticks[-1] <= start + length + 1
    for tick in ticks:
        at = datetime.fromtimestamp(round(tick), UTC)
        assert length < 60 or at.second == 0 or length < 360


@pytest.mark.parametrize(
    ("paths", "short"),
    [
        (["/mnt/nvme0/kv/qwen", "/mnt/nvme1/kv/qwen"], ["nvme0", "nvme1"]),
        (["/mnt/a", "/mnt/b/c"], ["a", "b/c"]),
        (["/mnt/a", "/mnt/a/b"], ["a", "a/b"]),
        (["/a/x/0", "/b/x/1"], ["a/x/0", "b/x/1"]),
        (["/mnt/nvme0/kv"], ["kv"]),
        ([], []),
    ],
)
def test_devices_are_named_by_what_tells_them_apart(paths: list[str], short: list[str]) -> None:
    assert distinct_parts(paths) == short


@given(st.lists(st.text("ab/", min_size=1).map(lambda text: f"/{text}"), unique=True, min_size=2))
def test_short_names_are_as_many_as_paths(paths: Sequence[str]) -> None:
    different = sorted({"/".join(part for part in path.split("/") if part) for path in paths})
    assert len(set(distinct_parts([f"/{path}" for path in different]))) == len(different)


def test_one_server_is_not_named() -> None:
    def labels(instance: str, device: str) -> dict[str, str]:
        return {"instance": instance, "engine": "0", "device": device, "kind": "eio"}

    one = [labels("host:8000", "/mnt/0"), labels("host:8000", "/mnt/1"), {"kind": "eio"}]
    assert ShortLabels(one).of(one[0]) == labels("", "0") | {"engine": ""}
    two = [*one, labels("other:8000", "/mnt/0")]
    assert ShortLabels(two).of(one[0]) == labels("host:8000", "0")


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
