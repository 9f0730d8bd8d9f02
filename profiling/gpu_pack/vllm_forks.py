"""The process of the stage ``vllm`` that imports vLLM once and forks an engine for each cell.

    python -P -m vllm_ssdkv.profiling.gpu_pack.vllm_forks --name vllm --out DIR --seconds N

It does not touch the GPU, since a process that has cannot be forked. Should vLLM have done so while
it was imported, each engine's process starts anew, and imports it again.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.gpu_pack import llama_shapes
from vllm_ssdkv.profiling.gpu_pack.results import NO_TIME, Figure, Row
from vllm_ssdkv.profiling.gpu_pack.stage import Case, StageRun, scratch, stage_main
from vllm_ssdkv.profiling.gpu_pack.vllm_case import RESULT, import_vllm, run_cell
from vllm_ssdkv.profiling.gpu_pack.vllm_cells import CELLS, Cell, Scale, full_hits

IMPORT: Final = "import of vLLM"
NOT_MEASURED: Final = "not measured"

_CELL_S: Final = 60.0
_DUMP_S: Final = 0.5
"""Time in which an overdue process writes down the stacks of its threads."""

_CHILD_S: Final = 10.0
"""Time limit of a child that does nothing."""

Told = Mapping[str, Any]
Start = Callable[[Path, Path, float], str]
Way = Literal["fork", "spawn"]


def work(run: StageRun) -> None:
    """Import vLLM, then run the cells one after the other."""
    device = "cpu" if run.rehearsal else "cuda"
    cells = missing(run)
    if not cells:
        return
    ways: list[Way] = []
    with run.case(IMPORT) as case:
        begin = time.perf_counter()
        for name, value in import_vllm(device).items():
            case.figure(name, value)
        case.figure("import", time.perf_counter() - begin, "s")
        ways.append(_way_to_start())
        forked = ways[0] == "fork"
        case.figure("engines", "forked" if forked else "started anew: CUDA is in use")
    if not ways:
        return
    gc.collect()
    gc.freeze()
    with scratch(run) as folder:
        tiny = llama_shapes.make_tiny(folder / "tiny")
        large = Scale.of(device).shape.describe(folder / "large")
        told_by: dict[bool, Told] = {}
        for number, cell in enumerate(cells):
            if run.left() < 1:
                run.failed(cell.name, NO_TIME)
            elif cell.cuda_only and device != "cuda":
                why = Figure(NOT_MEASURED, "vLLM has it for CUDA only")
                run.append(Row(run.name, cell.name, figures=[why]))
            else:
                model = large if cell.speed else tiny
                start = partial(_start, ways[0], cell, device, model)
                told = _run_cell(run, cell, start, folder, told_by.get(cell.speed))
                told_by.setdefault(cell.speed, told)
            if cell.store not in {later.store for later in cells[number + 1 :]}:
                shutil.rmtree(folder / cell.store, ignore_errors=True)


def missing(run: StageRun) -> list[Cell]:
    """Cells without a good result, and those that they are compared with or whose stores they
    open."""
    wanted = [cell for cell in CELLS if not run.is_done(cell.name)]
    stores = {cell.store for cell in wanted if cell.stored}
    kinds = {cell.speed for cell in wanted}
    return [
        cell
        for cell in CELLS
        if cell in wanted
        or (not cell.connector and not cell.graphs and cell.speed in kinds)
        or cell.store in stores
    ]


def _way_to_start() -> Way:
    """Way to start engines: as forks of this process, unless it has begun to use CUDA."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return "spawn"
    child = multiprocessing.get_context("fork").Process(target=_end_as_forked)
    child.start()
    child.join(_CHILD_S)
    child.kill()
    return "spawn" if child.exitcode else "fork"


def _end_as_forked() -> None:
    # To have counted GPUs is enough to be in the way of a child, and is known in there only.
    os._exit(int(torch.cuda._is_in_bad_fork()))


def _run_cell(run: StageRun, cell: Cell, start: Start, folder: Path, stock: Told | None) -> Told:
    """Start a cell's engine, wait for it and judge what it told of, which is returned."""
    store = folder / cell.store
    store.mkdir(exist_ok=True)
    result = store / RESULT
    result.unlink(missing_ok=True)
    told: dict[str, Any] = {}
    with run.case(cell.name) as case:
        error = start(store, result, min(run.left(), _CELL_S))
        figures, told = _read(result)
        case.figures += figures
        _judge(case, cell, told, error, stock)
    return told


def _start(
    way: Way, cell: Cell, device: str, model: Path, store: Path, result: Path, seconds: float
) -> str:
    """Run an engine in a child; why it failed, or nothing."""
    process = (
        multiprocessing.get_context("fork").Process
        if way == "fork"
        else multiprocessing.get_context("spawn").Process
    )
    child = process(target=run_cell, args=(cell, device, model, store, result))
    child.start()
    child.join(seconds)
    if child.exitcode is None and child.pid is not None:
        os.kill(child.pid, signal.SIGUSR1)
        time.sleep(_DUMP_S)
        child.kill()
        child.join(_CHILD_S)
        return f"it did not end in {seconds:.0f} s; the log tells where its threads were"
    return f"its process ended with status {child.exitcode}" if child.exitcode else ""


def _read(path: Path) -> tuple[list[Figure], dict[str, Any]]:
    """Figures that a child has told of, and all else, by name."""
    figures: list[Figure] = []
    told: dict[str, Any] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        found = json.loads(line)
        if "figure" in found:
            figures.append(Figure(*found["figure"]))
        else:
            told |= found
    return figures, told


def _judge(case: Case, cell: Cell, told: Told, error: str, stock: Told | None) -> None:
    """Raises ``BenchError`` unless an engine ended well, with the answers that it has to give."""
    if error or "ended" not in told:
        raise BenchError(told.get("error") or error or "it ended without answers")
    if cell.speed:
        _count_alike(case, told, stock)
        return
    wanted = told["first"] if not cell.connector else (stock or {}).get("first")
    if wanted is None:
        raise BenchError("it has answered, but stock vLLM has not: there is nothing to compare")
    case.figure("cached tokens", sum(told["again cached"]))
    for name in ("first", "again"):
        good = sum(a == b for a, b in zip(told[name], wanted, strict=True))
        case.figure(f"answers as stock, {name}", f"{good} of {len(wanted)}")
    if told["first"] != wanted or told["again"] != wanted:
        raise BenchError("other tokens than those of stock vLLM")
    nothing, everything = [0] * len(wanted), full_hits()
    hits = {
        "first": everything if cell.stored else nothing,
        "again": everything if cell.finds_prompts else nothing,
    }
    for name, tokens in hits.items():
        if told[f"{name} cached"] != tokens:
            found = told[f"{name} cached"]
            raise BenchError(f"{name}: {found} tokens were not computed, and {tokens} were stored")


def _count_alike(case: Case, told: Told, stock: Told | None) -> None:
    """Count the answers that are those of stock vLLM; random weights in few bits spoil some."""
    pairs: list[tuple[Sequence[Any], Sequence[Any]]] = []
    for name, answer in (stock or {}).items():
        length, _, kind = name.rpartition(", ")
        if kind == "computed" and isinstance(answer, list):
            pairs += [(answer, told[of]) for of in (name, f"{length}, found") if of in told]
    if pairs:
        case.figure("answers as stock", f"{sum(a == b for a, b in pairs)} of {len(pairs)}")


if __name__ == "__main__":
    stage_main(work)
