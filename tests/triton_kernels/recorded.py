"""Capture without a GPU: launches and torch operations are recorded, and done again."""

from __future__ import annotations

import functools
from typing import Any, Self
from unittest import mock

import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.kit.recorded_graph import RecordedGraph

READS = ("cpu", "numpy", "item", "tolist", "pin_memory")
SENDS = ("from_numpy", "tensor", "as_tensor")

_ALLOWED = {name: getattr(torch.Tensor, name) for name in READS}
_SENT = {name: getattr(torch, name) for name in SENDS}
"""Methods and functions as Triton's interpreter, which stands for the device, needs them."""


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("a graph cannot be captured of what moves data or waits")


class Recorded(RecordedGraph):
    """Launches and operations with the memory that they named, done again at a replay.

    As in a CUDA graph, nothing of Python runs then: numbers stay what they were, and what changes
    must have changed in memory.

    Attributes:
        launches: Names of kernels, in order.
        operations: Torch operations that are no views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.operations: list[str] = []
        self._patches: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not func.is_view:
            self.operations.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __enter__(self) -> Self:
        run = InterpretedFunction.run

        def launch(kernel: InterpretedFunction[Any], *args: object, **kwargs: object) -> None:
            self.launches.append(kernel.fn.__name__)
            self._done.append((functools.partial(run, kernel), args, kwargs, None))
            reads = mock.patch.multiple(torch.Tensor, **_ALLOWED)
            with torch._C._DisableTorchDispatch(), reads, mock.patch.multiple(torch, **_SENT):
                run(kernel, *args, **kwargs)

        self._patches = [mock.patch.object(InterpretedFunction, "run", launch)]
        self._patches += [mock.patch.object(torch.Tensor, name, _refuse) for name in READS]
        self._patches += [mock.patch.object(torch, name, _refuse) for name in SENDS]
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for patch in reversed(self._patches):
            patch.stop()
