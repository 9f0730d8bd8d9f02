"""One step of a system that keeps KV outside of its accelerator, as discrete events.

A decode step goes through the layers: projections, attention, MLP. KV of a layer is read beside
computing, some layers ahead, from all drives at once, each with a queue of its own, and over a link
that they share. New KV goes to the same drives, and takes their time. Where drives attend, q, k and
v go out and the output comes back. A prefill computes layer by layer, and writes each layer's KV
while the next ones are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

import simpy

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.offload.share_rule import Attended
from vllm_ssdkv.profiling.simulation.hardware import Machine
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, bytes_of
from vllm_ssdkv.profiling.simulation.servers import Events, Server, Usage
from vllm_ssdkv.profiling.simulation.storage import Storage

Place: TypeAlias = Literal["hbm", "dram", "drives"]

WRITE_BYTES: Final = 4096
"""Bytes of the smallest write."""
READ_BYTES: Final = 512 * 1024
"""Bytes of one read: neighbours are joined up to this."""
LAST: Final = 1 << 30
"""Turn of writes: behind everything that a layer waits for."""
SHARE_ROUNDING: Final = 1e-9
"""Rounding error of sums of parts of 1."""
WAITING_LAYERS: Final = 2
"""Layers of a prompt that may wait to be written."""


@dataclass(frozen=True, slots=True)
class System:
    """Way in which a system decodes.

    Example:
        System("ours, exact", ahead=4)

    Attributes:
        kv: Where KV lies.
        weights: Where weights lie; those in DRAM are brought for each step.
        attends: Who attends.
        near_share: Of what drives hold, the part that they attend to, where they do.
        read_share: Of the bytes of KV that a step reads.
        ahead: Layers that are read before they are needed.
        spill_tokens: Tokens between two writes; what waits lies in DRAM.
        x_share: Of the batch that keeps inputs of layers in place of KV.
        whole_kv_back: Whether all KV goes back after each layer, not only what is new.
        writes_first: Whether new rows are written before attention, on each drive one by one.
        relay: Bytes/s of a copy in DRAM. All of a layer comes through it, after the drives and
            before the link: none of the three works beside another. None: no such copy.
        overlaps: Whether copies run beside computing; else one thing is done at a time.
        mini_batches: Parts of the batch. Drives attend for one of them while the accelerator
            computes for another, which reads the weights once for each part.
        rest_s: Seconds of a step that nothing here explains.
    """

    name: str
    kv: Place = "drives"
    weights: Literal["hbm", "dram"] = "hbm"
    attends: Literal["gpu", "drives"] = "gpu"
    near_share: float = 1.0
    read_share: float = 1.0
    ahead: int = 4
    spill_tokens: int = 16
    x_share: float = 0.0
    whole_kv_back: bool = False
    writes_first: bool = False
    relay: float | None = None
    overlaps: bool = True
    mini_batches: int = 1
    rest_s: float = 0.0

    def __post_init__(self) -> None:
        """Check what contradicts itself. Raises ConfigError."""
        if self.attends == "drives" and self.kv != "drives":
            raise ConfigError(f"{self.name}: attends: drives do not attend to KV in {self.kv}")
        if self.kv != "drives" and (self.writes_first or self.relay is not None):
            raise ConfigError(
                f"{self.name}: relay, writes_first: KV lies in {self.kv}; they are of KV on drives"
            )
        if self.writes_first and self.whole_kv_back:
            raise ConfigError(
                f"{self.name}: writes_first, whole_kv_back: one of both, not rows and everything"
            )
        if self.mini_batches > 1 and (self.weights == "dram" or not self.overlaps):
            raise ConfigError(
                f"{self.name}: mini_batches: need weights in hbm, and copies beside computing"
            )
        if self.relay is not None and self.relay <= 0:
            raise ConfigError(f"{self.name}: relay: got {self.relay}; bytes/s above 0, or none")
        for name in ("near_share", "read_share", "x_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{self.name}: {name}: got {getattr(self, name)}; 0 to 1")
        least_of = {"ahead": 1, "spill_tokens": 1, "mini_batches": 1, "rest_s": 0}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{self.name}: {name}: got {getattr(self, name)}; at least {least}"
                )


@dataclass(frozen=True, slots=True)
class Setting:
    """Machine, drives and model of a system, and the contexts that it decodes.

    Attributes:
        tokens: Of each context, without the newest one.
        in_hbm: Part of KV that lies in the accelerator's memory, whatever the system's place is.
        in_dram: Part of KV that lies in DRAM.
        seed: Of latencies, each drawn for a drive and a layer: the slowest drive is waited for.
            None: every piece has the median.
    """

    machine: Machine
    storage: Storage
    model: ModelShape
    batch: int
    tokens: int
    in_hbm: float = 0.0
    in_dram: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check sizes. Raises ConfigError."""
        parts = (self.in_hbm, self.in_dram)
        if min(parts) < 0 or sum(parts) > 1 + SHARE_ROUNDING:
            raise ConfigError(f"in_hbm, in_dram: got {parts}; parts of 1")
        for name in ("batch", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}; at least 1")
        if not self.model.attention_layers():
            raise ConfigError(f"{self.model.name}: no layer has KV; give a model with attention")


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step of a whole batch.

    Attributes:
        seconds: It took.
        tokens: It made, or computed of prompts.
        up_bytes: Over the link toward the accelerator.
        down_bytes: Over the link away from it.
        usage: Of each server, by name.
        attended: Who attended to how much, and how long: what the product's share goes by.
    """

    seconds: float
    tokens: int
    up_bytes: float
    down_bytes: float
    usage: Mapping[str, Usage] = field(repr=False)
    attended: Attended = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole batch."""
        return self.tokens / self.seconds

    @property
    def limit(self) -> str:
        """Kind of server that worked most of the time: gpu, link or drive."""
        return max(self.usage, key=lambda name: self.usage[name].busy_s).split(" ")[0]


