"""Everybody who takes part, and why somebody does not."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.config.io_engine import ThrottleRule
from vllm_ssdkv.profiling.bench_io.case import Contender
from vllm_ssdkv.profiling.bench_io.engines import engine_contenders, engine_kinds
from vllm_ssdkv.profiling.bench_io.files import BenchFile
from vllm_ssdkv.profiling.bench_io.fio import FioContender, find_fio
from vllm_ssdkv.profiling.bench_io.pools import MapContender, ThreadContender
from vllm_ssdkv.store.memory.arena import Arena

REFERENCE = "fio"
"""Ratios are to this contender's median in the same run."""

_OPTIONAL = {
    "vllm fs": ("vllm_fs", "VllmFsContender"),
    "kvikio": ("kvikio_rival", "KvikioContender"),
    "aiofiles": ("aiofiles_rival", "AiofilesContender"),
    "lmcache": ("lmcache_rival", "LmcacheContender"),
}
"""Module here and class of those that need a package that may be missing."""


@dataclass(slots=True)
class Field:
    """Contenders in the order of the tables, and reasons of those that are absent."""

    contenders: list[Contender] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], Contender]) -> None:
        """Add what ``make`` returns, or the reason why it cannot run here."""
        try:
            self.contenders.append(make())
        except BenchError as error:
            self.absent[name] = str(error)


def contender_names() -> list[str]:
    """Names of everybody, whether they can run here or not."""
    ours = [f"ssdkv {kind}" for kind in engine_kinds()]
    return [REFERENCE, "fio registered", *ours, "preadv threads", "executor map", *_OPTIONAL]


def gather(
    files: Sequence[BenchFile],
    arena: Arena,
    wanted: Sequence[str],
    model: ThrottleRule | None = None,
) -> Field:
    """Gather those of ``wanted`` that can run here. Imports vLLM if it is among them: takes
    seconds.

    Args:
        files: The devices.
        arena: Memory of everybody but fio, which has its own of the same kind.
        wanted: Names, see :func:`contender_names`.
        model: What devices are slowed down to; only our own engines can do that.
    """
    result = Field()
    if model is None:
        _add_fio(result, files, wanted)
    for entry in engine_contenders(files, arena, model):
        if isinstance(entry, tuple):
            name, reason = entry
            if name in wanted:
                result.absent[name] = reason
        elif entry.name in wanted:
            result.contenders.append(entry)
    others: dict[str, Callable[[], Contender]] = {
        ThreadContender.name: lambda: ThreadContender(files, arena),
        MapContender.name: lambda: MapContender(files, arena),
        **{name: _optional(name, files, arena) for name in _OPTIONAL},
    }
    for name, make in others.items():
        if name not in wanted:
            continue
        if model is None:
            result.add(name, make)
        else:
            result.absent[name] = "emulated devices exist inside our engines only"
    if model is not None:
        for name in (REFERENCE, "fio registered"):
            if name in wanted:
                result.absent[name] = "emulated devices exist inside our engines only"
    return result


def _add_fio(result: Field, files: Sequence[BenchFile], wanted: Sequence[str]) -> None:
    program = find_fio()
    for name, registered in ((REFERENCE, False), ("fio registered", True)):
        if name not in wanted:
            continue
        if program is None:
            result.absent[name] = "fio is not installed (`apt install fio` or `dnf install fio`)"
        else:
            result.add(name, partial(FioContender, program, files, registered=registered))


def _optional(name: str, files: Sequence[BenchFile], arena: Arena) -> Callable[[], Contender]:
    module, kind = _OPTIONAL[name]

    def make() -> Contender:
        try:
            found = importlib.import_module(f"vllm_ssdkv.profiling.bench_io.{module}")
        except (ImportError, OSError, RuntimeError) as error:
            raise BenchError(f"it cannot be imported ({error})") from error
        contender: Contender = getattr(found, kind)(files, arena)
        return contender

    return make
