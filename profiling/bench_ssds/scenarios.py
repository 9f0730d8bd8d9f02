"""Scenarios on several SSDs, and the rows of their results."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.config.io_engine import EngineKind
from vllm_ssdkv.profiling.bench_io.case import Case, Sample, device_counts
from vllm_ssdkv.profiling.bench_io.engines import engine_contenders
from vllm_ssdkv.profiling.bench_io.files import BenchFile, bench_files
from vllm_ssdkv.profiling.bench_io.fio import FioContender
from vllm_ssdkv.profiling.bench_io.pools import MapContender, ThreadContender
from vllm_ssdkv.profiling.bench_io.rivals import gather
from vllm_ssdkv.profiling.bench_io.run import Result, run_case
from vllm_ssdkv.profiling.bench_ssds.setup import Setup
from vllm_ssdkv.profiling.bench_ssds.slots import GEOMETRY, SlotRequests
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

SLOW_FACTOR = 5.0
"""Factor by which the slow device is slower."""

UNIT_BYTES = 512 * 1024
"""I/O size of the dense measurements: our stripe unit, and what throttled devices do not split."""

SPARSE_BYTES = 8 * 1024
"""One page of a sparse read."""

RAID_FILE_BYTES = 128 * MIB
"""Bytes that fio reads on RAID-0."""

TRUST = 0.9
"""fio must reach this share of the devices' sum, or nothing measured on them means anything."""