def decode(system: System, setting: Setting) -> StepResult:
    """Simulate one decode step."""
    return _Run(system, setting).decode()


def prefill(system: System, setting: Setting) -> StepResult:
    """Simulate the computation of a batch of prompts of ``setting.tokens``, and its writes."""
    return _Run(system, setting).prefill()


class _Run:
    """Servers of one step, and its processes."""

    def __init__(self, system: System, setting: Setting) -> None:
        self.env = simpy.Environment()
        self.system = system
        self.on = setting
        # Work of one part of the batch.
        self.work = _Work(system, _part(setting, system.mini_batches))
        self.gpu = Server(self.env, "gpu")
        # The link to the accelerator, and the one that all drives share before it.
        self.up, self.down = Server(self.env, "link up"), Server(self.env, "link down")
        self.in_, self.out = Server(self.env, "chassis up"), Server(self.env, "chassis down")
        # Drives that are alike, and wait for nothing that differs, are one: all do the same.
        storage = setting.storage
        first = storage.devices[0], storage.shares[0]
        pairs = zip(storage.devices, storage.shares, strict=True)
        same = all(device is first[0] and share == first[1] for device, share in pairs)
        alike = setting.seed is None and same
        self.alike = storage.count if alike else 1
        count = storage.count // self.alike
        self.drives = [Server(self.env, f"drive {n}") for n in range(count)]
        self.relay, self.copying = Server(self.env, "relay"), simpy.PriorityResource(self.env, 1)
        self.layers = range(setting.model.attention_layers())
        # Attention to what lies on drives: of the accelerator, of the drives, to the end of both.
        self.own_s = self.near_s = self.longer_s = 0.0

    def decode(self) -> StepResult:
        """Run a decode step."""
        parts, writes = [], list[simpy.Event]()
        for _ in range(self.system.mini_batches):
            kv, begun = self._events(), self._events()
            if self.system.overlaps:
                self.env.process(self._ahead(begun, kv, self._fetch))
            parts.append(self.env.process(self._decode_layers(begun, kv, writes)))
        self.env.run(self.env.all_of(parts))
        self.env.run(self.env.all_of(writes))
        return self._result(self.on.batch)

    def prefill(self) -> StepResult:
        """Run the prompts."""
        self.env.run(self.env.process(self._prefill_layers()))
        return self._result(self.on.batch * self.on.tokens)

    def _events(self) -> list[simpy.Event]:
        return [self.env.event() for _ in self.layers]

    def _result(self, tokens: int) -> StepResult:
        servers = [self.gpu, self.up, self.down, self.in_, self.out]
        if self.system.relay is not None:
            servers.append(self.relay)
        if self.system.rest_s:
            self.env.run(self.env.now + self.system.rest_s)
        usage = {server.name: server.usage() for server in servers}
        for number, drive in enumerate(self.drives * self.alike):
            usage[f"drive {number}"] = drive.usage()
        up, down = usage[self.up.name].nbytes, usage[self.down.name].nbytes
        turns = len(self.layers) * self.system.mini_batches
        theirs, own = (turns * part for part in self.work.attended_bytes)
        attended = Attended(theirs + own, theirs, self.longer_s, self.own_s, self.near_s)
        return StepResult(self.env.now, tokens, up, down, usage, attended)

    def _decode_layers(
        self, begun: list[simpy.Event], kv: list[simpy.Event], writes: list[simpy.Event]
    ) -> Events:
        work = self.work
        for layer in self.layers:
            begun[layer].succeed()
            if not self.system.overlaps:
                yield from self._tell(self._fetch(layer), kv[layer])
            if self.system.weights == "dram":
                # Weights wait with KV; without them there is nothing to begin with.
                yield kv[layer]
            yield from self.gpu.work(work.projection_s)
            if self.system.writes_first:
                yield from self._write_rows(2 * layer + 1)
            if self.system.attends == "drives":
                begin = self.env.now
                near = self.env.process(self._attend_near(2 * layer + 1))
                yield kv[layer]
                yield from self.gpu.work(work.beside_s)
                self.own_s += self.env.now - begin
                yield near
                self.longer_s += self.env.now - begin
            else:
                yield kv[layer]
                yield from self.gpu.work(work.attention_s)
            yield from self.gpu.work(work.mlp_s)
            if not self.system.writes_first:
                writes.append(
                    self.env.process(self._write(LAST + layer, work.new_bytes, work.new_writes))
                )
                if not self.system.overlaps:
                    yield writes[-1]

    def _ahead(
        self, begun: list[simpy.Event], arrived: list[simpy.Event], fetch: Callable[[int], Events]
    ) -> Events:
        """Fetch for each layer, from the beginning of the one so many layers before it."""
        for layer in self.layers:
            if layer >= self.system.ahead:
                yield begun[layer - self.system.ahead]
            self.env.process(self._tell(fetch(layer), arrived[layer]))

    def _tell(self, work: Events, done: simpy.Event) -> Events:
        yield from work
        done.succeed()

    def _fetch(self, layer: int) -> Events:
        """Bring what the accelerator needs for a layer: KV, or X, and weights."""
        work, parts, order = self.work, [], 2 * layer
        if work.fetched_bytes and self.system.kv == "drives":
            if self.system.relay is not None:
                parts.append(self._relayed(work.fetched_bytes, self.system.relay, order))
            else:
                parts += [
                    self._from_drive(n, work.fetched_bytes, order) for n in range(len(self.drives))
                ]
        elif work.fetched_bytes and self.system.kv == "dram":
            parts.append(self._over(self.up, work.fetched_bytes, order))
        if work.dram_bytes:
            parts.append(self._over(self.up, work.dram_bytes, order))
        if work.host_bytes:
            parts.append(self._over(self.up, work.host_bytes, order))
        yield self._all(parts)

    def _relayed(self, nbytes: float, rate: float, order: int) -> Events:
        """Bring KV of a layer by one worker: all of each stage, then the next one.

        Drives and their link are one stage: bytes go over it as they are read.
        """
        with self.copying.request(priority=order) as turn:
            yield turn
            drives = [self._read(n, nbytes, order) for n in range(len(self.drives))]
            yield self._all([*drives, self._over(self.in_, nbytes, order)])
            yield from self.relay.work(nbytes / rate, nbytes=nbytes, order=order)
            yield from self._over(self.up, nbytes, order)

    def _from_drive(self, number: int, nbytes: float, order: int) -> Events:
        share = self.on.storage.shares[number] * nbytes
        yield from self._read(number, nbytes, order)
        yield self._all(self._to_gpu(share, order) for _ in range(self.alike))

    def _to_gpu(self, nbytes: float, order: int) -> Events:
        yield from self._over(self.in_, nbytes, order)
        yield from self._over(self.up, nbytes, order)

    def _latency_s(self, number: int, order: int) -> float:
        device, seed = self.on.storage.devices[number], self.on.seed
        return device.latency_s if seed is None else device.latency(f"{seed} {number} {order}")

    def _read(self, number: int, nbytes: float, order: int) -> Events:
        device, share = self.on.storage.devices[number], self.on.storage.shares[number] * nbytes
        seconds = device.read_s(share, -int(-share // READ_BYTES))
        yield from self.drives[number].work(
            seconds, nbytes=share, latency_s=self._latency_s(number, order), order=order
        )

    def _attend_near(self, order: int) -> Events:
        """Send q, k and v, let all drives attend to what they hold, and get the output."""
        begin = self.env.now
        yield from self._over(self.down, self.work.sent_bytes, order)
        yield from self._over(self.out, self.work.sent_bytes, order)
        yield self._all(self._attend_on(n, order) for n in range(len(self.drives)))
        yield from self._over(self.in_, self.work.output_bytes, order)
        yield from self._over(self.up, self.work.output_bytes, order)
        self.near_s += self.env.now - begin

    def _attend_on(self, number: int, order: int) -> Events:
        device = self.on.storage.devices[number]
        share = self.on.storage.shares[number] * self.work.near_bytes
        latency = self._latency_s(number, order)
        yield from self.drives[number].work(
            device.attend_s(share), nbytes=share, latency_s=latency, order=order
        )

    def _write(self, order: int, nbytes: float, writes: float) -> Events:
        """Write KV: over the link, unless the drives were sent it already."""
        if self.system.kv == "hbm":
            return
        back = self.work.fetched_bytes if self.system.whole_kv_back else 0.0
        if self.system.attends == "gpu":
            yield from self._over(self.down, back + nbytes, order)
        if self.system.kv == "drives":
            if self.system.attends == "gpu":
                yield from self._over(self.out, back + nbytes, order)
            yield self._all(
                self._write_to(n, order, back + nbytes, writes) for n in range(len(self.drives))
            )

    def _write_rows(self, order: int) -> Events:
        """Write each new row by itself, and wait for it."""
        work = self.work
        if self.system.attends == "gpu":
            yield from self._over(self.down, work.new_bytes, order)
            yield from self._over(self.out, work.new_bytes, order)
        yield self._all(self._rewrite_on(n, order) for n in range(len(self.drives)))

    def _rewrite_on(self, number: int, order: int) -> Events:
        device, share = self.on.storage.devices[number], self.on.storage.shares[number]
        seconds = share * self.work.new_writes * device.rewrite_s
        yield from self.drives[number].work(
            seconds, nbytes=share * self.work.new_bytes, order=order
        )

    def _write_to(self, number: int, order: int, nbytes: float, writes: float) -> Events:
        device, share = self.on.storage.devices[number], self.on.storage.shares[number]
        seconds = device.write_s(share * nbytes, 0)
        if writes:
            # Writes below a page cost a page each; as parts of one, on the mean over steps.
            seconds = max(seconds, share * device.write_s(writes * WRITE_BYTES, 0))
        yield from self.drives[number].work(seconds, nbytes=share * nbytes, order=order)

    def _over(self, link: Server, nbytes: float, order: int) -> Events:
        chassis = link in (self.in_, self.out)
        rate = self.on.machine.drives_link if chassis else self.on.machine.gpu_link
        yield from link.work(nbytes / rate, nbytes=nbytes, order=order)

    def _all(self, parts: Iterable[Events]) -> simpy.Event:
        return self.env.all_of([self.env.process(part) for part in parts])

    def _prefill_layers(self) -> Events:
        writes: list[simpy.Event] = []
        for layer in self.layers:
            if layer >= WAITING_LAYERS:
                yield writes[layer - WAITING_LAYERS]
            if self.system.weights == "dram":
                yield from self._over(self.up, self.work.layer_weights, 2 * layer)
            yield from self.gpu.work(self.work.prompt_s)
            writes.append(self.env.process(self._send_prompt(LAST + layer)))
        yield self.env.all_of(writes)

    def _send_prompt(self, order: int) -> Events:
        if self.system.kv == "hbm":
            return
        nbytes = self.work.prompt_bytes
        yield from self._over(self.down, nbytes, order)
        if self.system.kv == "drives":
            yield from self._over(self.out, nbytes, order)
            yield self._all(self._prompt_to(n, order) for n in range(len(self.drives)))

    def _prompt_to(self, number: int, order: int) -> Events:
        share = self.on.storage.shares[number] * self.work.prompt_bytes
        seconds = self.on.storage.devices[number].prompt_s(share)
        yield from self.drives[number].work(seconds, nbytes=share, order=order)


def _part(setting: Setting, parts: int) -> Setting:
    """The setting of one of equal parts of the batch. Raises ConfigError: they are not equal."""
    if setting.batch % parts:
        raise ConfigError(f"mini_batches: got {parts} for a batch of {setting.batch}; a divisor")
    return replace(setting, batch=setting.batch // parts)


class _Work:
    """Cost of one layer of one step: seconds of the accelerator, bytes of everyone else."""

    def __init__(self, system: System, on: Setting) -> None:
        model, batch, layers = on.model, on.batch, on.model.attention_layers()
        gpu, number = on.machine.gpu, bytes_of(model.dtype)
        kv = batch * model.kv_bytes(on.tokens) / layers
        read, x = kv * system.read_share, system.x_share
        x_bytes = x * batch * on.tokens * model.x_bytes_per_token() / layers
        near = system.attends == "drives"
        # What lies in a faster tier does not come from below.
        above = on.in_hbm + on.in_dram
        below = max(0.0, 1 - above) if system.kv != "hbm" else 0.0
        held = below * read * (1 - x)
        self.near_bytes = held * system.near_share if near else 0.0
        self.fetched_bytes = below * x_bytes + held - self.near_bytes
        self.attended_bytes = self.near_bytes, held - self.near_bytes
        self.dram_bytes = on.in_dram * (read * (1 - x) + x_bytes)
        # Read once for the whole batch.
        of = model.weights
        weights = (of.dense + of.used) / len(model.layers)
        stored = of.read_bytes(batch) / len(model.layers)
        self.layer_weights = of.layer_bytes / layers
        brought = stored if system.weights == "dram" else 0.0
        new = batch * model.kv_bytes_per_token() / layers
        # What waits to be written lies in DRAM, half of the interval on the mean.
        waiting = new * system.spill_tokens / 2 if near else 0.0
        self.host_bytes = brought + waiting
        once = max(stored / gpu.bandwidth, 2 * weights * batch / gpu.flops)
        self.projection_s, self.mlp_s = once / 3, once * 2 / 3
        self.attention_s = (read * (1 - x) + x_bytes) / gpu.bandwidth
        own = kv * x + above * read * (1 - x) + held - self.near_bytes
        kv_size = sum(layer.numbers for layer in model.layers) / layers
        # K and V of all tokens, from X; two FLOP each. Then attention to them.
        projected = x * batch * on.tokens * 2 * model.hidden * kv_size
        self.beside_s = projected / gpu.flops + own / gpu.bandwidth
        self.new_bytes = new * (1 - x) + new * x * model.hidden / kv_size
        self.new_writes = self._writes(system, on, model.kv_bytes_per_token() / layers)
        head = model.head_size * number
        self.sent_bytes = batch * (model.heads + 2 * model.kv_heads) * head
        self.output_bytes = batch * model.heads * head
        prompt = on.tokens * batch
        squares = 2 * prompt * on.tokens * model.heads * model.head_size
        self.prompt_s = (2 * weights * prompt + squares) / gpu.flops
        self.prompt_bytes = new * on.tokens

    @staticmethod
    def _writes(system: System, on: Setting, row_bytes: float) -> float:
        """Smallest writes of a layer per step: of each sequence and head, K and V apart."""
        latent = any(layer.kind == "latent" for layer in on.model.layers)
        rows = 1 if latent else 2 * on.model.kv_heads
        pages = -(-system.spill_tokens * row_bytes / rows // WRITE_BYTES)
        return rows * on.batch * pages / system.spill_tokens
