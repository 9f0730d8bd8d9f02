"""A stand-in for a CUDA graph: operations of torch are recorded, and done again at a replay."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST: Final = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
"""Operations that wait for the device."""


class RecordedGraph(TorchDispatchMode):
    """Operations with the tensors that they named, done again into the memory of their results.

    As in a CUDA graph nothing of Python runs at a replay, and a number that was read on the host
    stays what it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func not in HOST, "a graph cannot be captured of what waits for the device"
        found = func(*args, **(kwargs or {}))
        self._done.append((func, args, kwargs or {}, found))
        return found

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
