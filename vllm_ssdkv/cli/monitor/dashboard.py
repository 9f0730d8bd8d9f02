"""``ssdkv dashboard``: the Grafana dashboards, and pictures of them without Grafana."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.cli import arguments

app = typer.Typer(no_args_is_help=True, help="Draw the Grafana dashboards without Grafana.")


@app.command()
def render(
    prometheus: Annotated[
        str,
        typer.Option(
            metavar="URL", help="URL of a Prometheus server, such as http://localhost:9090."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=arguments.place,
            metavar="DIR",
            show_default=".",
            help="Directory for the PNG files.",
        ),
    ] = Path(),
    minutes: Annotated[float, typer.Option(min=0.1, help="Time range to draw, up to now.")] = 60.0,
    scrape_interval: Annotated[
        float, typer.Option(min=0.1, help="Scrape interval of that Prometheus in seconds.")
    ] = 15.0,
) -> None:
    """Draw each dashboard's panels, from the data of a Prometheus, into DIR/NAME.png."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        typer.echo("drawing needs matplotlib: pip install 'vllm-ssdkv[bench]'", err=True)
        raise typer.Exit(1) from None
    from vllm_ssdkv.grafana.board import NAMES, read_board
    from vllm_ssdkv.grafana.prometheus import Prometheus, PrometheusError
    from vllm_ssdkv.grafana.render import Period
    from vllm_ssdkv.grafana.render import render as draw

    end, found = time.time(), 0
    period = Period(end - minutes * 60, end, 4 * scrape_interval)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            path = out / f"{name}.png"
            board = read_board(name)
            empty = draw(board, Prometheus(prometheus), period, path)
            found += sum(panel.kind != "row" for panel in board.panels) - empty
            missing = f", {empty} panels without data" if empty else ""
            typer.echo(f"wrote {path} ({approximate_size(path.stat().st_size)}{missing})")
        if not found:
            raise PrometheusError(
                f"{prometheus} has no data of the last {minutes:g} minutes: does it scrape vLLM's "
                "/metrics (docs/monitoring.md)?"
            )
    except (SSDKVError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
