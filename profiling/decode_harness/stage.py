"""Stage of the GPU pack that decodes on this package's store without vLLM.

First come the tokens of small models, then the speed of Llama 8B's shape in bf16 with random
weights, over contexts of random KV. Nothing about a real model's answers follows from these, nor
about which pages it would choose. A layer's times come from steps that wait for the device at every
part: they add up to more than a step takes. Python's share is of the host's time. A rehearsal goes
the same way with a small model.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from vllm_ssdkv.base.host import available_memory
from vllm_ssdkv.base.sizes import GIB, approximate_size
from vllm_ssdkv.profiling.decode_harness.cells import (
    STEPS_AHEAD,
    Case,
    Group,
    Needed,
    Scale,
    groups,
    needed,
    options,
)
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder, Source
from vllm_ssdkv.profiling.decode_harness.full_cache import FullDecoder
from vllm_ssdkv.profiling.decode_harness.measure import (
    Effort,
    Figures,
    measure_full,
    measure_paged,
)
from vllm_ssdkv.profiling.decode_harness.models import (
    first_layers,
    kv_bytes_per_token,
    make_model,
)
from vllm_ssdkv.profiling.decode_harness.tokens import (
    CHOOSING,
    FAMILIES,
    ON_DRIVE,
    check_drive,
    check_exact,
    check_selector,
)
from vllm_ssdkv.profiling.gpu_pack.results import NO_TIME, Figure, Row
from vllm_ssdkv.profiling.gpu_pack.stage import StageRun, scratch
from vllm_ssdkv.sparse.protocol import Needs

NOT_MEASURED: Final = "not measured"
"""Name of a figure: why a case was not measured."""

SPARE: Final = 3 * GIB
"""Bytes of each kind of memory that are left to everything else."""

FILL_RATE: Final = 1.5e9
"""Bytes of contexts per second that come into memory, until one was measured: by this a group of
cases is not begun when the time is nearly over."""

LEAST_S: Final = 3.0
"""A group takes that long in any case."""


class Rows:
    """Results of this stage's cases.

    Attributes:
        count: Cases so far.
        is_done: Whether a case had a good result before this stage began.
    """

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self.is_done = run.is_done
        self.count = 0

    def skip(self, case: str, why: str, about: Figures | None = None) -> None:
        """A case that is not measured. Too little time is a failure, too little memory is not."""
        self.count += 1
        if why == NO_TIME:
            self._run.failed(case, NO_TIME)
            return
        figures = list(_flat({**(about or {}), NOT_MEASURED: why}))
        self._run.append(Row(self._run.name, case, figures=figures))

    def fail(self, case: str, error: str, seconds: float, about: Figures | None = None) -> None:
        """A case that an error ended."""
        self.count += 1
        row = Row(self._run.name, case, ok=False, seconds=round(seconds, 3), error=error)
        row.figures += _flat(about or {})
        self._run.append(row)

    def run(self, case: str, work: Callable[[], Figures], about: Figures | None = None) -> None:
        """Do a case's work. ``error`` among its figures, or an exception, is its failure."""
        begun = time.perf_counter()
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - the other cases go on
            self.fail(case, _text(error), time.perf_counter() - begun, about)
            return
        self.count += 1
        wrong = str(found.pop("error", ""))
        seconds = round(time.perf_counter() - begun, 3)
        figures = list(_flat({**(about or {}), **found}))
        self._run.append(Row(self._run.name, case, not wrong, seconds, figures, wrong))


