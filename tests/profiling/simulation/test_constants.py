"""Constants of rows: 10 % of each that is declared moves the row, and of no other.

A step is one layer again and again, so models have fewer of them here; a host has as much less
DRAM. What no row of a module reads while it is computed is not changed: it can move none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest

from tests.profiling.clusters.synthetic import trace
from vllm_ssdkv.offload.testing.drive_timing import DRIVES, DriveTiming
from vllm_ssdkv.profiling.simulation import hardware, model_shape, systems
from vllm_ssdkv.profiling.simulation.description import Description
from vllm_ssdkv.profiling.simulation.papers import (
    dockerssd,
    flexgen,
    hilos,
    instinfer,
    reproduce,
    swarm,
    swarm_traces,
)
from vllm_ssdkv.profiling.simulation.papers.constants import constants
from vllm_ssdkv.profiling.simulation.papers.declared import DECLARED, rests_on
from vllm_ssdkv.profiling.simulation.papers.result import Result

LAYERS = {"opt-13b": 16, "opt-66b": 8}
MODULES: dict[ModuleType, Callable[[], list[Result]]] = {
    instinfer: instinfer.results,
    hilos: hilos.results,
    dockerssd: dockerssd.results,
    flexgen: flexgen.results,
    swarm: lambda: swarm.results(swarm_traces.measure([trace(queries=112)])),
}
STEPS = ("timings", "simulation.decode", "simulation.systems")
IN_CODE = {
    instinfer: (*STEPS, "simulation.papers.instinfer"),
    hilos: (*STEPS, "simulation.papers.hilos"),
    swarm: ("clusters.page_clusters",),
}
"""Owners of constants in the code that a module uses, none of which tells that it is read."""
KINDS = {kind.kind: kind for kind in hardware.KINDS}


@pytest.fixture
def short_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models of fewer layers, with as many weights in each; nothing that was computed stays."""
    known = model_shape.known_models()
    for name, layers in LAYERS.items():
        part = layers / len(known[name].layers)
        monkeypatch.setitem(known, name, _with_layers(known[name], part))
    host = hardware.find(hardware.Host, "instinfer-host")
    less = host.with_figures(dram_bytes=(host.dram_bytes or 0) * LAYERS["opt-13b"] / 40)
    monkeypatch.setitem(hardware._catalog(hardware.Host), host.name, less)
    yield
    for module in MODULES:
        forget(module)


def _with_layers(model: model_shape.ModelShape, part: float) -> model_shape.ModelShape:
    count = math.ceil(len(model.layers) * part)
    part, of = count / len(model.layers), model.weights
    weights = replace(
        of,
        dense=round(of.dense * part),
        experts=round(of.experts * part),
        used=round(of.used * part),
        dense_bytes=of.dense_bytes * part,
        expert_bytes=of.expert_bytes * part,
    )
    return replace(model, layers=model.layers[:1] * count, weights=weights)


def change(name: str, patch: pytest.MonkeyPatch) -> None:
    """Make a constant a tenth more."""
    kind, *where = name.split(": ")
    if kind == "timings":
        timings = {str(drive): timing for drive, timing in DRIVES.items()}
        timings[where[0]] = _more_of(timings[where[0]], where[1])
        patch.setattr(hardware, "TIMINGS", timings)
    elif kind == "models":
        model = model_shape.find_model(where[0])
        patch.setitem(model_shape.known_models(), where[0], _with_layers(model, 1.1))
    elif kind in KINDS:
        one = hardware.find(KINDS[kind], where[0])
        figures = {where[1]: _more(getattr(one, where[1]))}
        patch.setitem(hardware._catalog(KINDS[kind]), where[0], one.with_figures(**figures))
    else:
        module = import_module(f"vllm_ssdkv.profiling.{kind}")
        patch.setattr(module, where[0], _more(getattr(module, where[0])))


def _more_of(timing: DriveTiming, field: str) -> DriveTiming:
    if hasattr(timing, field):
        return replace(timing, **{field: _more(getattr(timing, field))})
    flash = replace(timing.flash, **{field: _more(getattr(timing.flash, field))})
    return replace(timing, flash=flash)


def _more(value: float) -> float:
    return math.ceil(value * 1.1) if isinstance(value, int) else value * 1.1


def forget(module: ModuleType) -> None:
    """Drop what a module computed."""
    for one in (module, systems):
        for function in vars(one).values():
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()


def values(module: ModuleType) -> dict[str, list[float]]:
    """Results of each row of a module, margins included, computed anew."""
    forget(module)
    return {
        one.name: [value for value in (one.ours, *one.margins.values()) if value is not None]
        for one in MODULES[module]()
    }


def read_by(module: ModuleType) -> tuple[dict[str, list[float]], set[str]]:
    """Results of a module, and constants that were read for them; those in code are taken so."""
    known = constants().keys()
    read = {name for name in known if name.split(": ")[0] in IN_CODE.get(module, ())}
    get = Description.__getattribute__

    def seen(one: Description, field: str) -> object:
        value = get(one, field)
        if field in type(one).model_fields:
            read.add(f"{one.kind}: {get(one, 'name')}: {field}")
        return value

    def found(name: str) -> model_shape.ModelShape:
        read.add(f"models: {name}")
        return model_shape.find_model(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Description, "__getattribute__", seen)
        for one in (module, systems):
            patch.setattr(one, "find_model", found, raising=False)
        return values(module), read & known


def moved(module: ModuleType, name: str, before: dict[str, list[float]]) -> set[str]:
    """Rows that another constant moves."""
    with pytest.MonkeyPatch.context() as patch:
        change(name, patch)
        after = values(module)
    return {
        row
        for row, old in before.items()
        if not all(
            math.isclose(a, b, rel_tol=1e-10, abs_tol=1e-10)
            for a, b in zip(old, after[row], strict=True)
        )
    }


@pytest.mark.usefixtures("short_models")
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.split(".")[-1])
def test_a_row_moves_with_its_constants_and_with_no_other(module: ModuleType) -> None:
    before, read = read_by(module)
    moves: dict[str, set[str]] = {row: set() for row in before}
    for name in read:
        for row in moved(module, name, before):
            moves[row].add(name)
    assert moves == {row: set(rests_on(row)) for row in before}


def test_no_prediction_rests_on_what_made_it() -> None:
    known = constants()
    for one in reproduce.results():
        made = {
            name for name in rests_on(one.name) if {one.row, one.name} & {*known[name].calibrated}
        }
        assert not made or one.kind == "calibrated", f"{one.name}: {made}"
        assert made or one.kind != "calibrated", f"{one.name}: nothing made it"


def test_every_row_declares_and_every_calibrated_constant_names_rows() -> None:
    rows = {one.name for one in reproduce.results()} | {*reproduce.ROWS}
    assert DECLARED.keys() == {one.name for one in reproduce.results()}
    for name, constant in constants().items():
        assert constant.source, name
        assert {*constant.calibrated} <= rows, name
    for name in DECLARED:
        assert rests_on(name) <= constants().keys(), name
    made = {name.split(": ")[-1] for name, one in constants().items() if one.calibrated}
    assert made >= {
        *("flexgen_kv_share", "instinfer_kv_share", "sparse_read_share", "drive_bandwidth"),
        *("attend_bandwidth", "host_flop_per_byte", "pool_speedup"),
    }
