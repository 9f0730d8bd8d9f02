"""Record of which module holds which, and of weights that a kernel has taken away.

vLLM hands a connector neither the model nor its weights. torch calls public hooks whenever a module
gets a submodule, a parameter or a buffer: so the model is found by climbing from an attention layer
(whom vLLM's compilation config knows) to the module that nobody holds.

Some kernels, oneDNN's on CPUs among them, keep the weights in memory of their own and leave an
empty parameter behind. The hook sees that parameter before it is replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.nn.modules import module as torch_module


class ModuleTree:
    """Parents of modules and digests of weights that were taken away, in this process.

    Any thread may load a model; one at a time. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._parents: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module]] = (
            weakref.WeakKeyDictionary()
        )
        self._taken: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, str]] = (
            weakref.WeakKeyDictionary()
        )
        self._held: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = (
            weakref.WeakKeyDictionary()
        )
        self._watched: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._installed = False

    def install(self) -> None:
        """Have torch call this record from now on. Idempotent."""
        if not self._installed:
            self._installed = True
            torch_module.register_module_module_registration_hook(self._module_registered)
            torch_module.register_module_parameter_registration_hook(self._parameter_registered)
            torch_module.register_module_buffer_registration_hook(self._buffer_registered)

    def _module_registered(
        self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None
    ) -> None:
        if child is not None:
            self._parents[child] = weakref.ref(parent)

    def _parameter_registered(
        self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> None:
        before = module._parameters.get(name)
        empty = parameter is not None and _is_there(parameter) and parameter.numel() == 0
        if not empty:
            self._taken.get(module, {}).pop(name, None)
            self._held.setdefault(module, set()).add(name)
        elif before is not None and _has_content(before):
            # Here, as the plugin is loaded by processes of vLLM's that need no native module.
            from vllm_ssdkv.kernels.tensor_digest import digest_tensors

            taken = self._taken.setdefault(module, {})
            taken[name] = describe(before, int(digest_tensors([before])[0]))
        self._changed(module)

    def _buffer_registered(
        self, module: torch.nn.Module, name: str, buffer: torch.Tensor | None
    ) -> None:
        self._changed(module)

    def _changed(self, module: torch.nn.Module) -> None:
        if self._watched:
            root = self.root_of(module)
            if root in self._watched:
                self._watched[root] += 1

    def parent_of(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """The module that holds another one; None: nobody does."""
        ref = self._parents.get(module)
        return None if ref is None else ref()

    def root_of(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module above that nobody holds; ``module`` itself where nobody holds it."""
        while (ref := self._parents.get(module)) is not None and (parent := ref()) is not None:
            module = parent
        return module

    def taken(self, module: torch.nn.Module, name: str) -> str | None:
        """Description of the weights in whose place a parameter is empty; None if unknown."""
        return self._taken.get(module, {}).get(name)

    def held(self, module: torch.nn.Module, name: str) -> bool:
        """Check whether a parameter has ever been more than empty."""
        return name in self._held.get(module, ())

    def watch(self, roots: Iterable[torch.nn.Module]) -> None:
        """Count what is registered below these modules from now on."""
        for root in roots:
            self._watched.setdefault(root, 0)

    def changes(self, root: torch.nn.Module) -> int:
        """Parameters and buffers that were registered since it is watched."""
        return self._watched.get(root, 0)


def describe(tensor: torch.Tensor, digest: int) -> str:
    """Dtype, shape, order in memory and digest of a tensor, in one line."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {digest:016x}"


def _is_there(tensor: torch.Tensor) -> bool:
    return not torch.nn.parameter.is_lazy(tensor) and not tensor.is_meta


def _has_content(tensor: torch.Tensor) -> bool:
    return _is_there(tensor) and tensor.numel() > 0


TREE = ModuleTree()
"""Module tree of this process; the plugin installs it before vLLM makes a model."""
