"""Group of commands ``ssdkv lab fpga``."""

from __future__ import annotations

import typer

from vllm_ssdkv.cli.fpga.estimate import estimate
from vllm_ssdkv.cli.fpga.simulate import simulate
from vllm_ssdkv.cli.fpga.synth import synth

app = typer.Typer(
    no_args_is_help=True, help="Estimate, simulate and synthesise the FPGA's attention kernels."
)
app.command()(estimate)
app.command()(simulate)
app.command()(synth)
