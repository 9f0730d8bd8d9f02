"""Forecast of one way of serving: a mode, a selector and a batch, on one machine.

Decode steps and prompts are simulated (:mod:`vllm_ssdkv.profiling.simulation.decode`). Around them
stands a closed loop: as many requests as are served at a time, each prompt computed while others
wait, then a token of each per step. So no figure depends on chance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from vllm_ssdkv.base.errors import ConfigError, DramTooSmallError
from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.config.engine import MIN_CAPACITY
from vllm_ssdkv.profiling.simulation.decode import Setting, StepResult, System, decode, prefill
from vllm_ssdkv.profiling.simulation.hardware import Drive, Machine, node_costs
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, bytes_of
from vllm_ssdkv.profiling.simulation.storage import PlainDrive, Storage
from vllm_ssdkv.profiling.sizing.costs import MEASURED_MISSES, EngineCosts, Misses
from vllm_ssdkv.profiling.sizing.layout import (
    BLOCK_TOKENS,
    LARGEST_READ,
    Division,
    PagedLayout,
    reuse_slot_bytes,
)
from vllm_ssdkv.profiling.sizing.machine import WEIGHTS_SHARE, SizedMachine
from vllm_ssdkv.profiling.sizing.near import Near, OffloadKind
from vllm_ssdkv.profiling.sizing.workload import Workload

CHUNK: Final = 8192
"""Most tokens of a prompt that the engine is told to compute in a step."""
LEAST_CHUNK: Final = 512
"""Fewest tokens of a prompt that a step computes, where HBM holds no more."""
DAY_S: Final = 86_400.0
YEAR_DAYS: Final = 365.0
WRITE_FACTOR: Final = 1.0
"""Bytes of flash by bytes written: slots are written whole and in their order."""

WINDOWS: Final = "HBM for windows and a chunk of a prompt"
"""The bound that a smaller chunk may keep."""

Mode = Literal["reuse", "page"]


class BoundError(ConfigError):
    """Something does not fit.

    Attributes:
        bound: What there is too little of.
        factor: What is needed, by what there is.
    """

    def __init__(self, bound: str, needed: float, there: float, way: str) -> None:
        self.bound = bound
        self.factor = needed / there if there > 0 else math.inf
        short = approximate_size(int(needed - there))
        text = (
            f"{approximate_size(int(needed))} needed, {approximate_size(int(max(0, there)))} there"
        )
        super().__init__(f"{bound}: {text}, {short} too little; {way}")


@dataclass(frozen=True, slots=True)
class Choice:
    """A way of serving.

    Attributes:
        budget: Share of a context that a selector reads, at most.
        offload: Who attends near storage, as ``offload.kind`` names it; None: nobody.
        x: Whether a share of the contexts is stored as X, as the engine would choose it.
        batch: Requests that decode at a time.
        window, staging: Options hbm_window_tokens and io.staging; None: as the engine has them.
        chunk: Tokens of a prompt that a step computes.
        daily_writes: Bytes that each drive may be written a day; None: no limit.
    """

    mode: Mode
    selector: str = "exact"
    budget: float = 0.125
    batch: int = 1
    window: int | None = None
    staging: int | None = None
    chunk: int = CHUNK
    daily_writes: int | None = None
    offload: OffloadKind | None = None
    x: bool = False

    @property
    def exact(self) -> bool:
        """Check whether tokens are those of stock vLLM."""
        return self.selector == "exact"

    @property
    def text(self) -> str:
        """As it is shown."""
        near = "" if self.offload is None else f", offload {self.offload}" + ", X" * self.x
        return self.mode if self.mode == "reuse" else f"page, {self.selector}{near}"

    def options(self) -> dict[str, object]:
        """Options of the plugin, without devices, DRAM and who attends near storage."""
        if self.mode == "reuse":
            spared = {} if self.daily_writes is None else {"admission": "second_use"}
            return {"mode": "reuse", **spared}
        found: dict[str, object] = {"mode": "page", "selector": self.selector}
        if self.window is not None:
            found["hbm_window_tokens"] = self.window
        if self.staging is not None:
            found["io"] = {"staging": self.staging}
        if not self.exact:
            found["sparse"] = {"budget": self.budget}
        return found


@dataclass(frozen=True, slots=True)
class Forecast:
    """Figures of a choice.

    Attributes:
        tokens_per_s: Output of all requests, prompts included in the time.
        decode_tokens_per_s: While nothing but decode steps runs.
        step_s: Of a decode step.
        ttft_s, hit_ttft_s: Seconds to the first token, alone: computed; where the found part is.
        tier_bytes: KV of all requests at a time, by tier.
        dram: Parts of DRAM in bytes.
        read_bytes_per_s, written_bytes_per_s: Of each drive.
        life_years: Of the drives, at full rate day and night; None: endurance is not known.
        watts, usd_per_million: None: a part's figure is not known.
        limit: What most of the time goes into.
    """

    choice: Choice
    tokens_per_s: float
    decode_tokens_per_s: float
    step_s: float
    ttft_s: float
    hit_ttft_s: float
    tier_bytes: dict[str, float]
    dram: dict[str, float]
    read_bytes_per_s: float
    written_bytes_per_s: float
    life_years: float | None
    watts: float | None
    usd_per_million: float | None
    limit: str
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of costs: USD per kWh, and years until a machine is written off."""

    usd_per_kwh: float = 0.15
    years: float = 4.0