RAID0 = "vLLM fs, RAID-0"
ONE_DEVICE = "vLLM fs, one device"
"""Place of vLLM's block files: it takes one directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One median.

    Attributes:
        scenario: ``emulation``, ``scaling``, ``request``, ``slow`` or ``sparse``.
        what: Who did it, and how.
        op: ``read`` or ``write``.
        devices: Devices in use.
        at_once: Requests at once, of slots or of single I/Os.
        bytes_per_s: Median throughput.
        of_sum: As a share of what the devices can do together.
        cpu_s_per_gb: Median CPU seconds per 10^9 bytes, of this process only.
        iops: Median I/Os (of slots: slots) per second.
    """

    scenario: str
    what: str
    op: str
    devices: int
    at_once: int
    bytes_per_s: float
    of_sum: float
    cpu_s_per_gb: float
    iops: float

    def plain(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Effort:
    """Time that a measurement takes.

    Attributes:
        repeats: Runs of each.
        seconds: Of each run that ends by time.
        blocks: Slots of a request that is alone.
        requests: Requests at once where there are many.
    """

    repeats: int
    seconds: float
    blocks: int
    requests: int


class UntrustedError(BenchError):
    """fio does not see the devices that were asked for: nothing measured on them means anything."""


class Requests(Protocol):
    """Ours or vLLM's."""

    def check(self, blocks: Sequence[int]) -> None:
        """See :meth:`SlotRequests.check`."""

    def run(self, op: Op, requests: Sequence[Sequence[int]]) -> Sample:
        """See :meth:`SlotRequests.run`."""


def _row(
    scenario: str, what: str, op: Op, devices: int, at_once: int, best: float, samples: list[Sample]
) -> Row:
    def median(figure: Callable[[Sample], float]) -> float:
        return statistics.median(map(figure, samples))

    rate = median(lambda sample: sample.bytes_per_s)
    return Row(
        scenario=scenario,
        what=what,
        op=op.name.lower(),
        devices=devices,
        at_once=at_once,
        bytes_per_s=rate,
        of_sum=rate / best,
        cpu_s_per_gb=median(lambda sample: sample.cpu_s_per_gb),
        iops=median(lambda sample: sample.iops),
    )


def _case_row(scenario: str, result: Result, best: float) -> Row:
    if result.error is not None:
        raise BenchError(f"{result.contender}: {result.error}")
    case = result.case
    return _row(
        scenario, result.contender, case.op, case.devices, case.in_flight, best, result.samples
    )


def emulation(setup: Setup, files: list[BenchFile], program: str, effort: Effort) -> list[Row]:
    """Figures of fio: each number of devices, and a slow one alone.

    A machine that is busy for a moment has three attempts.

    Raises:
        UntrustedError: fio does not see the model.
        BenchError: fio failed.
    """
    for _ in range(3):
        rows = _emulation(setup, files, program, effort)
        wrong = [row for row in rows if not TRUST <= row.of_sum <= 2 - TRUST]
        if not wrong:
            return rows
    seen = "; ".join(f"{r.what}, {r.op} on {r.devices}: {r.of_sum:.2f}" for r in wrong)
    raise UntrustedError(f"fio does not see the devices that were asked for ({seen})")


def _emulation(setup: Setup, files: list[BenchFile], program: str, effort: Effort) -> list[Row]:
    fio = FioContender(program, files, registered=False)
    rows = []
    for op in (Op.READ, Op.WRITE):
        for count in device_counts(setup.devices):
            (result,) = run_case(
                Case(op, UNIT_BYTES, 8, count), [fio], effort.repeats, effort.seconds
            )
            best = setup.sum_of_devices(UNIT_BYTES, count)
            rows.append(_case_row("emulation", result, best))
    slow = FioContender(program, files[:1], registered=False)
    with setup.slow(0, SLOW_FACTOR):
        (result,) = run_case(
            Case(Op.READ, UNIT_BYTES, 8, 1), [slow], effort.repeats, effort.seconds
        )
        row = _case_row("emulation", result, setup.sum_of_devices(UNIT_BYTES, 1))
        rows.append(Row(**{**row.plain(), "what": f"fio, device {SLOW_FACTOR:.0f} times slower"}))
    return rows


def raid_emulation(setup: Setup, place: Path, program: str, effort: Effort) -> list[Row]:
    """Figures of fio on RAID-0 over the devices: the ceiling of who needs one file system.

    Raises:
        BenchError: fio failed.
    """
    rows = []
    with bench_files([place], 1, RAID_FILE_BYTES) as files:
        fio = FioContender(program, files, registered=False)
        for depth in (1, 32):
            case = Case(Op.READ, MIB, depth, 1)
            (result,) = run_case(case, [fio], effort.repeats, effort.seconds)
            row = _case_row("emulation", result, setup.sum_of_devices(MIB))
            rows.append(
                Row(**{**row.plain(), "what": "fio, RAID-0, 1 MiB", "devices": setup.devices})
            )
    return rows


def engines(
    setup: Setup, files: list[BenchFile], arena: Arena
) -> tuple[list[EngineKind], dict[str, str]]:
    """Our engines that can read here, and by name why others cannot."""
    usable: list[EngineKind] = []
    absent: dict[str, str] = {}
    for entry in engine_contenders(files, arena, setup.rules[-1] if setup.rules else None):
        if isinstance(entry, tuple):
            absent[entry[0]] = entry[1]
        else:
            usable.append(entry.kind)
    return usable, absent


def scaling(
    setup: Setup, files: list[BenchFile], arena: Arena, effort: Effort, kinds: list[EngineKind]
) -> list[Row]:
    """Everybody's throughput on 1, 2, 4, ... devices.

    Raises:
        BenchError: an I/O failed.
    """
    wanted = ["fio", *(f"ssdkv {kind}" for kind in kinds), ThreadContender.name]
    model = setup.model.rule() if setup.kind == "twin" else None
    field = gather(files, arena, wanted, model)
    rows = []
    for op in (Op.READ, Op.WRITE):
        for count in device_counts(setup.devices):
            case = Case(op, UNIT_BYTES, 8, count)
            results = run_case(case, field.contenders, effort.repeats, effort.seconds)
            best = setup.sum_of_devices(UNIT_BYTES, count)
            rows += [_case_row("scaling", result, best) for result in results]
    return rows


def sparse(
    setup: Setup, files: list[BenchFile], arena: Arena, effort: Effort, kinds: list[EngineKind]
) -> list[Row]:
    """8 KiB reads on all devices; thread pools with every number of threads that may suit them.

    Raises:
        BenchError: an I/O failed.
    """
    model = setup.model.rule() if setup.kind == "twin" else None
    ours = [f"ssdkv {kind}" for kind in kinds]
    pools = [] if model else [ThreadContender.name, MapContender.name]
    plan = [(16, ["fio", *ours]), *((depth, pools) for depth in (1, 2, 4, 8, 16) if pools)]
    found: dict[tuple[int, str], Result] = {}
    for _ in range(effort.repeats):
        for depth, wanted in plan:
            field = gather(files, arena, wanted, model)
            case = Case(Op.READ, SPARSE_BYTES, depth, setup.devices)
            for result in run_case(case, field.contenders, 1, effort.seconds):
                kept = found.setdefault((depth, result.contender), result)
                if kept is not result:
                    kept.samples += result.samples
                    kept.error = kept.error or result.error
    best = setup.sum_of_devices(SPARSE_BYTES)
    return [_case_row("sparse", result, best) for result in found.values()]


def requests(
    setup: Setup,
    files: list[BenchFile],
    arena: Arena,
    effort: Effort,
    kinds: list[EngineKind],
    vllm: dict[str, Path],
) -> list[Row]:
    """Requests of slots: one alone, many at once, and both with a slow device.

    Args:
        setup: The devices.
        files: Our files on them.
        arena: Memory of both sides.
        effort: How long.
        kinds: Our engines.
        vllm: Folders for vLLM's block files, by what they lie on; empty without vLLM.

    Raises:
        BenchError: an I/O failed, or brought wrong bytes.
    """
    with contextlib.ExitStack() as stack:
        even = [1.0] * setup.devices
        others: dict[str, Requests] = {}
        if vllm:
            from vllm_ssdkv.profiling.bench_ssds.vllm_requests import VllmRequests

            for name, folder in vllm.items():
                others[name] = VllmRequests(folder, effort.blocks, GEOMETRY.slot_bytes, arena)
        rows = _request_rows("request", setup, files, arena, effort, kinds, {"": even}, others)
        stack.enter_context(setup.slow(setup.devices - 1, SLOW_FACTOR))
        weights = {"": even, ", weighted": [*even[:-1], 1 / SLOW_FACTOR]}
        rows += _request_rows("slow", setup, files, arena, effort, kinds, weights, others)
    return rows


def _repeat(side: Requests, op: Op, batch: list[list[int]], seconds: float) -> Sample:
    """The same requests again and again, each round after the last has ended.

    Block-layer limits count in slices of 100 ms: shorter runs would measure their slack.
    """
    total = side.run(op, batch)
    while total.seconds < seconds:
        more = side.run(op, batch)
        total = Sample(
            total.seconds + more.seconds,
            total.requests + more.requests,
            total.nbytes + more.nbytes,
            total.cpu_s + more.cpu_s,
        )
    return total


def _request_rows(
    scenario: str,
    setup: Setup,
    files: list[BenchFile],
    arena: Arena,
    effort: Effort,
    kinds: list[EngineKind],
    weights: dict[str, list[float]],
    others: dict[str, Requests],
) -> list[Row]:
    one = [list(range(effort.blocks))]
    share = max(1, effort.blocks // 8)
    many = [[(share * n + i) % effort.blocks for i in range(share)] for n in range(effort.requests)]
    best = setup.sum_of_devices(UNIT_BYTES)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Requests] = dict(others)
        for kind in kinds:
            for suffix, shares in weights.items():
                ours = SlotRequests(kind, files, shares, arena, setup.rules)
                stack.callback(ours.close)
                sides[f"ssdkv {kind}{suffix}"] = ours
        for side in sides.values():
            side.check(one[0][:8])
        rows = []
        for op in (Op.READ, Op.WRITE):
            for batch in (one, many):
                # One device of eight is worth one figure, and its stores would not fit.
                names = [n for n in sides if n != ONE_DEVICE or (op == Op.READ and batch is one)]
                samples: dict[str, list[Sample]] = {name: [] for name in names}
                for repeat in range(effort.repeats):
                    first = repeat % len(names)
                    for name in names[first:] + names[:first]:
                        samples[name].append(_repeat(sides[name], op, batch, effort.seconds))
                rows += [
                    _row(scenario, name, op, setup.devices, len(batch), best, samples[name])
                    for name in names
                ]
    return rows
