"""The model in memory: found from its layers, digested, seen to change. Without vLLM's models."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from vllm.lora.layers import ReplicatedLinearWithLoRA

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.connector.identity.loaded_model import (
    LoadedAdapters,
    LoadedModel,
    ModelDigest,
    digest_of_adapter,
    plain,
    settings_of,
)
from vllm_ssdkv.connector.identity.module_tree import ModuleTree


class Attention(nn.Module):
    """A layer as vLLM knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.125
        self.window: int | None = None
        self.kv_cache = torch.zeros(3)
        self.impl = SimpleNamespace(soft_cap=None)


class Layer(nn.Module):
    """Attention with a projection and a table of positions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.proj = nn.Linear(4, 4)
        self.proj.weight.data.copy_(torch.randn(4, 4, generator=generator))
        self.proj.bias.data.zero_()
        self.register_buffer("positions", torch.arange(8.0), persistent=False)
        self.attn = Attention()


class Model(nn.Module):
    """Two layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(seed), Layer(seed + 1)])

    def attention(self) -> list[nn.Module]:
        return [layer.attn for layer in self.layers]


@pytest.fixture
def tree() -> Iterator[ModuleTree]:
    """A record of its own, for the time of a test."""
    hooks = (
        torch_module._global_module_registration_hooks,
        torch_module._global_parameter_registration_hooks,
        torch_module._global_buffer_registration_hooks,
    )
    before = [dict(each) for each in hooks]
    made = ModuleTree()
    made.install()
    made.install()
    assert [len(each) for each in hooks] == [len(each) + 1 for each in before]
    yield made
    for each, kept in zip(hooks, before, strict=True):
        each.clear()
        each.update(kept)


def digest(tree: ModuleTree, model: Model, files: str = "") -> ModelDigest:
    return LoadedModel(model.attention(), lambda: files, tree).digest()


def test_the_model_is_found_from_its_layers(tree: ModuleTree) -> None:
    model, drafter = Model(), Model(5)
    found = LoadedModel([*model.attention(), *drafter.attention()], str, tree)
    assert found.roots == [model, drafter]
    assert found.digest().nbytes == 2 * 2 * (16 + 4 + 8) * 4


class SparseMoeBlock(nn.Module):
    """Experts."""


def test_experts_are_known(tree: ModuleTree) -> None:
    model = Model()
    assert not LoadedModel(model.attention(), str, tree).routed
    model.layers[1].mlp = SparseMoeBlock()
    assert LoadedModel(model.attention(), str, tree).routed


def test_a_model_that_was_made_before_cannot_be_found(tree: ModuleTree) -> None:
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS"):
        LoadedModel([Attention()], str, tree)


def test_the_same_model_has_the_same_digest(tree: ModuleTree) -> None:
    assert digest(tree, Model()).digest == digest(tree, Model()).digest


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.layers[1].proj.weight.data[3, 2].add_(1e-3),
        lambda m: m.layers[0].proj.bias.data[0].add_(1),
        lambda m: m.layers[1].positions[7].add_(1),
        lambda m: setattr(m.layers[0].attn, "scale", 0.25),
        lambda m: setattr(m.layers[0].attn, "window", 64),
        lambda m: setattr(m.layers[0].attn.impl, "soft_cap", 30.0),
        lambda m: m.layers[0].register_buffer("more", torch.zeros(1)),
        lambda m: m.layers.append(Layer(7)),
        lambda m: setattr(m.layers[1].proj, "weight", nn.Parameter(torch.ones(4, 4).half())),
    ],
)
def test_each_change_of_what_is_computed_changes_it(tree: ModuleTree, change: Any) -> None:  # noqa: ANN401
    model = Model()
    before = digest(tree, model).digest
    change(model)
    assert digest(tree, model).digest != before


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.layers[0].attn, "kv_cache", torch.ones(9)),
        lambda m: setattr(m, "directory", "/models/moved"),
        lambda m: setattr(m, "use_flash", False),
        lambda m: setattr(m, "nothing", None),
        lambda m: setattr(m, "do_not_compile", True),
        lambda m: setattr(m, "config", SimpleNamespace(max_model_len=4096)),
    ],
)
def test_what_changes_nothing_does_not(tree: ModuleTree, change: Any) -> None:  # noqa: ANN401
    model = Model()
    before = digest(tree, model).digest
    change(model)
    assert digest(tree, model).digest == before


def take_away(model: Model) -> None:
    """As a kernel does that keeps the weights in memory of its own."""
    model.layers[0].proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def test_weights_that_a_kernel_has_taken_away_count(tree: ModuleTree) -> None:
    digests = set()
    for seed in (0, 0, 3):
        model = Model(seed)
        take_away(model)
        found = digest(tree, model)
        digests.add(found.digest)
    assert len(digests) == 2


def test_weights_that_are_loaded_anew_and_taken_away(tree: ModuleTree) -> None:
    model = Model()
    take_away(model)
    before = digest(tree, model).digest
    for weights, same in ((torch.ones(4, 4), False), (Model().layers[0].proj.weight, True)):
        model.layers[0].proj.weight = nn.Parameter(weights.detach().clone())
        take_away(model)
        assert (digest(tree, model).digest == before) == same