@dataclass(frozen=True, slots=True)
class Sizing:
    """A model, a workload and a machine.

    Example:
        Sizing(model, workload, machine).forecast(Choice("reuse", batch=4))
    """

    model: ModelShape
    workload: Workload
    machine: SizedMachine
    costs: EngineCosts | None = None
    terms: Terms = Terms()
    block_tokens: int = BLOCK_TOKENS

    def forecast(self, choice: Choice) -> Forecast:
        """Forecast the choice.

        Raises:
            BoundError: it does not fit, and why.
            ConfigError: the model is not served so.
        """
        if not self.model.attention_layers():
            raise ConfigError(f"{self.model.name}: no layer has KV; give a model with attention")
        return (_Reuse if choice.mode == "reuse" else _Page)(self, choice).forecast()

    @property
    def hbm_bytes(self) -> float:
        """Memory of the GPU that KV may take. Raises BoundError: the weights do not fit."""
        there = WEIGHTS_SHARE * self.machine.gpu.memory_bytes
        weights = self.model.weight_bytes()
        if weights >= there:
            raise BoundError("HBM for weights", weights, there, "take more or larger GPUs")
        return there - weights

    def lasting(self, found: Forecast, years: float) -> Forecast:
        """The same way where it writes no more than drives bear for so many years.

        Mode reuse takes a limit, if the drives are the engine's own. As much less is found as is
        written: the least that there is, because blocks that come twice are written first.
        """
        life = found.life_years
        if found.choice.mode != "reuse" or life is None or life >= years:
            return found
        if self.machine.nodes is not None:
            return found  # such limits are options of the nodes
        daily = int(found.written_bytes_per_s * DAY_S * life / years)
        if daily < MIN_CAPACITY:
            return found
        work = replace(self.workload, found=self.workload.found * life / years)
        again = replace(self, workload=work).forecast(found.choice)
        note = (
            f"drives would last {life:.3g} years: admission second_use, and a limit of "
            f"{approximate_size(daily)} a day and drive, keep them for {years:g}; fewer prompts "
            "may be found"
        )
        return replace(
            again,
            choice=replace(found.choice, daily_writes=daily),
            written_bytes_per_s=daily / DAY_S,
            life_years=years,
            notes=(*again.notes, note),
        )

    @property
    def engine(self) -> EngineCosts:
        """Constants that were measured, or those that are assumed."""
        return self.costs or EngineCosts(self.machine.step_overhead_s, misses=MEASURED_MISSES)


