"""Projection by modules like those of vLLM's models: seen inputs, and K and V of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import QKVParallelLinear

from tests.profiling.simulation.families import one_rank
from vllm_ssdkv.base.errors import StepError, UnsupportedError
from vllm_ssdkv.connector.identity.module_tree import ModuleTree
from vllm_ssdkv.connector.worker.layer_projector import LayerProjector

HIDDEN, HEADS, SIZE = 8, 2, 4


class Layer(torch.nn.Module):
    """In place of vLLM's ``Attention``."""

    projector: LayerProjector | None = None
    calls = 0
    seen: torch.Tensor

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.projector is not None and self.projector.projecting:
            self.seen = query
            self.projector.keep(key.view(-1, HEADS, SIZE), value.view(-1, HEADS, SIZE))
        return query + key + value


class Rotating(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.attn = Layer()

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden_states).chunk(3, dim=-1)
        key = key * torch.cos(positions)[:, None]
        found: torch.Tensor = self.attn(query, key, value)
        return found


class Learned(Rotating):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        found: torch.Tensor = self.attn(*self.qkv(hidden_states).chunk(3, dim=-1))
        return found


class Masked(Rotating):
    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        return hidden_states + attention_mask


class Fused(torch.nn.Module):
    """With vLLM's fused layer, its weights in rows."""

    def __init__(self, *, bias: bool):
        super().__init__()
        self.qkv_proj = QKVParallelLinear(HIDDEN, SIZE, HEADS, bias=bias, disable_tp=True)
        self.o_proj = torch.nn.Linear(HIDDEN, HIDDEN)
        self.attn = Layer()
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        found, _ = self.qkv_proj(hidden_states)
        query, key, value = found.chunk(3, dim=-1)
        out: torch.Tensor = self.o_proj(self.attn(query, key * positions[:, None], value))
        return out


@pytest.fixture
def tree() -> ModuleTree:
    tree = ModuleTree()
    tree.install()
    return tree


def test_k_and_v_of_other_tokens_are_those_that_they_had(tree: ModuleTree) -> None:
    torch.manual_seed(0)
    modules: list[Rotating] = [Rotating(), Learned()]
    projector = LayerProjector([module.attn for module in modules], tree)
    for module in modules:
        module.attn.projector = projector
    stored = torch.randn(5, HIDDEN)
    positions = torch.arange(5) + 7
    for number, module in enumerate(modules):
        _, key, value = module.qkv(stored).chunk(3, dim=-1)
        if not number:
            key = key * torch.cos(positions)[:, None]
        found = projector.project(number, stored, positions)
        assert torch.equal(found[0], key.view(-1, HEADS, SIZE))
        assert torch.equal(found[1], value.view(-1, HEADS, SIZE))
        assert not projector.projecting


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[None]:
    with one_rank(tmp_path, VllmConfig()):
        yield


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("bias", [False, True])
def test_k_and_v_alone_are_projected(tree: ModuleTree, bias: bool) -> None:
    torch.manual_seed(0)
    module = Fused(bias=bias)
    module.attn.projector = projector = LayerProjector([module.attn], tree)
    module.o_proj.register_forward_pre_hook(lambda *_: pytest.fail("it projects an output"))
    stored, positions = torch.randn(5, HIDDEN), torch.arange(5) + 7
    linear = module.qkv_proj
    wanted = torch.nn.functional.linear(stored, linear.weight, linear.bias).chunk(3, dim=-1)
    key, value = projector.project(0, stored, positions)
    torch.testing.assert_close(key.flatten(1), wanted[1] * positions[:, None])
    torch.testing.assert_close(value.flatten(1), wanted[2])
    assert not module.attn.seen.any()
    assert "forward" not in vars(linear), "the next step projects queries"


@pytest.mark.usefixtures("rank")
def test_packed_weights_project_queries_as_well(tree: ModuleTree) -> None:
    module = Fused(bias=False)
    module.qkv_proj.quant_method.process_weights_after_loading(module.qkv_proj)
    assert not module.qkv_proj.weight.numel()
    module.attn.projector = projector = LayerProjector([module.attn], tree)
    projector.project(0, torch.randn(5, HIDDEN), torch.arange(5))
    assert module.attn.seen.any()


def test_inputs_are_seen_where_they_are_wanted(tree: ModuleTree) -> None:
    module = Rotating()
    projector = LayerProjector([module.attn], tree)
    module.attn.projector = projector
    inputs, positions = torch.randn(3, HIDDEN), torch.arange(3)
    module(positions, inputs)
    with pytest.raises(StepError, match="--enforce-eager"):
        projector.take(0)
    projector.recording = True
    module(positions=positions, hidden_states=inputs)
    projector.project(0, torch.zeros(2, HIDDEN), torch.arange(2))
    assert projector.take(0) is inputs
    module(positions, inputs)
    assert projector.take(0) is inputs


def test_modules_that_take_something_else_are_refused(tree: ModuleTree) -> None:
    module = Masked()
    with pytest.raises(UnsupportedError, match="Masked takes hidden_states, attention_mask"):
        LayerProjector([module.attn], tree)
    with pytest.raises(UnsupportedError, match="stand in no module"):
        LayerProjector([Layer()], tree)


def test_a_layer_that_is_not_reached_is_noticed(tree: ModuleTree) -> None:
    module = Learned()
    with pytest.raises(StepError, match="made no K and V"):
        LayerProjector([module.attn], tree).project(0, torch.zeros(2, HIDDEN), torch.arange(2))
