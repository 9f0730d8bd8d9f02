"""What the dashboards are built of: panels of one look, on one data source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from grafana_foundation_sdk.builders import common, dashboard, stat, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from vllm_ssdkv.grafana.board import EVERYTHING

OURS: Final = "vllm:ssdkv_"
ENGINE: Final = 'model_name=~"$model_name",engine=~"$engine"'
"""Chooses the engines. Every panel's series are of these."""
STORE: Final = 'model_name=~"$model_name",engine=~"$engine|"'
"""Chooses the stores: those of the engines, and those of nodes for their models. An engine of a
node has none, and a store of a node has no engine."""
DEVICE: Final = f'{ENGINE},device=~"$device"'
EACH_DEVICE: Final = ("instance", "engine", "device")
"""Labels that tell devices apart: two servers, or two machines of one, may have the same paths."""
DEVICE_LEGEND: Final = "{{device}} {{instance}}/{{engine}}"
SERVER: Final = 'instance=~"$instance"'
"""Chooses the servers. Metrics of the Batch API name no engine."""
NODE: Final = 'instance=~"$node"'
"""Chooses the nodes, by the addresses of their metrics."""
NODE_STORE: Final = f'{NODE},store!=""'
"""Chooses the stores of these nodes. Engines with a store of their own show it under the same
names, without the label ``store``."""

Query: TypeAlias = tuple[str, str]
"""A PromQL expression and the legend of its series."""

Limit: TypeAlias = tuple[float, str]
"""A value and the colour of what reaches it: where the rules of ``alerts.yml`` have one, theirs."""

WARN: Final = "orange"
BAD: Final = "red"
TOKENS_PER_S: Final = "si:tok/s"
SECONDS_PER_S: Final = "si:s/s"
_NEUTRAL: Final = "blue"
_NOTHING: Final = "transparent"

_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH: Final = 8
_HEIGHT: Final = 7


def ours(name: str, *more: str) -> str:
    """Selector of one of our metrics, for the chosen engines."""
    return f"{OURS}{name}{{{','.join([ENGINE, *more])}}}"


def stored(name: str, *more: str) -> str:
    """Selector of one of our metrics, for the stores of the chosen engines and of their nodes."""
    return f"{OURS}{name}{{{','.join([STORE, *more])}}}"


def of_device(name: str, *more: str) -> str:
    """Selector of one of our metrics, for the chosen devices."""
    return f"{OURS}{name}{{{','.join([DEVICE, *more])}}}"


def theirs(name: str, *more: str) -> str:
    """Selector of one of vLLM's own metrics, for the chosen engines."""
    return f"vllm:{name}{{{','.join([ENGINE, *more])}}}"


def on_server(name: str, *more: str) -> str:
    """Selector of a metric of vLLM's or ours (``ssdkv_...``), for the chosen servers."""
    return f"vllm:{name}{{{','.join([SERVER, *more])}}}"


def on_node(name: str, *more: str) -> str:
    """Selector of one of a node's own metrics, for the chosen nodes."""
    return f"{OURS}{name}{{{','.join([NODE, *more])}}}"


def in_node(name: str, *more: str) -> str:
    """Selector of a metric of stores, for all stores of the chosen nodes."""
    return f"{OURS}{name}{{{','.join([NODE_STORE, *more])}}}"


def rate(selector: str, *by: str) -> str:
    """Increase per second, added up over everything but the labels ``by``."""
    return _sum(f"rate({selector}[$__rate_interval])", by)


def total(selector: str, *by: str) -> str:
    """The values, added up over everything but the labels ``by``."""
    return _sum(selector, by)


def _sum(expression: str, by: Iterable[str]) -> str:
    labels = ", ".join(by)
    return f"sum by ({labels}) ({expression})" if labels else f"sum({expression})"


def share(part: str, whole: str) -> str:
    """``part / whole``, and nothing while the whole is 0."""
    return f"{part} / ({whole} > 0)"


def parts(each: str, whole: str) -> str:
    """Every series of ``each`` divided by the one of ``whole``; nothing while that is 0."""
    return f"{each} / on () group_left () ({whole} > 0)"


def quantile(q: float, selector: str, *by: str) -> str:
    """Quantile of a histogram, given the selector of its buckets."""
    return f"histogram_quantile({q}, {rate(selector, 'le', *by)})"


def _targets(queries: Iterable[Query]) -> list[Dataquery]:
    return [
        Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        for number, (expression, legend) in enumerate(queries)
    ]


def _thresholds(base: str, limits: Iterable[Limit]) -> dashboard.ThresholdsConfig:
    steps = [Threshold(None, base), *(Threshold(value, color) for value, color in limits)]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def graph(
    title: str,
    meaning: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    limits: Sequence[Limit] = (),
) -> timeseries.Panel:
    """Lines over time, from zero, and gaps where there is no data.

    Args:
        title: Of the panel.
        meaning: What it shows and what to make of it, for the corner of the panel.
        unit: Grafana's name of the unit.
        queries: What is drawn.
        stacked: Whether the series are parts of a whole.
        limits: Drawn as dashed lines.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(meaning)
        .datasource(_SOURCE)
        .unit(unit)
        .min(0)
        .span(_WIDTH)
        .height(_HEIGHT)
        .fill_opacity(40 if stacked else 8)
        .span_nulls(False)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if limits:
        dashed = common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED)
        panel.thresholds(_thresholds(_NOTHING, limits)).thresholds_style(dashed)
    for target in _targets(queries):
        panel.with_target(target)
    return panel


def number(
    title: str,
    meaning: str,
    unit: str,
    query: Query,
    show: BigValueTextMode = BigValueTextMode.VALUE,
    limits: Sequence[Limit] = (),
) -> stat.Panel:
    """The last value, large, or the legend; coloured from the limits on. See :func:`graph`."""
    panel = (
        stat.Panel()
        .title(title)
        .description(meaning)
        .datasource(_SOURCE)
        .unit(unit)
        .span(4)
        .height(4)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .text_mode(show)
        .thresholds(_thresholds(_NEUTRAL, limits))
    )
    for target in _targets([query]):
        panel.with_target(target)
    return panel


def row(title: str) -> dashboard.Row:
    """A heading."""
    return dashboard.Row(title)


def _choice(name: str, label: str, metric: str, values_of: str = "") -> dashboard.QueryVariable:
    """Choice of values of a metric's label ``values_of``, by default ``name``."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(f"label_values({metric}, {values_of or name})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(EVERYTHING[name])
    )


def new_dashboard(title: str, uid: str, meaning: str) -> dashboard.Dashboard:
    """An empty dashboard with the choice of data source."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(meaning)
        .tags(["vllm", "ssdkv"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )


def with_engine_choice(board: dashboard.Dashboard) -> dashboard.Dashboard:
    """The dashboard, with a choice of models and one of engines."""
    return board.with_variable(_choice("model_name", "Model", f"{OURS}info")).with_variable(
        _choice("engine", "Engine", f"{OURS}info")
    )


def with_device_choice(board: dashboard.Dashboard) -> dashboard.Dashboard:
    """The dashboard, with a choice of devices."""
    return board.with_variable(_choice("device", "Device", f"{OURS}device_state"))


def with_node_choice(board: dashboard.Dashboard) -> dashboard.Dashboard:
    """The dashboard, with a choice of nodes."""
    return board.with_variable(_choice("node", "Node", f"{OURS}node_stores", "instance"))


def with_server_choice(board: dashboard.Dashboard) -> dashboard.Dashboard:
    """The dashboard, with a choice of servers that run batches."""
    return board.with_variable(_choice("instance", "Server", f"{OURS}batches_unended"))