class _Case(ABC):
    """Common part of both modes."""

    def __init__(self, sizing: Sizing, choice: Choice) -> None:
        self.sizing, self.choice = sizing, choice
        self.model, self.workload = sizing.model, sizing.workload
        self.machine, self.batch = sizing.machine, choice.batch
        self.kv_token = float(sizing.model.kv_bytes_per_token())
        self.notes: list[str] = []

    def simulated(self, request_bytes: float, padding: float = 1.0) -> tuple[Machine, Storage]:
        """Machine and drives, for reads of so many bytes each."""
        machine = self.machine
        drives = [_slower(one, request_bytes, padding) for one in machine.reached]
        of = Machine(machine.gpu, machine.gpu_link, machine.drives_link, len(drives))
        return of, Storage.of([PlainDrive(one) for one in drives])

    def prompt_s(self, system: System, machine: Machine, storage: Storage, tokens: float) -> float:
        """Seconds to compute a prompt alone."""
        setting = Setting(machine, storage, self.model, 1, max(1, round(tokens)))
        steps = math.ceil(tokens / self.choice.chunk)
        return prefill(system, setting).seconds + steps * self.sizing.engine.step_s

    def rest_s(self) -> float:
        """Seconds of a step that the simulation has not: vLLM's own, and the last projection."""
        engine, gpu, head = self.sizing.engine, self.machine.gpu, self.model.weights.head
        read_s = head * bytes_of(self.model.dtype) / gpu.bandwidth
        head_s = max(read_s, 2 * head * self.batch / gpu.flops)
        return engine.step_s + engine.row_s * self.batch + head_s

    def cycle(
        self, step: StepResult, prompts_s: float, ttft: tuple[float, float], slot_token: float
    ) -> Forecast:
        """The closed loop of a batch. ``prompts_s``: of one request, others being found."""
        work, batch = self.workload, self.batch
        decode_s = work.output * step.seconds
        seconds = batch * prompts_s + decode_s
        tokens_per_s = batch * work.output / seconds
        requests_per_s = batch / seconds
        count = len(self.machine.drives)
        written = requests_per_s * work.new_tokens * slot_token / count
        read = requests_per_s * self.read_bytes(step) / count
        watts, price = self.machine.watts, self.machine.price_usd
        terms, usd = self.sizing.terms, None
        if watts is not None and price is not None:
            per_s = price / (terms.years * YEAR_DAYS * DAY_S) + watts / 3.6e6 * terms.usd_per_kwh
            usd = 1e6 * per_s / tokens_per_s
        return Forecast(
            self.choice,
            tokens_per_s,
            batch / step.seconds,
            step.seconds,
            *ttft,
            tier_bytes=self.tiers(),
            dram=self.dram(),
            read_bytes_per_s=read,
            written_bytes_per_s=written,
            life_years=_years(self.machine.drives, written),
            watts=watts,
            usd_per_million=usd,
            limit=self.limit(step, batch * prompts_s, decode_s),
            notes=tuple(self.notes),
        )

    def limit(self, step: StepResult, prompts_s: float, decode_s: float) -> str:
        """Name what most of the time goes into."""
        if prompts_s > decode_s:
            return f"computing prompts ({prompts_s / (prompts_s + decode_s):.0%} of the time)"
        busy = max(step.usage.values(), key=lambda one: one.busy_s).busy_s
        if busy < self.sizing.engine.step_s:
            return "what a step of vLLM takes beside memory and arithmetic"
        named = {"gpu": "the GPU", "drive": "the drives", "link": "the link to the GPU"}
        if self.choice.offload is not None:
            named["drive"] = "the drives, or who attends to them"
        name = named.get(step.limit, "the link of the drives")
        return f"{name} ({min(1.0, busy / step.seconds):.0%} of a decode step)"

    @abstractmethod
    def read_bytes(self, step: StepResult) -> float:
        """Bytes that drives read for one request."""

    @abstractmethod
    def tiers(self) -> dict[str, float]:
        """KV of all requests, by tier."""

    @abstractmethod
    def dram(self) -> dict[str, float]:
        """Parts of DRAM."""


