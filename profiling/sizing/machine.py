"""A machine to plan for: described in YAML, or put together by who detected and measured it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import GIB, parse_size
from vllm_ssdkv.config.problems import path_text
from vllm_ssdkv.profiling.simulation.description import (
    Description,
    Positive,
    read_descriptions,
)
from vllm_ssdkv.profiling.simulation.hardware import (
    Drive,
    Gpu,
    Link,
    Network,
    described,
    find,
    node_costs,
)

COSTS: Final = Path(__file__).parent / "data" / "costs.yaml"
WEIGHTS_SHARE: Final = 0.9
"""Share of a GPU's memory that vLLM takes by default: weights, work space and KV."""
STEP_OVERHEAD_S: Final = 0.003
"""Seconds of a step that are neither memory nor arithmetic: assumed, of vLLM on a GPU."""
MOST_DRIVES: Final = 1024


class Cost(Description):
    """Watts and price of a part."""

    kind: ClassVar[str] = "costs"
    watts: Positive
    price_usd: Positive | None = None


def cost_of(name: str) -> Cost | None:
    """The cost of a part by name; None: nothing is known."""
    return read_descriptions(Cost, COSTS).get(name)


def _size(value: object) -> float:
    if isinstance(value, str):
        return float(parse_size(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError("give bytes, or a size with a unit, such as 256GiB")


Size = Annotated[float, BeforeValidator(_size), Field(gt=0, allow_inf_nan=False)]
"""Bytes, as a number or with a unit."""


class DriveEntry(BaseModel):
    """Drives of one kind, as YAML has them. What is given goes before what the kind says."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str | None = None
    count: Annotated[int, Field(ge=1, le=MOST_DRIVES)] = 1
    read_bandwidth: Size | None = None
    write_bandwidth: Size | None = None
    iops: Positive | None = None
    latency_s: Positive | None = None
    capacity_bytes: Size | None = None
    endurance_bytes: Size | None = None
    price_usd: Positive | None = None
    watts: Positive | None = None
    paths: tuple[str, ...] = ()

    def drive(self, where: str) -> Drive:
        """The drive. Raises ConfigError: a figure is missing, or the kind is unknown."""
        given = self.model_dump(exclude={"kind", "count", "watts", "paths"}, exclude_none=True)
        if self.kind is not None:
            return find(Drive, self.kind).with_figures(**given)
        for name in ("read_bandwidth", "write_bandwidth", "iops", "latency_s"):
            if name not in given:
                raise ConfigError(f"{where}: {name}: missing; give it, or the kind of the drive")
        sources = dict.fromkeys(given, "given by the caller")
        return Drive.model_validate({"name": "drive", **given, "sources": sources})


class GpuEntry(BaseModel):
    """An accelerator that is not described."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    memory_bytes: Size
    bandwidth: Size
    flops: Positive
    price_usd: Positive | None = None
    watts: Positive | None = None


def _named(value: object) -> object:
    """YAML reads 16e9 as text."""
    if isinstance(value, str) and value in described(Link):
        return find(Link, value).bandwidth
    return value


Rate = Annotated[Size, BeforeValidator(_named)]
"""Bytes per second, or the name of a link."""


Part = Annotated[float, Field(gt=0, le=1)]
"""Part of a figure that is reached."""

ATTENTION: Final = {1: 0.72, 4: 0.66, 8: 0.46}
"""Part of memory bandwidth at which cores attend, by query heads of a KV head; between two, the
lower one (docs/performance.md)."""


class Efficiency(BaseModel):
    """Part of each figure of a data sheet that is reached: measured, unless the caller says.

    Attributes:
        gpu_bandwidth: A copy in the memory of an H100 (docs/gpu.md).
        gpu_flops: Products of matrices on an H200 (``data/gpus.yaml``).
        links: A copy from DRAM to an H100 (docs/gpu.md), and the link of the drives likewise.
        drives: Reads of 64 KiB against fio, times one request over several drives
            (docs/performance.md).
        nodes: Four nodes that attend, against four times one (docs/performance.md).
        attention: Part of memory bandwidth at which cores attend; None: :data:`ATTENTION`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    gpu_bandwidth: Part = 0.896
    gpu_flops: Part = 0.8
    links: Part = 0.85
    drives: Part = 0.95
    nodes: Part = 0.97
    attention: Part | None = None

    def attends(self, group: int) -> float:
        """Part of memory bandwidth at which cores attend with ``group`` query heads a KV head."""
        if self.attention is not None:
            return self.attention
        return next((part for most, part in ATTENTION.items() if group <= most), ATTENTION[8])

    @property
    def text(self) -> str:
        """As the plan states it."""
        parts = self.model_dump(exclude_none=True)
        given = ", ".join(f"{name} {part:g}" for name, part in parts.items())
        return f"reached of what data sheets say (efficiency in --machine): {given}"


MEASURED: Final = Efficiency()
"""Efficiency that this project has measured."""


class FpgaEntry(BaseModel):
    """A card whose kernels attend. ``attend_bandwidth``: bytes/s of K and V, its link included."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    xclbin: str
    attend_bandwidth: Size


class NodesEntry(BaseModel):
    """Nodes that have the drives, evenly, in place of the engine's machine.

    Attributes:
        network: Of each node's port, and of the engine's: a name of ``data/networks.yaml``.
        state_dir: Of the engine in mode page: its index and journal.
        memory_bandwidth: Of each node. None: they do not attend.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    addresses: Annotated[tuple[str, ...], Field(min_length=1)]
    network: str
    state_dir: str
    memory_bandwidth: Size | None = None


class MachineFile(BaseModel):
    """A machine as YAML has it.

    Example:
        MachineFile.model_validate({"gpu": "h100-80", "dram": "256GiB", "drives": [...]})
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    gpu: str | GpuEntry
    gpus: Annotated[int, Field(ge=1, le=64)] = 1
    gpu_link: Rate = 32e9
    drives_link: Rate | None = None
    dram: Size
    drives: Annotated[tuple[DriveEntry, ...], Field(min_length=1)]
    dram_bandwidth: Size | None = None
    fpga: FpgaEntry | None = None
    nodes: NodesEntry | None = None
    efficiency: Efficiency = MEASURED
    host_watts: Positive | None = None
    host_price_usd: Positive | None = None
    step_overhead_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = STEP_OVERHEAD_S


@dataclass(frozen=True, slots=True)
class SizedMachine:
    """A machine with all its figures. Several GPUs count as one of their sum.

    Example:
        read_machine(Path("machine.yaml")).with_drives(8)

    Attributes:
        gpu_link, drives_link: Bytes/s each way: of the GPUs, and of all drives together.
        dram_bytes: Of which KV may take all.
        drives: Each of them.
        paths: Directories of the drives, as many of them as are known.
        watts: At work. None: of a part that nobody knows.
        price_usd: None: likewise.
        step_overhead_s: Seconds of a step that are neither memory nor arithmetic.
        dram_bandwidth: Of the host's memory. None: its cores do not attend.
        fpga: Card that attends, if there is one.
        nodes: They have the drives. None: the machine itself.
        efficiency: Part of the data sheets' figures that the others here are.
        cpu: Whether vLLM runs on the processor: HBM is then a part of the memory.
    """

    gpu: Gpu
    gpu_link: float
    drives_link: float
    dram_bytes: float
    drives: tuple[Drive, ...]
    gpus: int = 1
    paths: tuple[str, ...] = ()
    watts: float | None = None
    price_usd: float | None = None
    step_overhead_s: float = STEP_OVERHEAD_S
    dram_bandwidth: float | None = None
    fpga: FpgaEntry | None = None
    nodes: NodesEntry | None = None
    efficiency: Efficiency = MEASURED
    cpu: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def network(self) -> Network | None:
        """The nodes' network; None: the drives are the machine's own."""
        return None if self.nodes is None else find(Network, self.nodes.network)

    @property
    def reached(self) -> tuple[Drive, ...]:
        """Drives as the engine reaches them: those of nodes share their node's port."""
        network = self.network
        if self.nodes is None or network is None:
            return self.drives
        port = network.bandwidth * len(self.nodes.addresses) / len(self.drives)
        far = 2 * network.latency_s + node_costs("tcp").attend
        return tuple(
            one.with_figures(
                read_bandwidth=min(one.read_bandwidth, port),
                write_bandwidth=min(one.write_bandwidth, port),
                latency_s=one.latency_s + far,
            )
            for one in self.drives
        )

    def with_drives(self, count: int) -> SizedMachine:
        """The machine with ``count`` more of its last drive. Their power and price are added."""
        part = cost_of("drive")
        price = self.drives[-1].price_usd or _price(part)
        return replace(
            self._costing(_times(_watts(part), count), _times(price, count)),
            drives=self.drives + self.drives[-1:] * count,
        )

    def with_dram(self, nbytes: float) -> SizedMachine:
        """The machine with so much more DRAM."""
        part, gib = cost_of("dram-gib"), nbytes / GIB
        costing = self._costing(_times(_watts(part), gib), _times(_price(part), gib))
        return replace(costing, dram_bytes=self.dram_bytes + nbytes)

    def _costing(self, watts: float | None, price: float | None) -> SizedMachine:
        return replace(self, watts=_sum(self.watts, watts), price_usd=_sum(self.price_usd, price))


def _watts(cost: Cost | None) -> float | None:
    return None if cost is None else cost.watts


def _price(cost: Cost | None) -> float | None:
    return None if cost is None else cost.price_usd


def _times(figure: float | None, count: float) -> float | None:
    return None if figure is None else figure * count


def _sum(*parts: float | None) -> float | None:
    """The sum of known parts; None: one is not."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


_Checked = TypeVar("_Checked", bound=BaseModel)


def checked(kind: type[_Checked], given: Mapping[str, Any], where: str) -> _Checked:
    """A description that is valid.

    Raises:
        ConfigError: a field is missing, unknown or wrong: a line for each, which names it.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as failure:
        lines = []
        for error in failure.errors(include_url=False):
            # Of alternatives, such as a name or figures, the last part names one.
            named = [part for part in error["loc"] if part not in ("str", "GpuEntry")]
            detail = str(error.get("ctx", {}).get("error", "")) or error["msg"]
            got = "" if error["type"] == "missing" else f"got {error['input']!r}; "
            if error["type"] == "extra_forbidden":
                known = ", ".join(kind.model_fields)
                detail = f"unknown; known here: {known}" if len(named) == 1 else "unknown field"
            lines.append(f"{where}: {path_text(named)}: {got}{detail}")
        raise ConfigError("\n".join(lines)) from None


def read_machine(path: Path) -> SizedMachine:
    """The machine that a file describes.

    Raises:
        ConfigError: it cannot be read, or a field is missing, unknown or wrong, each named.
    """
    return machine_of(checked(MachineFile, read_yaml(path), str(path)), str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Content of a YAML file that is an object. Raises ConfigError: it cannot be read."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"{path}: give an object: gpu, dram, drives and the like")
    return content


def machine_of(given: MachineFile, where: str) -> SizedMachine:
    """The machine with all figures. Raises ConfigError: a name is unknown."""
    if isinstance(given.gpu, str):
        try:
            gpu = find(Gpu, given.gpu)
        except ConfigError as error:
            raise ConfigError(f"{where}: gpu: {error}") from None
        cost = cost_of(given.gpu)
        watts, price = _watts(cost), gpu.price_usd or _price(cost)
    else:
        figures = given.gpu.model_dump(exclude={"watts"}, exclude_none=True)
        gpu = Gpu.model_validate(
            {"name": "gpu", **figures, "sources": dict.fromkeys(figures, "given by the caller")}
        )
        watts, price = given.gpu.watts, given.gpu.price_usd
    drives: list[Drive] = []
    paths: list[str] = []
    for number, entry in enumerate(given.drives):
        try:
            drive = entry.drive("")
        except ConfigError as error:
            text = str(error).removeprefix(": ")
            raise ConfigError(f"{where}: drives[{number}]: {text}") from None
        drives += [drive] * entry.count
        paths += entry.paths
    parts = _parts(given, drives)
    reached = given.efficiency
    link = reached.links * given.gpu_link * given.gpus
    drives_link = link if given.drives_link is None else reached.links * given.drives_link
    if given.nodes is not None:
        try:
            port = find(Network, given.nodes.network).bandwidth
        except ConfigError as error:
            raise ConfigError(f"{where}: nodes.network: {error}") from None
        drives_link = min(drives_link, port)
    return SizedMachine(
        gpu=_several(gpu, given.gpus, reached),
        gpu_link=link,
        drives_link=drives_link,
        dram_bytes=given.dram,
        drives=tuple(_slowed(one, reached) for one in drives),
        gpus=given.gpus,
        paths=tuple(paths),
        watts=_sum(_times(watts, given.gpus), *parts["watts"]),
        price_usd=_sum(_times(price, given.gpus), *parts["price_usd"]),
        step_overhead_s=given.step_overhead_s,
        dram_bandwidth=given.dram_bandwidth,
        fpga=given.fpga,
        nodes=given.nodes,
        efficiency=reached,
        notes=(reached.text,),
    )


def _parts(given: MachineFile, drives: list[Drive]) -> dict[str, list[float | None]]:
    """Watts and prices of everything but the GPUs."""
    host, drive, dram = cost_of("host"), cost_of("drive"), cost_of("dram-gib")
    gib = given.dram / GIB
    watts = [given.host_watts or _watts(host), _times(_watts(dram), gib)]
    prices = [given.host_price_usd or _price(host), _times(_price(dram), gib)]
    watts += [_times(entry.watts or _watts(drive), entry.count) for entry in given.drives]
    prices += [one.price_usd or _price(drive) for one in drives]
    return {"watts": watts, "price_usd": prices}


def _several(gpu: Gpu, count: int, reached: Efficiency) -> Gpu:
    return gpu.with_figures(
        memory_bytes=gpu.memory_bytes * count,
        bandwidth=gpu.bandwidth * count * reached.gpu_bandwidth,
        flops=gpu.flops * count * reached.gpu_flops,
    )


def _slowed(drive: Drive, reached: Efficiency) -> Drive:
    return drive.with_figures(
        read_bandwidth=drive.read_bandwidth * reached.drives,
        write_bandwidth=drive.write_bandwidth * reached.drives,
        iops=drive.iops * reached.drives,
    )
