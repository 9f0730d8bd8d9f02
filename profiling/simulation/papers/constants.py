"""Constants that rows of papers rest on, by name, each with where it comes from.

Figures of descriptions are ``kind: name: field``, those of the product's drives ``timings: name:
field``, shapes of models ``models: name``, and assumptions in code ``module: NAME``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Final

from vllm_ssdkv.offload.testing.drive_timing import DRIVES
from vllm_ssdkv.profiling.simulation import hardware
from vllm_ssdkv.profiling.simulation.model_shape import known_models

IN_CODE: Final = {
    "clusters.page_clusters: THRESHOLD": "assumed: Swarm does not give its tau",
    "clusters.page_clusters: LARGEST": "assumed: pages of a cluster",
    "simulation.decode: WRITE_BYTES": "a page of 4 KiB is the smallest write",
    "simulation.systems: COPY_PASSES": "a copied byte is read, its place fetched, and written",
    "simulation.systems: SHARES_BATCH": "InstInfer: prints shares of KV at batch 64",
    "simulation.systems: CONTEXT": "assumed: in the middle of outputs of 1,024 tokens",
    "simulation.papers.instinfer: PROMPT": "InstInfer: tokens of a prompt",
    "simulation.papers.hilos: DRIVES": "HILOS: SmartSSDs of its chassis",
    "simulation.papers.hilos: PLAIN_DRIVES": "HILOS, table 1: drives of FlexGen's server",
    "simulation.papers.hilos: BATCH": "assumed",
    "simulation.papers.hilos: CONTEXT": "assumed",
    "simulation.papers.hilos: LONG_PROMPT": "HILOS: tokens of a long request's prompt",
    "simulation.papers.hilos: LONG_OUTPUT": "HILOS: tokens of its output",
}
"""Sources of the constants in code, by name."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant.

    Attributes:
        value: A number; of a model, its layers.
        source: Where it comes from.
        calibrated: Rows whose published result it is, a share of whose step, or that made it.
    """

    value: float
    source: str
    calibrated: tuple[str, ...] = ()


def constants() -> dict[str, Constant]:
    """All of them, by name."""
    found: dict[str, Constant] = {}
    for kind in hardware.KINDS:
        for name, one in hardware.described(kind).items():
            for field, source in one.sources.items():
                value, rows = getattr(one, field), one.calibrated.get(field, ())
                if isinstance(one, hardware.NearStorage) and field == "timing":
                    found |= _of_timing(one, Constant(0, source, rows))
                elif not isinstance(value, str):
                    found[f"{kind.kind}: {name}: {field}"] = Constant(value, source, rows)
    for name, model in known_models().items():
        found[f"models: {name}"] = Constant(len(model.layers), "layers; its authors' shape")
    for name, source in IN_CODE.items():
        module, _, attribute = name.partition(": ")
        owner = import_module(f"vllm_ssdkv.profiling.{module}")
        found[name] = Constant(getattr(owner, attribute), source)
    return found


def _of_timing(drive: hardware.NearStorage, like: Constant) -> dict[str, Constant]:
    """Figures of the product's timing of a drive that attends."""
    timing = DRIVES[drive.timing]
    values = {
        field.name: getattr(owner, field.name)
        for owner in (timing.flash, timing)
        for field in fields(owner)
        if field.name != "flash"
    }
    return {
        f"timings: {drive.timing}: {field}": Constant(value, like.source, like.calibrated)
        for field, value in values.items()
        if value is not None
    }
