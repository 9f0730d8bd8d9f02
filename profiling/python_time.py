"""Share of a step's time: the engine's, our Python's, and that of our native code and of waiting.

A profiler makes Python slower by what it counts. Here only the borders are timed: the calls from
the engine into this package, and from it into its native modules and the reads that it waits for.
Operations of numpy and torch between these borders count as Python's: there is a call for each.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Final, Literal, TypeAlias, get_args

Whose: TypeAlias = Literal["engine", "python", "native"]
Boundary: TypeAlias = tuple[Any, str, Whose]
"""Class or module, name of a callable there, and whose time passes in it."""

_WHOSE: Final[tuple[Whose, ...]] = get_args(Whose)


class PythonTime:
    """Seconds of one thread by whose they are, while it is on. Slows a call by half a microsecond.

    Attributes:
        seconds: See above; all of them add up to the time between :meth:`start` and :meth:`stop`.
        calls: Calls of native code.
    """

    def __init__(self, borders: Callable[[], Iterable[Boundary]]) -> None:
        """``borders`` are asked for at each start."""
        self._borders = borders
        self.seconds: dict[Whose, float] = dict.fromkeys(_WHOSE, 0.0)
        self.calls = 0
        self._now: Whose = "engine"
        self._since = 0.0
        self._thread = 0
        self._replaced: list[tuple[Any, str, object]] = []

    def start(self) -> None:
        """Time the calls of this thread from now on."""
        for owner, name, whose in list(self._borders()):
            inherited = name not in vars(owner)
            original = getattr(owner, name) if inherited else vars(owner)[name]
            self._replaced.append((owner, name, None if inherited else original))
            setattr(owner, name, self._timed(original, whose))
        self._thread = threading.get_ident()
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Time no more."""
        self._enter("engine")
        for owner, name, original in self._replaced:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._replaced.clear()

    def figures(self, steps: int) -> dict[str, object]:
        """Seconds of a step by whose they are, and Python's share of it."""
        count = max(1, steps)
        return {
            "python_share": self.seconds["python"] / max(sum(self.seconds.values()), 1e-9),
            "whose_s": {whose: seconds / count for whose, seconds in self.seconds.items()},
            "native_calls": self.calls / count,
        }

    def _enter(self, whose: Whose) -> Whose:
        now, before = time.perf_counter(), self._now
        self.seconds[before] += now - self._since
        self._now, self._since = whose, now
        return before

    def _timed(self, original: Callable[..., Any], whose: Whose) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever is called
            if threading.get_ident() != self._thread or self._now == "native":
                return original(*arguments, **named)
            self.calls += whose == "native"
            before = self._enter(whose)
            try:
                return original(*arguments, **named)
            finally:
                self._enter(before)

        return call


def engine_borders() -> Iterator[Boundary]:
    """Boundaries of calls from vLLM to us, and from our Python to what is not Python."""
    from vllm_ssdkv.connector.attention_impl import PagedAttentionImpl
    from vllm_ssdkv.connector.connector import SSDKVConnector

    for owner in (SSDKVConnector, PagedAttentionImpl):
        for name, value in vars(owner).items():
            if callable(value) and not name.startswith("_"):
                yield owner, name, "python"
    yield from native_borders()


def native_borders() -> Iterator[Boundary]:
    """Boundaries of calls from our Python to what is not Python."""
    from vllm_ssdkv import _index, _io, _kernels
    from vllm_ssdkv.store.io.slot_request import SlotRequest

    # Throttled engines wait in Python.
    yield SlotRequest, "over", "native"
    for module in (_index, _io, _kernels):
        yield from _native(module)


def _native(module: ModuleType) -> Iterator[Boundary]:
    for name, value in vars(module).items():
        if isinstance(value, type):
            for key, method in vars(value).items():
                if _is_native(method) and not key.startswith("_"):
                    yield value, key, "native"
        elif _is_native(value):
            yield module, name, "native"


def _is_native(value: object) -> bool:
    kind = type(value)
    return kind.__module__ == "nanobind" and kind.__name__ in ("nb_func", "nb_method")
