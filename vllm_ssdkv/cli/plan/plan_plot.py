"""The picture of ``ssdkv plan``: speed over requests at a time, and what purchases bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_ssdkv.profiling.rig.plot import picture
from vllm_ssdkv.profiling.sizing.plan import Plan


def plot(plan: Plan, curves: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Write the picture. Reads no display.

    Args:
        plan: Whose purchases are drawn.
        curves: Of each way, tokens/s by requests at a time.
        path: Of the picture."""
    from matplotlib.ticker import StrMethodFormatter

    with picture(path, 10, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        for number, (name, points) in enumerate(curves.items()):
            x, y = zip(*points, strict=True)
            # Ways that are equally fast lie over each other: the later ones are thinner.
            width = 1 + (len(curves) - number)
            left.plot(x, y, marker="o", markersize=3, linewidth=width, label=name)
        best = plan.best
        left.plot([best.choice.batch], [best.tokens_per_s], "k*", markersize=10, label="the plan")
        left.set(xlabel="requests that decode at a time", ylabel="tokens/s, prompts included")
        left.set_xscale("log", base=2)
        left.set_yscale("log")
        for axis in (left.xaxis, left.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        left.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
        left.grid(alpha=0.3)
        left.legend(fontsize=8)
        names = [one.name for one in plan.purchases]
        right.barh(names, [one.gain for one in plan.purchases])
        right.axvline(1, color="black", linewidth=1)
        right.invert_yaxis()
        right.set(xlabel="tokens/s, times that of the plan")