class _Reuse(_Case):
    """KV of requests that run lies in HBM; prefixes that were computed once come from drives."""

    def forecast(self) -> Forecast:
        machine, storage = self.simulated(LARGEST_READ)
        system = System("reuse", kv="hbm", rest_s=self.rest_s())
        self._check()
        tokens = self.workload.tokens
        # Each of the GPUs with the same KV reads all of it.
        again = (self.copies - 1) * self.batch * self.model.kv_bytes(round(tokens))
        slower = replace(system, rest_s=system.rest_s + again / machine.gpu.bandwidth)
        step = decode(slower, Setting(machine, storage, self.model, self.batch, tokens))
        prompt, found = self.workload.prompt, self.workload.found * self.workload.prompt
        alone = self.prompt_s(system, machine, storage, prompt)
        hit = alone
        if found >= self.sizing.block_tokens:
            rest = alone - self.prompt_s(system, machine, storage, found)
            hit = min(alone, max(0.0, rest) + self.load_s(found))
        return self.cycle(step, hit, (alone, hit), self.slot_token)

    @property
    def slot_token(self) -> float:
        """Bytes of a token on drives."""
        one = reuse_slot_bytes(self.model, self.sizing.block_tokens) / self.sizing.block_tokens
        return one if self.machine.nodes is None else self.copies * one

    @property
    def read_token(self) -> float:
        """Bytes that a token of a hit has drives read: every GPU loads what it has in HBM."""
        return self.slot_token if self.machine.nodes is not None else self.copies * self.slot_token

    @property
    def copies(self) -> int:
        """GPUs that have the same KV: all, where every layer has a latent (MLA). Its store is one,
        but nodes have one for each."""
        kinds = {layer.kind for layer in self.model.layers if layer.numbers}
        return self.machine.gpus if kinds == {"latent"} else 1

    def load_s(self, tokens: float) -> float:
        """Seconds to load a hit from drives, alone."""
        drives, nbytes = self.machine.reached, tokens * self.read_token
        rate = min(
            sum(min(one.read_bandwidth, one.iops * LARGEST_READ) for one in drives),
            self.machine.drives_link,
            self.machine.gpu_link,
        )
        seconds = nbytes / rate + max(one.latency_s for one in drives) + self.sizing.engine.hit_s
        if self.machine.nodes is None:
            return seconds
        return seconds + node_costs("tcp").load_s(math.ceil(tokens / BLOCK_TOKENS), nbytes)

    def _kv(self, tokens: float) -> float:
        nbytes = self.model.kv_bytes(math.ceil(tokens)) + self.model.state_bytes()
        return self.copies * nbytes

    def _check(self) -> None:
        """Raises BoundError: HBM does not hold the batch, or the longest request; or drives do not
        hold that."""
        there, longest = self.sizing.hbm_bytes, self._kv(self.workload.longest)
        way = "take a larger GPU or more of them, mode page, or shorter requests"
        if longest > there:
            raise BoundError("HBM for KV of the longest request", longest, there, way)
        batch = self.batch * self._kv(self.workload.kept_tokens)
        if batch > there:
            raise BoundError(f"HBM for KV of {self.batch} requests", batch, there, way)
        _check_drives(self.machine.drives, self.workload.longest * self.slot_token)

    def read_bytes(self, step: StepResult) -> float:
        return self.workload.found * self.workload.prompt * self.read_token

    def tiers(self) -> dict[str, float]:
        kv = self.batch * self._kv(self.workload.kept_tokens)
        stored = self.batch * self.workload.kept_tokens * self.slot_token
        held = min(self.copies * stored, sum(self.dram().values()))
        return {"hbm": kv, "dram": held, "drives": stored}

    def dram(self) -> dict[str, float]:
        # With nodes, their own memory holds what is found.
        return {} if self.machine.nodes is not None else {"frames": self.machine.dram_bytes}


