"""Projection of stored X by the model's own attention modules, as a plugin comes to them.

vLLM's ``Attention`` layer stands in a module of the model (``LlamaAttention``, ``OPTAttention``),
which projects its input, norms and rotates, calls the layer, and projects the result. A hook of
torch's sees that input, X, before the module does. To project X again the same module is called
with it, and left where page mode's backend has K and V: attention and the output's projection are
not computed. So each family has its own norms and position embedding. Where the model has vLLM's
fused layer for Q, K and V, with plain weights in their rows, queries are not projected. Layers for
CPUs keep packed weights only, and quantised ones scales beside them: queries are computed there,
for nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from vllm_ssdkv.base.errors import StepError, UnsupportedError
from vllm_ssdkv.connector.identity.module_tree import TREE, ModuleTree

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import QKVParallelLinear

INPUTS: Final = "hidden_states"
POSITIONS: Final = ("positions", "position_ids")


class _KeptError(Exception):
    """Leaves a module whose K and V are there."""


class LayerProjector:
    """See ``Projection``. Used by the thread that runs the forward pass.

    Example:
        projector = LayerProjector(layers)
        key, value = projector.project(0, inputs, positions)

    Attributes:
        recording: Whether X of the layers to come is to be seen.
        projecting: Whether a module projects stored X: page mode's backend has it left then.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], tree: ModuleTree = TREE):
        """
        Args:
            layers: vLLM's attention layers, in the order of slots.
            tree: Knows which module holds which.

        Raises:
            UnsupportedError: a layer's module takes something else than X and positions.
        """
        self.recording = self.projecting = False
        self._modules = [_holder(layer, tree) for layer in layers]
        self._positions = [_positions_name(module) for module in self._modules]
        self._without_queries = [_without_queries(module) for module in self._modules]
        self._places = [_arguments(module).index(INPUTS) for module in self._modules]
        self._seen: dict[int, torch.Tensor] = {}
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        for number, module in enumerate(self._modules):
            module.register_forward_pre_hook(functools.partial(self._see, number), with_kwargs=True)

    def _see(
        self, layer: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.recording and not self.projecting:
            named = kwargs.get(INPUTS)
            self._seen[layer] = args[self._places[layer]] if named is None else named

    def take(self, layer: int) -> torch.Tensor:
        """X of the layer in this step, [T, hidden].

        Raises:
            StepError: its module was not called as a module.
        """
        if layer not in self._seen:
            raise StepError(
                f"X of layer {layer} was not seen: vLLM does not run the model's modules one by "
                "one. Start with --enforce-eager, or set offload.x_share to 0"
            )
        return self._seen.pop(layer)

    def keep(self, key: torch.Tensor, value: torch.Tensor) -> NoReturn:
        """Take K and V, [N, Hkv, D], of stored X from the layer that would cache them, and leave
        the module."""
        self._kept = key, value
        raise _KeptError

    def project(
        self, layer: int, inputs: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Projection``.

        Raises:
            StepError: the layer was not reached.
        """
        name = self._positions[layer]
        others = {} if name is None else {name: positions}
        self.projecting = True
        try:
            with self._without_queries[layer]():
                self._modules[layer](**{INPUTS: inputs}, **others)
        except _KeptError:
            pass
        finally:
            self.projecting = False
            kept, self._kept = self._kept, None
        if kept is None:
            raise StepError(f"layer {layer} made no K and V of stored X; please report it")
        return kept


def _holder(layer: torch.nn.Module, tree: ModuleTree) -> torch.nn.Module:
    """The module that a layer stands in.

    Raises:
        UnsupportedError: it stands in none.
    """
    module = tree.parent_of(layer)
    if module is None:
        raise UnsupportedError(
            "offload.x_share: the model's attention layers stand in no module that projects their "
            "inputs: set offload.x_share to 0"
        )
    return module


def _without_queries(module: torch.nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Context in which a module projects K and V alone, where that is possible."""
    # Page mode runs without vLLM, too, where its decode steps are measured.
    from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod

    for linear in module.children():
        if (
            isinstance(linear, QKVParallelLinear)
            and isinstance(linear.quant_method, UnquantizedLinearMethod)
            and len(linear.weight) == linear.output_size_per_partition
            and linear.return_bias
            and "forward" not in vars(linear)  # another tool's
            and not linear.skip_bias_add
        ):
            return functools.partial(_keys_and_values, linear)
    return nullcontext


@contextmanager
def _keys_and_values(linear: QKVParallelLinear) -> Iterator[None]:
    """Zeros for queries, and K and V, from a layer that projects all of them."""
    queries = linear.num_heads * linear.head_size
    bias = None if linear.bias is None else linear.bias[queries:]

    def forward(inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        found = torch.nn.functional.linear(inputs, linear.weight[queries:], bias)
        return torch.nn.functional.pad(found, (queries, 0)), None

    linear.forward = forward
    try:
        yield
    finally:
        del linear.forward


def _arguments(module: torch.nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _positions_name(module: torch.nn.Module) -> str | None:
    """Name of the argument for positions; None: the module takes none.

    Raises:
        UnsupportedError: it takes something else, or no X.
    """
    parameters = _arguments(module)
    others = [name for name in parameters if name != INPUTS]
    if len(others) == len(parameters) or any(name not in POSITIONS for name in others):
        raise UnsupportedError(
            f"offload.x_share: {type(module).__name__} takes {', '.join(parameters)}, and X is "
            f"projected by modules that take {INPUTS} and positions: set offload.x_share to 0"
        )
    return others[0] if others else None
