"""Exact attention near storage in mode page: by the host's cores, by a card, by nodes.

The host and a card attend to all of a context outside of HBM: to frames in DRAM, and to data of the
drives as these arrive. Nodes attend to what their drives read; frames of the engine's DRAM go to
the accelerator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.offload.xcache.x_rule import XRates, XShape, best_share
from vllm_ssdkv.profiling.simulation.decode import Setting, StepResult, System, decode
from vllm_ssdkv.profiling.simulation.hardware import Drive, Machine, node_costs
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, bytes_of
from vllm_ssdkv.profiling.simulation.storage import NodeDrive, PlainDrive, Storage
from vllm_ssdkv.profiling.sizing.machine import SizedMachine

OffloadKind = Literal["host", "fpga", "node"]

_WIDE: Final = 1e15
"""Bytes/s of a link that limits nothing."""
_LEAST_MISSING: Final = 1e-3
"""Part that is read from drives, at least, for rates that are finite."""


@dataclass(frozen=True, slots=True)
class _NearDrives(PlainDrive):
    """All drives as one, with somebody who attends to their data as these arrive."""

    attend_bandwidth: float = _WIDE

    def attend_s(self, nbytes: float) -> float:
        """See ``Device``."""
        return max(self.read_s(nbytes, 0), nbytes / self.attend_bandwidth)


@dataclass(frozen=True, slots=True)
class Near:
    """Devices that attend near storage, and their part.

    Attributes:
        machine, storage: As the simulation has them.
        missing: Part of what they attend to that drives read; DRAM has the rest.
        frames: Whether frames in DRAM are the accelerator's.
        shares: Parts that they attend to, of which the better one counts, as the engine finds it.
        x_share: Part of the contexts that is stored as X.
    """

    machine: Machine
    storage: Storage
    missing: float
    frames: bool = False
    shares: tuple[float, ...] = (1.0,)
    x_share: float = 0.0

    @classmethod
    def of(
        cls,
        kind: OffloadKind,
        model: ModelShape,
        machine: SizedMachine,
        drives: Sequence[Drive],
        *,
        held: float,
        x: bool,
    ) -> Near:
        """The one of this kind.

        Args:
            drives: Of the machine or its nodes, for reads of whole layers.
            held: Part of the contexts outside of HBM that frames hold.
            x: Whether a share of the contexts is stored as X.

        Raises:
            ConfigError: it does not attend to this model, or X is of no use.
        """
        if bytes_of(model.kv_dtype or model.dtype) == 1:
            raise ConfigError("offload: KV in fp8 is attended to by the accelerator alone")
        if kind == "node":
            of, storage = _nodes(machine, model, drives)
            return cls(of, storage, missing=1.0, frames=True)
        missing = max(0.0, 1 - held)
        asked = max(missing, _LEAST_MISSING)
        rate = min(sum(one.read_bandwidth for one in drives), machine.drives_link) / asked
        attend = _attend_rate(kind, model, machine)
        one = drives[0].with_figures(
            read_bandwidth=rate,
            iops=sum(one.iops for one in drives) / asked,
            write_bandwidth=sum(one.write_bandwidth for one in drives),
        )
        share = 0.0
        if x:
            rates = XRates(min(attend, rate), machine.gpu_link, machine.gpu.flops)
            share = _x_share(model, machine, rates)
        # The drives' link is in their rate.
        of = Machine(machine.gpu, machine.gpu_link, _WIDE, 1)
        storage = Storage.of([_NearDrives(one, attend_bandwidth=attend)])
        # All of it, or so much that both end together.
        shares = (1.0, attend / (attend + machine.gpu_link))
        return cls(of, storage, missing, shares=shares, x_share=share)

    def step(self, name: str, setting: Setting, rest_s: float) -> StepResult:
        """The decode step of a setting, with the best share and these drives."""
        on = dataclasses.replace(setting, machine=self.machine, storage=self.storage)
        if not self.frames:
            on = dataclasses.replace(on, in_dram=0.0)
        system = System(name, attends="drives", x_share=self.x_share, rest_s=rest_s)
        found = [decode(dataclasses.replace(system, near_share=share), on) for share in self.shares]
        return min(found, key=lambda one: one.seconds)


def _attend_rate(kind: OffloadKind, model: ModelShape, machine: SizedMachine) -> float:
    """Bytes/s of K and V. Raises ConfigError: the kernels do not take the model."""
    if kind == "host":
        group = model.heads // model.kv_heads
        return (machine.dram_bandwidth or _WIDE) * machine.efficiency.attends(group)
    if model.head_size not in (64, 128, 256) or bytes_of(model.dtype) != 2:
        raise ConfigError(
            "offload.kind fpga: the kernels take heads of 64, 128 or 256 channels in 16 bit, not "
            f"{model.head_size} in {model.dtype}"
        )
    return _WIDE if machine.fpga is None else machine.fpga.attend_bandwidth


def _nodes(
    machine: SizedMachine, model: ModelShape, drives: Sequence[Drive]
) -> tuple[Machine, Storage]:
    """Each node with its part of the drives, behind its port.

    Raises:
        ConfigError: they do not attend.
    """
    nodes, network = machine.nodes, machine.network
    if nodes is None or network is None or nodes.memory_bandwidth is None:
        raise ConfigError("offload.kind node: nodes.memory_bandwidth is missing; give it")
    count, reached = len(nodes.addresses), machine.efficiency.nodes
    part = reached / count
    whole = drives[0].with_figures(
        read_bandwidth=part * sum(one.read_bandwidth for one in drives),
        write_bandwidth=part * sum(one.write_bandwidth for one in drives),
        iops=part * sum(one.iops for one in drives),
    )
    group = model.heads // model.kv_heads
    attend = nodes.memory_bandwidth * machine.efficiency.attends(group) * reached
    device = NodeDrive(PlainDrive(whole), network, attend, node_costs("tcp").attend)
    of = Machine(machine.gpu, machine.gpu_link, machine.drives_link, count)
    return of, Storage.alike(device, count)


def _x_share(model: ModelShape, machine: SizedMachine, rates: XRates) -> float:
    """The engine's own rule. Raises ConfigError: no context is to be stored as X."""
    shape = XShape(model.hidden, model.kv_heads, model.head_size, bytes_of(model.dtype))
    if not shape.pays:
        factor = shape.x_bytes / shape.kv_bytes
        raise ConfigError(f"offload.x_share: X of {model.name} is {factor:.2g} times its K and V")
    if machine.gpus > 1:
        raise ConfigError("offload.x_share: X is for engines of one GPU")
    share = best_share(shape, rates)
    if not share:
        raise ConfigError("offload.x_share: storage is not the limit, so the best share is 0")
    return share
