"""The plan: the best way of serving a workload on a machine, the others, and what to buy.

Without a wish the best way that keeps tokens exact is taken. Selectors, which read a part of a
context, are taken where nothing exact grants the wish.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import GIB, approximate_size
from vllm_ssdkv.profiling.sizing.forecast import (
    LEAST_CHUNK,
    WINDOWS,
    BoundError,
    Choice,
    Forecast,
    Sizing,
)
from vllm_ssdkv.profiling.sizing.machine import SizedMachine
from vllm_ssdkv.profiling.sizing.near import OffloadKind
from vllm_ssdkv.profiling.table import Cell, Table

SCHEMA: Final = 1
"""Version of the JSON; a field that changes its meaning makes a new one."""
SELECTORS: Final = ("exact", "bounds", "codes", "sparf", "adaptive")
"""Selectors of mode page whose reads can be forecast."""
LIFE_YEARS: Final = 5.0
"""Years that drives must last, unless another wish is given."""
ACCURACY: Final = "answers may differ from stock vLLM's: docs/accuracy.md"
ALIKE: Final = 0.98
"""Speeds of which one is so much of the other count as alike."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Wishes of who asks for a plan.

    Attributes:
        tokens_per_s: Output of all requests, at least.
        ttft_s: Seconds to the first token of a request whose prefix is found, at most.
        life_years: Of the drives, at least; None: :data:`LIFE_YEARS` where a limit of writes can
            keep them, and no condition.
    """

    tokens_per_s: float | None = None
    ttft_s: float | None = None
    life_years: float | None = None

    def __post_init__(self) -> None:
        """Check numbers. Raises ConfigError: it names the wish."""
        for name in ("tokens_per_s", "ttft_s", "life_years"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                option = name.replace("_", "-").removesuffix("-s").removesuffix("-per")
                raise ConfigError(f"--want-{option}: got {value!r}; a number above 0")

    def failing(self, found: Forecast) -> Iterator[tuple[str, float]]:
        """List wishes that are not granted, each with how many times too little it is."""
        if self.tokens_per_s is not None and found.tokens_per_s < self.tokens_per_s:
            factor = self.tokens_per_s / found.tokens_per_s
            text = f"tokens/s: {self.tokens_per_s:.4g} wanted, {found.tokens_per_s:.4g} at best"
            yield f"{text}; limited by {found.limit}", factor
        if self.ttft_s is not None and found.hit_ttft_s > self.ttft_s:
            factor = found.hit_ttft_s / self.ttft_s
            text = f"TTFT: {self.ttft_s:.4g} s wanted, {found.hit_ttft_s:.4g} s at best"
            yield f"{text}; of it computing the prompt is all that is not found", factor
        years = found.life_years
        if self.life_years is not None and years is not None and years < self.life_years:
            text = f"drive life: {self.life_years:.4g} years wanted, {years:.4g} at best"
            per_day = found.written_bytes_per_s * 86_400
            yield (
                f"{text}; limited by {approximate_size(int(per_day))} a day and drive",
                self.life_years / years,
            )


@dataclass(frozen=True, slots=True)
class Purchase:
    """A part more, and what it brings.

    Attributes:
        name: What is bought.
        usd: Its price; None: not known.
        found: The best forecast with it.
        gain: Its tokens/s by those without it.
        ttft_gain: Seconds to the first token without it, by those with it.
    """

    name: str
    usd: float | None
    found: Forecast
    gain: float
    ttft_gain: float


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is told.

    Attributes:
        best: The way that is taken.
        others: The best batch of each other way that is possible.
        refused: Ways that are not possible, and why.
        purchases: What would change most first.
    """

    sizing: Sizing
    best: Forecast
    others: tuple[Forecast, ...]
    refused: tuple[str, ...]
    purchases: tuple[Purchase, ...]

    def document(self) -> dict[str, Any]:
        """The plan as plain data for JSON."""
        work, machine = self.sizing.workload, self.sizing.machine
        return {
            "schema": SCHEMA,
            "model": {
                "name": self.sizing.model.name,
                "kv_bytes_per_token": self.sizing.model.kv_bytes_per_token(),
                "weight_bytes": self.sizing.model.weight_bytes(),
            },
            "workload": asdict(work),
            "machine": {
                "gpu": machine.gpu.name,
                "gpus": machine.gpus,
                "dram_bytes": machine.dram_bytes,
                "drives": len(machine.drives),
                "gpu_link": machine.gpu_link,
                "drives_link": machine.drives_link,
                "nodes": 0 if machine.nodes is None else len(machine.nodes.addresses),
                "efficiency": machine.efficiency.model_dump(),
                "notes": list(machine.notes),
            },
            "best": asdict(self.best),
            "others": [asdict(one) for one in self.others],
            "refused": list(self.refused),
            "warnings": list(self.warnings),
            "purchases": [
                {
                    "name": one.name,
                    "usd": one.usd,
                    "gain": one.gain,
                    "ttft_gain": one.ttft_gain,
                    "tokens_per_s": one.found.tokens_per_s,
                    "hit_ttft_s": one.found.hit_ttft_s,
                }
                for one in self.purchases
            ],
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about the best way that must not be missed."""
        found, years = [], self.best.life_years
        if not self.best.choice.exact:
            found.append(f"{self.best.choice.selector}: {ACCURACY}")
        if self.sizing.model.kv_dtype is not None:
            found.append(f"KV in {self.sizing.model.kv_dtype}: {ACCURACY}")
        if years is not None and years < LIFE_YEARS:
            found.append(
                f"drives last {years:.3g} years: add drives, or drives of more endurance; a limit "
                "of writes is for mode reuse"
            )
        return tuple(found)

    def tables(self) -> list[Table]:
        """The plan for people."""
        return [self._summary(), self._ways(), self._parts()]

    def _summary(self) -> Table:
        best, machine = self.best, self.sizing.machine
        table = Table("Plan", ["what", "value"])
        table.add("mode, selector", best.choice.text + _budget(best.choice))
        table.add("requests that decode at a time", best.choice.batch)
        table.add("tokens/s of all, prompts included", f"{best.tokens_per_s:.4g}")
        table.add("tokens/s while decoding", f"{best.decode_tokens_per_s:.4g}")
        table.add("TTFT computed, alone", _seconds(best.ttft_s))
        table.add("TTFT where the prefix is found", _seconds(best.hit_ttft_s))
        tiers = ", ".join(f"{name} {_size(size)}" for name, size in best.tier_bytes.items())
        table.add("KV by tier", tiers)
        table.add("DRAM", ", ".join(f"{name} {_size(size)}" for name, size in best.dram.items()))
        per_day = best.written_bytes_per_s * 86_400
        table.add(
            f"each of {len(machine.drives)} drives",
            f"reads {_size(best.read_bytes_per_s)}/s, is written {_size(per_day)} a day",
        )
        life = "not known: give --endurance, or endurance_bytes of the machine"
        if best.life_years is not None:
            life = f"{best.life_years:.3g} years at this rate, day and night"
        table.add("life of the drives", life)
        table.add("watts", "not known" if best.watts is None else f"{best.watts:.0f}")
        usd = best.usd_per_million
        table.add("USD per million tokens", "not known" if usd is None else f"{usd:.3g}")
        table.add("limited by", best.limit)
        notes = (*machine.notes, *self.sizing.workload.notes, *best.notes, *self.warnings)
        table.note = "\n".join(notes)
        return table

    def _ways(self) -> Table:
        columns = ["way", "at a time", "tokens/s", "TTFT found s", "life years", "limited by"]
        table = Table("Ways", columns)
        for one in (self.best, *self.others):
            life: Cell = "-" if one.life_years is None else f"{one.life_years:.3g}"
            row = (f"{one.tokens_per_s:.4g}", f"{one.hit_ttft_s:.3g}", life, one.limit)
            table.add(one.choice.text + _budget(one.choice), one.choice.batch, *row)
        notes = [f"not possible: {line}" for line in self.refused]
        if any(not one.choice.exact for one in self.others):
            notes.append(f"with a selector, {ACCURACY}")
        table.note = "\n".join(notes)
        return table

    def _parts(self) -> Table:
        table = Table("One purchase", ["part", "USD", "tokens/s", "times", "TTFT found s", "times"])
        for one in self.purchases:
            usd = "-" if one.usd is None else f"{one.usd:.0f}"
            speed = (f"{one.found.tokens_per_s:.4g}", f"{one.gain:.2f}")
            ttft = (f"{one.found.hit_ttft_s:.3g}", f"{one.ttft_gain:.2f}")
            table.add(one.name, usd, *speed, *ttft)
        first = self.purchases[0]
        table.note = f"Most would change: {first.name}, {first.gain:.2f} times the tokens/s."
        if first.gain < 1.01:
            table.note = "None of these changes tokens/s by more than 1 %."
        return table


def _budget(choice: Choice) -> str:
    return "" if choice.exact else f", budget {choice.budget:g}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def _size(nbytes: float) -> str:
    return approximate_size(int(nbytes))


def choices(
    most: int, selectors: Sequence[str], budget: float, machine: SizedMachine | None = None
) -> Iterator[list[Choice]]:
    """Every way, each with batches to begin with: powers of 2 up to the wish, and that.

    ``machine``: has who attends near storage, for exact attention.
    """
    batches = sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most})
    yield [Choice("reuse", batch=batch) for batch in batches]
    for selector in selectors:
        yield [Choice("page", selector, budget, batch) for batch in batches]
    if machine is not None and "exact" in selectors:
        for way in _near(machine):
            yield [replace(way, batch=batch) for batch in batches]


def _near(machine: SizedMachine) -> Iterator[Choice]:
    """Ways of who can attend near storage on this machine."""
    if machine.nodes is not None:
        if machine.nodes.memory_bandwidth is not None:
            yield Choice("page", offload="node")
        return
    there: dict[OffloadKind, object] = {"host": machine.dram_bandwidth, "fpga": machine.fpga}
    for kind, part in there.items():
        if part is not None:
            yield Choice("page", offload=kind)
            yield Choice("page", offload=kind, x=True)


def forecast(sizing: Sizing, choice: Choice, wish: Wish) -> Forecast:
    """The forecast with the largest chunk that HBM holds, and with drives that last.

    Raises:
        BoundError, ConfigError: see :meth:`Sizing.forecast`.
    """
    while True:
        try:
            found = sizing.forecast(choice)
        except BoundError as error:
            # A step of the engine has a token of each request, too.
            if error.bound != WINDOWS or choice.chunk // 2 < max(LEAST_CHUNK, choice.batch):
                raise
            choice = replace(choice, chunk=choice.chunk // 2)
        else:
            return sizing.lasting(found, wish.life_years or LIFE_YEARS)


def best_of(sizing: Sizing, way: Sequence[Choice], wish: Wish) -> Forecast:
    """The fastest batch of a way, of those that grant the wish if any does.

    Raises:
        ConfigError: none is possible, and why the smallest is not.
    """
    found: list[Forecast] = []
    full: BoundError | None = None
    over = 0
    for choice in way:
        try:
            found.append(forecast(sizing, choice, wish))
        except BoundError as error:
            # A larger batch takes more of everything: the largest that fits is in between.
            if not found:
                raise
            full, over = error, choice.batch
            break
    while over - found[-1].choice.batch > 1:
        middle = (found[-1].choice.batch + over) // 2
        try:
            found.append(forecast(sizing, replace(way[0], batch=middle), wish))
        except BoundError as error:
            full, over = error, middle
    granting = [one for one in found if not any(wish.failing(one))]
    best = max(granting or found, key=lambda one: one.tokens_per_s)
    if full is None or best is not found[-1]:
        return best
    return replace(best, notes=(*best.notes, f"no more at a time: {full}"))


def make_plan(
    sizing: Sizing,
    wish: Wish,
    *,
    selectors: Sequence[str] = SELECTORS,
    budget: float = 0.125,
) -> Plan:
    """Plan, with purchases.

    Raises:
        ConfigError: nothing is possible, or the wish is not: the last line names the bound that
            fails, and by how much.
    """
    _check_positions(sizing)
    if wish.life_years is not None and not all(
        one.endurance_bytes for one in sizing.machine.drives
    ):
        raise ConfigError(
            "--want-life: how much the drives may be written is not known; give --endurance, or "
            "endurance_bytes in --machine"
        )
    ways = list(choices(sizing.workload.at_a_time, selectors, budget, sizing.machine))
    found, refused = _possible(sizing, ways, wish)
    granting = [one for one in found if not any(wish.failing(one))]
    if not granting:
        raise ConfigError(_refusal(found, wish))
    best = _preferred(granting)
    others = tuple(one for one in found if one is not best)
    bought = []
    for name, usd, machine in parts(sizing.machine):
        better, _ = _possible(replace(sizing, machine=machine), ways, wish)
        same = [one for one in better if one.choice.exact or not best.choice.exact]
        most = max(same, key=lambda one: one.tokens_per_s)
        gain = most.tokens_per_s / best.tokens_per_s
        bought.append(Purchase(name, usd, most, gain, best.hit_ttft_s / most.hit_ttft_s))
    bought.sort(key=lambda one: (-round(one.gain, 3), -one.ttft_gain))
    return Plan(sizing, best, others, tuple(refused), tuple(bought))


def _check_positions(sizing: Sizing) -> None:
    """Raises ConfigError: the longest request has more tokens than the model has positions."""
    most, longest = sizing.model.positions, sizing.workload.longest
    if most is None or longest <= most.tokens:
        return
    raise ConfigError(
        f"impossible: {most.field} of {sizing.model.name}: {most.tokens:,} tokens, the longest "
        f"request has {longest:,} with its output, {longest - most.tokens:,} too many; ask for "
        "shorter --prompt or --output, or take another model"
    )


def _preferred(found: Iterable[Forecast]) -> Forecast:
    """The fastest that is exact, or if none is, the fastest; the simplest that is about as fast."""
    exact = [one for one in found if one.choice.exact] or list(found)
    best = max(exact, key=lambda one: one.tokens_per_s)
    alike = [one for one in exact if one.tokens_per_s > ALIKE * best.tokens_per_s]
    return min(alike, key=lambda one: (_parts_of(one.choice), -one.tokens_per_s))


def _parts_of(choice: Choice) -> int:
    """Parts that a way needs: the fewer, the simpler it is."""
    return (choice.mode == "page") + (choice.offload is not None) + choice.x


def _possible(
    sizing: Sizing, ways: Sequence[Sequence[Choice]], wish: Wish
) -> tuple[list[Forecast], list[str]]:
    """The best of each way that is possible, and why others are not.

    Raises:
        BoundError: none is; the bound that is nearest.
    """
    found, refused, nearest = [], [], []
    for way in ways:
        try:
            found.append(best_of(sizing, way, wish))
        except BoundError as error:
            refused.append(f"{way[0].text}: {error}")
            nearest.append(error)
        except ConfigError as error:
            refused.append(f"{way[0].text}: {error}")
    if found:
        return found, refused
    if not nearest:
        raise ConfigError("\n".join(refused))
    least = min(nearest, key=lambda error: error.factor)
    times = f"{least.factor:.3g} times what there is"
    raise ConfigError("\n".join([*refused, f"impossible: {least} ({times})"]))


def _refusal(found: Sequence[Forecast], wish: Wish) -> str:
    """Each way with what it fails, the nearest last."""
    lines = []
    for one in found:
        text, factor = max(wish.failing(one), key=lambda pair: pair[1])
        lines.append((factor, f"{one.choice.text}: {text}"))
    lines.sort(reverse=True)
    factor, text = lines[-1]
    return "\n".join(
        [*(line for _, line in lines[:-1]), f"impossible: {text} (a factor of {factor:.3g})"]
    )


def parts(machine: SizedMachine) -> Iterator[tuple[str, float | None, SizedMachine]]:
    """Parts to buy: name, price, and the machine with it."""
    for count in sorted({1, len(machine.drives)}):
        more = machine.with_drives(count)
        name = "one drive more" if count == 1 else f"{count} drives more"
        yield name, _more(machine, more), more
    more = machine.with_dram(machine.dram_bytes)
    yield f"DRAM x2 (+{machine.dram_bytes / GIB:.0f} GiB)", _more(machine, more), more
    faster = [one.with_figures(iops=2 * one.iops) for one in machine.drives]
    yield "drives of twice the IOPS", None, replace(machine, drives=tuple(faster))
    yield "link of the drives x2", None, replace(machine, drives_link=2 * machine.drives_link)
    if not machine.cpu:
        yield "link to the GPU x2", None, replace(machine, gpu_link=2 * machine.gpu_link)
        memory = machine.gpu.with_figures(memory_bytes=2 * machine.gpu.memory_bytes)
        yield "GPU of twice the memory", None, replace(machine, gpu=memory)
    gpu = machine.gpu
    faster_gpu = gpu.with_figures(flops=2 * gpu.flops, bandwidth=2 * gpu.bandwidth)
    name = "processor" if machine.cpu else "GPU"
    yield f"{name} of twice the speed", None, replace(machine, gpu=faster_gpu)


def _more(before: SizedMachine, after: SizedMachine) -> float | None:
    if before.price_usd is None or after.price_usd is None:
        return None
    return after.price_usd - before.price_usd


def curves(
    sizing: Sizing, selectors: Sequence[str], budget: float
) -> dict[str, list[tuple[float, float]]]:
    """Tokens/s of each way by requests at a time, as far as they fit."""
    found: dict[str, list[tuple[float, float]]] = {}
    for way in choices(sizing.workload.at_a_time, selectors, budget, sizing.machine):
        points = []
        for choice in way:
            try:
                points.append((float(choice.batch), sizing.forecast(choice).tokens_per_s))
            except ConfigError:
                break
        if points:
            found[way[0].text] = points
    return found