class _Page(_Case):
    """HBM holds a window of each request; contexts lie in DRAM and on drives."""

    def __init__(self, sizing: Sizing, choice: Choice) -> None:
        super().__init__(sizing, choice)
        self.layout = PagedLayout.of(self.model, choice.options(), sizing.block_tokens)
        self.window = min(self.layout.config.window_tokens, self.workload.tokens)
        self.context = max(0.0, self.workload.tokens - self.window)
        self.division = self._divide()
        self.near = None if choice.offload is None else self._near(choice.offload)

    def forecast(self) -> Forecast:
        self._check()
        step, machine, storage = self.step()
        prompts = System("page", rest_s=0.0)
        prompt, found = self.workload.prompt, self.workload.found * self.workload.prompt
        alone = self._prompt_s(prompts, machine, storage, prompt)
        hit = alone
        if found >= self.sizing.block_tokens:
            hit = max(0.0, alone - self._prompt_s(prompts, machine, storage, found))
            hit += min(self.window, found) * self.kv_token / storage_rate(storage)
        return self.cycle(step, hit, (alone, hit), self.layout.slot_bytes_per_token)

    def step(self) -> tuple[StepResult, Machine, Storage]:
        """A decode step, and the drives that prompts are written to."""
        layout, rest = self.layout, self.rest_s()
        plain = self.simulated(LARGEST_READ)
        if self.near is not None:
            return self.near.step(self.choice.text, self._whole_setting(), rest), *plain
        if self.choice.exact:
            return decode(System("page, exact", rest_s=rest), self._whole_setting()), *plain
        chosen = self.chosen_pages()
        missing = self.missing()
        requests = missing * chosen * self.batch / max(1, self.layout.geometry.layers)
        crowd = busiest(requests, len(self.machine.drives))
        machine, storage = self.simulated(layout.read_bytes / crowd, layout.padding * crowd)
        pages = self.layout.geometry.groups * self.layout.geometry.heads
        of_layer = pages * self.layout.geometry.layers * self.context / layout.block_tokens
        share = min(1.0, chosen / of_layer) if of_layer else 0.0
        # Pages are known when the layer's query is: nothing is read before.
        system = System("page, sparse", read_share=share, overlaps=False, rest_s=rest)
        tokens = max(1, round(self.context))
        setting = Setting(*(machine, storage, self.model, self.batch, tokens), in_dram=1 - missing)
        return decode(system, setting), *plain

    def _whole_setting(self) -> Setting:
        """Setting of steps that attend to whole contexts, by layers of slots."""
        machine, storage = self.simulated(self.layout.read_bytes, self.layout.padding)
        return Setting(
            *(machine, storage, self.model, self.batch, self.workload.tokens),
            in_hbm=self.window / self.workload.tokens,
            in_dram=self._in_frames(),
        )

    def _near(self, kind: OffloadKind) -> Near:
        """Raises ConfigError: nothing attends near storage to this model."""
        layout = self.layout
        drives = [_slower(one, layout.read_bytes, layout.padding) for one in self.machine.drives]
        outside = 1 - self.window / self.workload.tokens
        held = self._in_frames() / outside if outside > 0 else 1.0
        return Near.of(kind, self.model, self.machine, drives, held=held, x=self.choice.x)

    def missing(self) -> float:
        """Part of the chosen pages that comes from drives."""
        chosen = self.chosen_pages() * self.batch
        known = self.sizing.engine.misses.get(self.choice.selector, Misses(1.0))
        if not chosen:
            return 0.0
        if self.division.pages >= self._all_pages():
            return 0.0
        if self.division.pages < chosen and not self.notes:
            self.notes.append(
                f"DRAM keeps {self.division.pages:,} pages and a step chooses {chosen:,}: drives "
                "may be asked for more than is forecast, and up to 1.5 times was measured; add DRAM"
            )
        return known.of(self.workload.tokens, self.division.pages / chosen)

    def _all_pages(self) -> float:
        blocks = self.batch * self.context / self.layout.block_tokens
        return blocks * self.layout.geometry.kv_pages

    def chosen_pages(self) -> int:
        """Pages that a step chooses from one context."""
        return self.layout.chosen_pages(self.workload.tokens)

    def _in_frames(self) -> float:
        """Part of the contexts that frames hold."""
        outside = 1 - self.window / self.workload.tokens
        return min(outside, self.division.frames / (self.batch * self.workload.tokens))

    def _divide(self) -> Division:
        # As the engine does it: by its limits, whatever runs.
        tokens = self.batch * self.workload.longest
        try:
            return self.layout.divide(self.machine.dram_bytes, tokens)
        except DramTooSmallError as error:
            raise BoundError(
                "DRAM of page mode", error.needed, self.machine.dram_bytes, "add DRAM"
            ) from None

    def _prompt_s(self, system: System, machine: Machine, storage: Storage, tokens: float) -> float:
        """A prompt alone: each chunk attends to the ones before it, which come from below."""
        computed = self.prompt_s(system, machine, storage, tokens)
        before = max(0.0, tokens - self.window)
        again = before**2 / (2 * self.choice.chunk) * self.kv_token * self.layout.padding
        missing = max(0.0, 1 - self.division.frames / max(1.0, tokens))
        slowest = min(storage_rate(storage), self.machine.drives_link)
        read_s = max(again * missing / slowest, again / self.machine.gpu_link)
        return max(computed, read_s)

    def _check(self) -> None:
        """Raises BoundError: HBM, DRAM or drives do not hold what they must."""
        window = self.batch * (self.window + 2 * self.layout.block_tokens) + self.choice.chunk
        way = "take a larger GPU, or fewer requests at a time"
        needed = window * self.kv_token + inputs_bytes(self.sizing, self.choice)
        if needed > self.sizing.hbm_bytes:
            raise BoundError(WINDOWS, needed, self.sizing.hbm_bytes, way)
        slot = self.layout.slot_bytes_per_token
        tokens = max(self.batch * self.workload.kept_tokens, float(self.workload.longest))
        _check_drives(self.machine.drives, tokens * slot)
        if not self.choice.exact and self.division.summaries < self.batch * self.context:
            held = max(1, self.division.summaries)
            per = self.machine.dram_bytes / held
            raise BoundError(
                f"DRAM for summaries of {self.batch} contexts",
                per * self.batch * self.context,
                self.machine.dram_bytes,
                "add DRAM, or take fewer requests at a time",
            )

    def read_bytes(self, step: StepResult) -> float:
        drives = sum(use.nbytes for name, use in step.usage.items() if name.startswith("drive "))
        if self.near is not None:
            drives *= self.near.missing
        new = self.batch * self.kv_token
        return max(0.0, drives - new) / self.batch * self.workload.output

    def tiers(self) -> dict[str, float]:
        kv = self.batch * self.workload.kept_tokens
        window = self.batch * self.window * self.kv_token
        dram = min(kv, self.division.frames) * self.kv_token
        if not self.choice.exact:
            dram += min(self.division.pages, self._all_pages()) * self.layout.geometry.page_bytes
        slot = self.layout.slot_bytes_per_token
        return {"hbm": window, "dram": dram, "drives": kv * slot}

    def dram(self) -> dict[str, float]:
        return {name: float(nbytes) for name, nbytes in self.division.nbytes.items() if nbytes}


