"""Files of results: cycles from simulation of the RTL, and cells from its synthesis.

``fpga_offload/results/cycles.json`` and ``synthesis.json`` are written by the commands of simulator
and synthesiser, and committed. The estimator and the tables of ``docs/fpga.md`` read them. A file
is one object: ``command`` that wrote it, ``tools`` with their versions, and ``rows``, each an
object with the fields of :class:`Cycles` or :class:`Cells`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.fpga_offload.description import BEAT_BYTES

FOLDER: Final = Path(__file__).parent / "results"
CYCLES: Final = "cycles.json"
SYNTHESIS: Final = "synthesis.json"


@dataclass(frozen=True, slots=True)
class Cycles:
    """Cycles of one run of a simulated kernel: one job, one KV head.

    Attributes:
        kernel: ``attend``; ``sparf``, both steps; ``sparf_first``, what it takes to choose;
            ``sparf_second``, attention to what was chosen alone.
        head_size: Channels of a head.
        group: Query heads of a KV head.
        dtype: Of K and V, as ``description.DTYPES``.
        tokens: Of the context.
        nbytes: Of pages that were read over the bus: K and V, for ``sparf`` channel pages too.
        cycles: From start to done.
        stalls: Share of cycles in which channels of the bus were held back on purpose.
    """

    kernel: str
    head_size: int
    group: int
    dtype: str
    tokens: int
    nbytes: int
    cycles: int
    stalls: float = 0.0

    @property
    def subject(self) -> tuple[str | float, ...]:
        """The kernel, of which several lengths are measured at a time."""
        return self.kernel, self.head_size, self.group, self.dtype, self.stalls

    @property
    def order(self) -> tuple[str | float, ...]:
        """Place in a file."""
        return *self.subject, self.tokens

    @property
    def line_rate(self) -> float:
        """Share of the cycles that moved a beat of pages."""
        return self.nbytes / BEAT_BYTES / self.cycles


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of one synthesised design.

    Attributes:
        design: Of ``synth.DESIGNS``.
        family: Of Yosys' ``synth_xilinx``: ``xcup`` or ``xc7``.
        head_size: Channels of a head.
        group: Query heads of a KV head.
        lut: Look-up tables, those used as memory and shift registers among them.
        ff: Flip-flops.
        dsp: Multipliers.
        bram36: Block RAMs of 36 Kbit; one of 18 Kbit is half.
        uram: Ultra RAMs.
        seconds: That the synthesis took.
    """

    design: str
    family: str
    head_size: int
    group: int
    lut: int
    ff: int
    dsp: int
    bram36: float = 0.0
    uram: int = 0
    seconds: float = 0.0

    @property
    def subject(self) -> tuple[str | float, ...]:
        """The design, which is counted once."""
        return self.family, self.design, self.head_size, self.group

    @property
    def order(self) -> tuple[str | float, ...]:
        """Place in a file."""
        return self.subject


Row = TypeVar("Row", Cycles, Cells)
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
}
"""Types of values in a file, by the annotation of their field."""


@dataclass(frozen=True, slots=True)
class Results(Generic[Row]):
    """Content of one file of results.

    Example::

        found = read_cycles()
        longest = max(found.rows, key=lambda row: row.tokens)
    """

    command: str
    tools: Mapping[str, str]
    rows: Sequence[Row]


def write_results(results: Results[Row], path: Path) -> None:
    """Write a file of results, one row a line."""
    rows = ",\n".join(f"    {json.dumps(asdict(row))}" for row in results.rows)
    head = f'  "command": {json.dumps(results.command)},\n  "tools": {json.dumps(results.tools)}'
    path.write_text(f'{{\n{head},\n  "rows": [\n{rows}\n  ]\n}}\n', encoding="utf-8")


def add_results(results: Results[Row], path: Path) -> None:
    """Put rows into a file of results, in place of those of the same kernels or designs in it.

    Raises:
        BenchError: there is a file of another form.
    """
    if not results.rows:
        return
    rows = list(results.rows)
    if path.exists():
        mine = {row.subject for row in rows}
        rows += [row for row in _read(path, type(rows[0])).rows if row.subject not in mine]
    rows.sort(key=lambda row: row.order)
    write_results(Results(results.command, results.tools, rows), path)


def read_cycles(path: Path = FOLDER / CYCLES) -> Results[Cycles]:
    """Cycles of the simulated kernels.

    Raises:
        BenchError: the file is missing, or not in this form.
    """
    return _read(path, Cycles)


def read_synthesis(path: Path = FOLDER / SYNTHESIS) -> Results[Cells]:
    """Cells of the synthesised designs.

    Raises:
        BenchError: the file is missing, or not in this form.
    """
    return _read(path, Cells)


def _read(path: Path, kind: type[Row]) -> Results[Row]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = [_row(row, kind) for row in document["rows"]]
        return Results(document["command"], document["tools"], rows)
    except OSError as error:
        raise BenchError(
            f"{path}: {error.strerror}; fpga_offload/results/README.md says what makes it"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise BenchError(f"{path} holds no results of {kind.__name__}: {error}") from error


def _row(row: Mapping[str, Any], kind: type[Row]) -> Row:
    made = kind(**row)
    for field in fields(made):
        value = getattr(made, field.name)
        if not isinstance(value, _TYPES[str(field.type)]):
            raise TypeError(f"{field.name}: {value!r}")
        if isinstance(value, (int, float)) and value < 0:
            raise ValueError(f"{field.name}: {value!r}")
    return made