def _flat(found: Mapping[str, Any], of: str = "") -> Iterator[Figure]:
    """Figures of a tree, named by their path with dots."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{of}{name}.")
        elif isinstance(value, bool):
            yield Figure(of + name, "yes" if value else "no")
        else:
            yield Figure(of + name, value)


class Stage:
    """All cases, as far as time and memory go."""

    def __init__(self, rows: Rows, device: torch.device, directory: Path, deadline: float) -> None:
        """``deadline`` is one of ``time.monotonic``; stores come below ``directory``."""
        self._rows, self._device, self._directory = rows, device, directory
        self._deadline = deadline
        self._stores = 0
        self._fill_rate = FILL_RATE
        self._model: Any = None

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _new(self) -> Path:
        """A place for a store, which makes it."""
        self._stores += 1
        return self._directory / f"store{self._stores}"

    # ---- tokens ----

    def check_tokens(self) -> None:
        """Tokens of small models in fp32."""
        for family in FAMILIES:
            name = f"tokens of {family}, exact paging, against transformers' cache"
            self._check(name, partial(check_exact, family, "exact"))
        for selector in CHOOSING:
            name = f"tokens of llama, {selector} with a budget of everything, against the same"
            self._check(name, partial(check_exact, "llama", selector))
        for selector in CHOOSING:
            name = f"tokens of llama, {selector} at 1/8, against the CPU's kernels"
            self._check(name, partial(check_selector, selector))
        for scored in ON_DRIVE:
            name = f"tokens of llama, {scored} at 1/8 from the drive, against frames"
            self._check(name, partial(check_drive, scored))

    def _check(self, name: str, work: Callable[[torch.device, Path], Figures]) -> None:
        if self._rows.is_done(name):
            return
        if self._left() <= 0:
            self._rows.skip(name, NO_TIME)
            return
        place = self._new()
        self._rows.run(name, lambda: work(self._device, place))
        shutil.rmtree(place, ignore_errors=True)
        self._tidy()

    # ---- speed ----

    def measure(self, scale: Scale, effort: Effort) -> None:
        """Speed of a model, case by case."""
        for group in groups(scale):
            begun, before = time.perf_counter(), self._rows.count
            try:
                self._measure(scale, group, effort)
            except Exception as error:  # noqa: BLE001 - the other groups go on
                for case in group.cases[self._rows.count - before :]:
                    name = f"{self._title(group, group.layers)}, {case.name}"
                    self._rows.fail(name, _text(error), time.perf_counter() - begun)
            self._tidy()

    def _measure(self, scale: Scale, group: Group, effort: Effort) -> None:
        """One line for each case of a group."""
        why = "" if self._left() > LEAST_S else NO_TIME
        if not why and self._model is None:
            self._model = make_model(scale.config, self._device, scale.dtype)
        layers, need = self._size(scale, group)
        why = why or self._obstacle(need)
        about = self._about(scale, group, layers)
        names = [f"{self._title(group, layers)}, {case.name}" for case in group.cases]
        if all(map(self._rows.is_done, names)):
            return
        if why:
            for name in names:
                self._rows.skip(name, why, about)
            return
        with first_layers(self._model, layers):
            self._measure_group(self._model, scale, group, names, about, effort)

    def _title(self, group: Group, layers: int) -> str:
        part = f", {layers or 'fewer'} layers" if not group.layers else ""
        where = f"{_TIERS[group.tier]}{group.note}"
        return f"{group.context} tokens, batch {group.requests}{part}, {where}"

    def _about(self, scale: Scale, group: Group, layers: int) -> Figures:
        return {
            "model": scale.name,
            "weights": "random, each layer its own",
            "dtype": str(scale.dtype).removeprefix("torch."),
            "layers": layers,
            "layers_of_model": scale.config.num_hidden_layers,
            "context": group.context,
            "batch": group.requests,
            "tier": group.tier,
            "kv": "random, not computed from a prompt",
        }

    def _size(self, scale: Scale, group: Group) -> tuple[int, Needed]:
        """Layers that are measured, and what they take."""
        if group.layers:
            return group.layers, needed(scale, group, group.layers)
        for layers in range(scale.config.num_hidden_layers, 1, -1):
            need = needed(scale, group, layers)
            if not self._lacks(need):
                return layers, need
        return 1, needed(scale, group, 1)

    def _lacks(self, need: Needed) -> str:
        """The kind of memory that has too little; empty: none has."""
        have = {"DRAM": available_memory(), "disk": shutil.disk_usage(self._directory).free}
        want = {"DRAM": need.dram, "disk": need.disk}
        if self._device.type == "cuda":
            have["HBM"], want["HBM"] = torch.cuda.mem_get_info(self._device)[0], need.hbm
        for kind, nbytes in want.items():
            if nbytes and nbytes + SPARE > have[kind]:
                return (
                    f"does not fit {kind}: takes {approximate_size(nbytes)} and "
                    f"{approximate_size(SPARE)} to spare of {approximate_size(have[kind])}"
                )
        return ""

    def _obstacle(self, need: Needed) -> str:
        if why := self._lacks(need):
            return why
        if need.kv / self._fill_rate + LEAST_S > self._left():
            return NO_TIME
        return ""

    def _measure_group(
        self,
        model: Any,  # noqa: ANN401 - transformers' model
        scale: Scale,
        group: Group,
        names: Sequence[str],
        about: Figures,
        effort: Effort,
    ) -> None:
        if group.kind == "sdpa":

            def work() -> Figures:
                decoder = FullDecoder(model, group.requests, group.context, STEPS_AHEAD)
                return measure_full(decoder, group.requests, effort)

            self._rows.run(names[0], work, about)
            return
        begun, before, place = time.perf_counter(), self._rows.count, self._new()
        try:
            config = options(scale, group, model.config.num_hidden_layers)
            room = scale.room(group.context, group.requests)
            durable = group.tier == "ssd"
            with PagedDecoder(model, config, room, place, durable=durable) as decoder:
                self._cases(decoder, group, names, about, effort, begun)
        except _NoTimeError:
            for name in names[self._rows.count - before :]:
                self._rows.skip(name, NO_TIME, about)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _cases(
        self,
        decoder: PagedDecoder,
        group: Group,
        names: Sequence[str],
        about: Figures,
        effort: Effort,
        begun: float,
    ) -> None:
        requests = [f"request {i}" for i in range(group.requests)]
        opened = time.perf_counter()
        for request in requests:
            decoder.start(request, group.context)
            decoder.fill(request, group.context, random_kv(decoder, self._deadline))
        if group.tier == "ssd" and not decoder.drain(max(1.0, self._left())):
            raise _NoTimeError
        filled = time.perf_counter()
        nbytes = (
            group.context
            * group.requests
            * kv_bytes_per_token(decoder.model.config, decoder.model.dtype)
        )
        if group.tier == "dram":
            self._fill_rate = nbytes / (filled - begun)
        about = {
            **about,
            "window": min(decoder.window, group.context),
            "block_tokens": decoder.room.block_tokens,
            "page_tokens": decoder.config.page_tokens,
            "dram_bytes": decoder.opened.plan.nbytes if group.tier != "hbm" else 0,
            "io_engine": decoder.opened.files.engine.name,
            "direct_io": all(device.direct for device in decoder.opened.devices),
            "filesystem": _filesystem(self._directory),
            "drive_written": bool(group.tier == "ssd"),
            "open_s": round(opened - begun, 3),
            "fill_s": round(filled - opened, 3),
        }
        for name, case in zip(names, group.cases, strict=True):
            if self._left() <= 0:
                self._rows.skip(name, NO_TIME, about)
            else:
                work = partial(_case, decoder, requests, case, effort)
                self._rows.run(name, work, about)

    def _tidy(self) -> None:
        if self._device.type == "cuda":  # of whose memory the next group may want all
            gc.collect()
            torch.cuda.empty_cache()


_TIERS: Final = {"hbm": "HBM", "dram": "DRAM", "ssd": "drive"}


class _NoTimeError(Exception):
    """The time was over before the contexts were there."""


def _text(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    return text[:2000]


def _filesystem(directory: Path) -> str:
    """Type of the file system that a directory is on; empty where nothing tells."""
    path, found = str(directory.resolve()), ("", "")
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, place, kind, *_ = line.split()
        if f"{path}/".startswith(f"{place.rstrip('/')}/") and len(place) >= len(found[0]):
            found = place, kind
    return found[1]


def random_kv(decoder: PagedDecoder, deadline: float) -> Source:
    """K and V of a normal distribution, made where they are attended to; none after the deadline, a
    time of ``time.monotonic``."""
    layout, device = decoder.layout, decoder.device

    def source(layer: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if time.monotonic() > deadline:
            raise _NoTimeError
        shape = count, layout.kv_heads, layout.head_size
        key, value = (torch.empty(shape, dtype=layout.dtype, device=device) for _ in range(2))
        return key.normal_(), value.normal_()

    return source


def _case(decoder: PagedDecoder, requests: Sequence[str], case: Case, effort: Effort) -> Figures:
    for request in requests:
        decoder.ask(request, case.asked)
    bounds = case.asked is not None and case.asked.selector == "bounds"
    found = measure_paged(decoder, requests, effort, Needs(bounds=bounds))
    if case.asked is not None and case.asked.selector != "exact":
        found["budget"] = decoder.config.sparse.budget
    return found


def run(run: StageRun) -> None:
    """Check tokens, then measure speed, until the stage's time is over."""
    device = run.device
    if run.rehearsal:
        # Threads of small operations wait for each other longer than they work.
        torch.set_num_threads(1)
        scale, effort = Scale.rehearsal(), Effort(4, 0.5, 2)
    else:
        scale, effort = Scale.full(), Effort(24, 1.5, 2)
    with scratch(run) as directory:

        def end(number: int, _frame: FrameType | None) -> None:
            # An exception could be swallowed by a callback that it is raised in.
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(128 + number)

        signal.signal(signal.SIGTERM, end)
        stage = Stage(Rows(run), device, directory, run.ends)
        stage.check_tokens()
        stage.measure(scale, effort)