def inputs_bytes(sizing: Sizing, choice: Choice) -> float:
    """HBM beside vLLM's count for X of open blocks, and of those that a step completes."""
    tokens = choice.batch * sizing.block_tokens + choice.chunk
    return float(tokens * sizing.model.x_bytes_per_token()) if choice.x else 0.0


def page_step(sizing: Sizing, choice: Choice) -> StepResult:
    """A decode step in mode page. Raises BoundError, ConfigError: see :meth:`Sizing.forecast`."""
    return _Page(sizing, choice).step()[0]


def page_room(sizing: Sizing, choice: Choice) -> tuple[float, float]:
    """Pages that DRAM keeps, in what a step chooses; and the bytes of that.

    Raises:
        BoundError, ConfigError: see :meth:`Sizing.forecast`.
    """
    case = _Page(sizing, choice)
    chosen = case.chosen_pages() * case.batch
    return case.division.pages / chosen, float(chosen * case.layout.geometry.page_bytes)


def hit_s(sizing: Sizing, tokens: float) -> float:
    """Seconds to the first token of a hit in mode reuse that is all of the prompt."""
    return _Reuse(sizing, Choice("reuse")).load_s(tokens)


def busiest(requests: float, drives: int) -> float:
    """Work of the busiest drive, by the mean, of requests that fall anywhere.

    ``sqrt(2 ln d / m)`` beside 1 for means of m requests: the largest of d counts, about.
    """
    if drives == 1 or requests <= 0:
        return 1.0
    mean = requests / drives
    return min(float(drives), 1 + math.sqrt(2 * math.log(drives) / mean))


def storage_rate(storage: Storage) -> float:
    """Bytes/s of all drives, by the share that each has."""
    pairs = zip(storage.devices, storage.shares, strict=True)
    return min(device.rate / share for device, share in pairs if share)


def _slower(drive: Drive, request_bytes: float, padding: float) -> Drive:
    """The drive, whose bandwidth is that of requests of so many bytes, padding included."""
    rate = min(drive.read_bandwidth / padding, drive.iops * request_bytes)
    return drive.with_figures(read_bandwidth=rate)


def _check_drives(drives: tuple[Drive, ...], nbytes: float) -> None:
    sizes = [one.capacity_bytes for one in drives]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes) and nbytes > sum(known):
        way = "add drives, or shorten or serve fewer requests"
        raise BoundError("capacity of the drives", nbytes, sum(known), way)


def _years(drives: tuple[Drive, ...], bytes_per_s: float) -> float | None:
    """Years until the first drive is worn; each is written the same."""
    lives = [one.endurance_bytes for one in drives]
    known = [life for life in lives if life is not None]
    if len(known) != len(lives) or bytes_per_s <= 0:
        return None
    return min(known) / (bytes_per_s * WRITE_FACTOR) / DAY_S / YEAR_DAYS
