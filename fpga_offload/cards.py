"""Cards that attend near flash, as papers and data sheets describe them.

HILOS (Jang et al., ASPLOS 2026) runs on SmartSSDs: an NVMe drive, a KU15P and 4 GB of DDR4 behind
one PCIe 3.0 x4 port. InstInfer (Pan et al., arXiv 2409.04992) puts kernels into the controller of a
flash drive, on a Zynq 7045. Nothing of this was measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from vllm_ssdkv.base.sizes import MIB

Origin: TypeAlias = Literal[
    "measured", "simulated", "synthesised", "calibrated", "published", "assumed"
]
"""Source of a number. ``assumed``: nobody measured it, the text beside it says why it is so."""

CardName: TypeAlias = Literal["smartssd", "flash-controller"]


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, where it comes from, and in which words."""

    value: float
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True)
class Resources:
    """Cells of an FPGA, or of a part of one."""

    lut: int
    ff: int
    dsp: int
    bram36: float
    uram: int = 0


@dataclass(frozen=True, slots=True)
class Card:
    """A card: flash, the memory that the kernel reads, and the kernel's clock.

    Attributes:
        name: As the command line has it.
        flash: Bytes/s from flash to the kernel's memory, or to the kernel.
        memory: Bytes/s of the kernel's memory; None: pages go from flash to the kernel.
        clock: Hz of the kernel.
        start: Seconds that each chunk costs beside its bytes.
        chunk_bytes: Of K and V that are brought while the kernel attends to as many.
        family: Of the FPGA, for Yosys' ``synth_xilinx``.
        fpga: Cells of the whole FPGA.
    """

    name: CardName
    flash: Constant
    memory: Constant | None
    clock: Constant
    start: Constant
    chunk_bytes: int
    family: str
    fpga: Resources


HILOS_CLOCK: Final = 296.05e6
HILOS_BLOCK_CYCLES: Final[Mapping[int, int]] = MappingProxyType({1: 1630, 4: 1658, 5: 1723})
"""Cycles of a block of 128 tokens, d = 128, by query heads of a KV head: Table 3 at 296.05 MHz."""
HILOS_GFLOPS: Final[Mapping[int, float]] = MappingProxyType({1: 11.9, 4: 46.8, 5: 56.3})
"""GFLOPS of HILOS' kernel, by query heads of a KV head (P20)."""
DDR_BANDWIDTH: Final = 19.2e9
"""Bytes/s of one DDR4-2400 channel."""
DDR_EFFICIENCY: Final = (
    sum(gflops / group for group, gflops in HILOS_GFLOPS.items())
    / len(HILOS_GFLOPS)
    / (DDR_BANDWIDTH / 1e9)
)
"""Share of it that reads of K and V reach: the mean of HILOS' three kernels, which all read at 11.3
to 11.9 GB/s."""

_NO_START: Final = Constant(
    0.0, "assumed", "nobody measured what starting a kernel costs; 0 makes times lower bounds"
)

CARDS: Final[Mapping[CardName, Card]] = MappingProxyType(
    {
        "smartssd": Card(
            name="smartssd",
            flash=Constant(
                3.0e9, "published", "HILOS: P2P from the drive, at most 3.0 to 3.3 GB/s"
            ),
            memory=Constant(
                DDR_BANDWIDTH * DDR_EFFICIENCY,
                "calibrated",
                "19.2 GB/s of DDR4 times one efficiency for all three kernels of HILOS' Table 3",
            ),
            clock=Constant(HILOS_CLOCK, "published", "HILOS, Table 3; not reached or tried here"),
            start=_NO_START,
            chunk_bytes=16 * MIB,
            family="xcup",
            fpga=Resources(lut=522_720, ff=1_045_440, dsp=1_968, bram36=984, uram=128),
        ),
        "flash-controller": Card(
            name="flash-controller",
            flash=Constant(
                7.66e9, "published", "InstInfer: read of 8 channels of 1.4 GB/s, as achieved"
            ),
            memory=None,
            clock=Constant(285e6, "published", "InstInfer, on a Zynq 7045; not tried here"),
            start=_NO_START,
            chunk_bytes=16 * MIB,
            family="xc7",
            fpga=Resources(lut=218_600, ff=437_200, dsp=900, bram36=545),
        ),
    }
)
"""Both cards, by name. KU15P by HILOS' table, Zynq 7045 by its data sheet (DS190)."""

HILOS_CELLS: Final[Mapping[int, Resources]] = MappingProxyType(
    {
        1: Resources(lut=203_000, ff=299_000, dsp=198, bram36=0),
        4: Resources(lut=296_000, ff=415_000, dsp=399, bram36=0),
        5: Resources(lut=352_000, ff=482_000, dsp=547, bram36=0),
    }
)
"""HILOS, Table 3: with the platform's shell, in thousands; block RAM is not compared."""
INSTINFER_ATTENTION: Final = Resources(lut=99_200, ff=0, dsp=768, bram36=0)
INSTINFER_TOPK: Final = Resources(lut=5_830, ff=0, dsp=0, bram36=24)
INSTINFER_FILTERS: Final = Resources(lut=58_300, ff=0, dsp=0, bram36=0)
"""Resources of the controller's eight channels together. InstInfer's table of resources; 0: not
compared."""