def test_files_stand_for_weights_that_are_taken_away_unseen(tree: ModuleTree) -> None:
    model = Model()
    model.layers[1].proj.weight.data = torch.empty(0)
    one = digest(tree, model, "these files").digest
    assert one == digest(tree, model, "these files").digest
    assert one != digest(tree, model, "other files").digest
    with pytest.raises(UnsupportedError, match=r"layers\.1\.proj\.weight.*Download the model"):
        digest(tree, model)


def test_weights_that_are_loaded_anew_unseen_are_like_no_others(tree: ModuleTree) -> None:
    model = Model()
    model.layers[1].proj.weight.data = torch.empty(0)
    found = LoadedModel(model.attention(), lambda: "files", tree)
    before = found.digest().digest
    model.layers[0].proj.weight.data.copy_(torch.ones(4, 4))
    after = found.digest().digest
    model.layers[0].proj.weight.data.zero_()
    assert len({before, after, found.digest().digest}) == 3


def test_parameters_that_are_empty_by_nature_need_no_files(tree: ModuleTree) -> None:
    model = Model()
    model.layers[1].proj.order = nn.Parameter(torch.empty(0))
    digest(tree, model)


def test_reloading_is_seen(tree: ModuleTree) -> None:
    model = Model()
    found = LoadedModel(model.attention(), str, tree)
    assert found.changed(), "nobody has looked yet"
    found.digest()
    assert not found.changed()
    assert not found.touched()
    model.layers[0].proj.weight.data.copy_(torch.ones(4, 4))
    assert found.changed()
    assert not found.touched()
    found.digest()
    take_away(model)
    assert found.touched()
    assert found.changed()
    found.digest()
    assert not found.changed()
    Model()
    assert not found.touched(), "of another model"


class Wrapped(nn.Module):
    """As where adapters are enabled."""

    __module__ = ReplicatedLinearWithLoRA.__module__
    base_layer: nn.Module
    slots = 4


def test_enabling_adapters_changes_nothing(tree: ModuleTree) -> None:
    model = Model()
    before = digest(tree, model).digest
    wrapped = Wrapped()
    wrapped.base_layer, model.layers[0].proj = model.layers[0].proj, wrapped
    assert digest(tree, model).digest == before


class Kind(enum.Enum):
    """Of something."""

    ONE = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (0.5, "0.5"),
        ("silu", "'silu'"),
        ("/a/path", None),
        (torch.float16, "torch.float16"),
        (Kind.ONE, "Kind.ONE"),
        (Kind, "Kind"),
        ([1, (2, "a")], "{0:1,1:{0:2,1:'a'}}"),
        ({"base": 1e4}, "{base:10000.0}"),
        ([object()], None),
        ([1] * 65, None),
        ([[[[1]]]], None),
        (torch.zeros(1), None),
    ],
)
def test_texts_of_settings(value: object, text: str | None) -> None:
    assert plain(value) == text


def test_settings_are_in_one_line_in_order() -> None:
    attention = Attention()
    attention.heads = 8
    assert settings_of(attention) == "heads=8 scale=0.125"


class TestAdapters:
    """Adapters as vLLM holds them."""

    @staticmethod
    def adapter(seed: int) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(2, 4, generator=generator) for _ in range(3)]
        packed = SimpleNamespace(
            module_name="qkv", lora_a=[tensors[0], None], lora_b=[tensors[1], None], scaling=[1, 1]
        )
        alone = SimpleNamespace(module_name="o", lora_a=tensors[2], lora_b=tensors[0], scaling=1)
        return SimpleNamespace(id=seed, rank=2, loras={"qkv": packed, "o": alone})

    def test_a_digest_is_of_the_weights(self) -> None:
        one, again, other = (digest_of_adapter(self.adapter(seed)) for seed in (1, 1, 2))
        assert one == again != other
        scaled = self.adapter(1)
        scaled.loras["o"].scaling = 2
        assert digest_of_adapter(scaled) != one

    def test_changes_are_told_once(self) -> None:
        held: dict[int, SimpleNamespace] = {}
        model = Model()
        manager: Any = SimpleNamespace(list_adapters=lambda: dict(held))
        model.lora_manager = manager
        adapters = LoadedAdapters([model, Model()])
        assert adapters.take_changes() == {}
        held[7] = self.adapter(1)
        digest = digest_of_adapter(held[7])
        assert adapters.take_changes() == {7: (digest, 1)}
        assert (adapters.take_changes(), adapters.changes(7)) == ({}, 1)
        held[7] = self.adapter(1)
        assert (adapters.take_changes(), adapters.changes(7)) == ({}, 1), "the same, read again"
        held[7] = self.adapter(2)
        assert adapters.take_changes() == {7: (digest_of_adapter(held[7]), 2)}
        held.clear()
        assert adapters.take_changes() == {7: (b"", 3)}
        assert adapters.changes(7) == -1
