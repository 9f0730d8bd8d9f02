"""Capture without a GPU: launches and torch operations are recorded, and done again."""

from __future__ import annotations

import functools
from typing import Any, Self
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
READS = ("cpu", "numpy", "item", "tolist", "pin_memory")

_ALLOWED = {name: getattr(torch.Tensor, name) for name in READS}
"""For Triton's interpreter, which stands for the device."""


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("a graph cannot be captured of what moves data or waits")


class Recorded(TorchDispatchMode):
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
        self._done: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self._patches: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func not in HOST, "a graph cannot be captured of what waits for the device"
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations.append(str(func))
        self._done.append((func, args, kwargs or {}, found))
        return found

    def __enter__(self) -> Self:
        run = InterpretedFunction.run

        def launch(kernel: InterpretedFunction[Any], *args: object, **kwargs: object) -> None:
            self.launches.append(kernel.fn.__name__)
            self._done.append((functools.partial(run, kernel), args, kwargs, None))
            with torch._C._DisableTorchDispatch(), mock.patch.multiple(torch.Tensor, **_ALLOWED):
                run(kernel, *args, **kwargs)

        self._patches = [mock.patch.object(InterpretedFunction, "run", launch)]
        self._patches += [mock.patch.object(torch.Tensor, name, _refuse) for name in READS]
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for patch in reversed(self._patches):
            patch.stop()

    def capture_begin(self) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, found in self._done:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
