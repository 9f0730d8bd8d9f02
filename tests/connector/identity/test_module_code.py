"""Code beside vLLM's own: told apart by what it does, with the same text in every process."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from tests.kit.alone import environment_with_tests
from vllm_ssdkv.connector.identity import module_code
from vllm_ssdkv.connector.identity.loaded_model import plain
from vllm_ssdkv.connector.identity.module_code import CodeProbe, ModelCode

FACTOR = 2.0
Hook = Callable[..., Any]


def steer(module: nn.Module, given: object, output: Any) -> Any:  # noqa: ANN401
    return output * FACTOR


def steer_more(module: nn.Module, given: object, output: Any) -> Any:  # noqa: ANN401
    return output * 3.0


def around(factor: object) -> Hook:
    def hook(module: nn.Module, given: object, output: Any, more: object = None) -> Any:  # noqa: ANN401
        return output * factor

    return hook


def lines(module: nn.Module) -> list[str]:
    return ModelCode(plain).lines("a", module)


def hooked(hook: Hook) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(hook)
    return module


def of_hook(hook: Hook) -> str:
    (line,) = lines(hooked(hook))
    return line


def of_text(factor: float, variables: dict[str, Any]) -> Hook:
    exec(f"def hook(module, given, output): return output * {factor}", variables)
    hook: Hook = variables["hook"]
    return hook


def test_code_that_versions_name_has_no_lines() -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel

    code = ModelCode(plain)
    for kind in (nn.Linear, LlamaModel, LlamaForCausalLM):
        module = nn.Module()
        module.__class__ = kind
        assert code.lines("a", module) == [], "Python and vLLM put methods on their classes"


@pytest.mark.parametrize(
    ("hook", "other"),
    [
        (steer, steer_more),
        (around(2.0), around(3.0)),
        (functools.partial(steer), functools.partial(steer_more)),
        (functools.partial(around(2.0), more=1), functools.partial(around(2.0), more=2)),
        (torch.no_grad()(around(2.0)), torch.no_grad()(around(3.0))),
        (torch.no_grad()(steer), steer),
        (around((1.0, steer)), around((1.0, steer_more))),
        (torch.relu, torch.tanh),
        (of_text(1.5, {}), of_text(2.5, {})),
        (of_text(1.5, {"__name__": "__main__"}), of_text(2.5, {"__name__": "__main__"})),
    ],
)
def test_hooks_are_told_apart_by_what_they_do(hook: Hook, other: Hook) -> None:
    assert of_hook(hook) == of_hook(hook) != of_hook(other)


def test_the_values_that_a_hook_reads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of_hook(steer)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert of_hook(steer) != before
    steer.strength = 3.0  # type: ignore[attr-defined]  # of a function
    with_strength = of_hook(steer)
    del steer.strength  # type: ignore[attr-defined]  # of a function
    assert with_strength != of_hook(steer)
    settings = types.ModuleType("settings")
    settings.FACTOR = 1.0  # type: ignore[attr-defined]  # a module of now
    hook: Hook = lambda module, given, output: output * settings.FACTOR  # noqa: E731
    before = of_hook(hook)
    settings.FACTOR = 2.0  # type: ignore[attr-defined]  # a module of now
    assert of_hook(hook) != before


def test_it_counts_when_a_hook_is_called() -> None:
    before = nn.Linear(2, 2)
    before.register_forward_pre_hook(steer)  # type: ignore[arg-type]  # the same code
    assert lines(before) != lines(hooked(steer))
    handle = torch_module.register_module_forward_hook(steer)
    try:
        assert len(ModelCode(plain).shared()) == 1
    finally:
        handle.remove()
    assert ModelCode(plain).shared() == []


class Steering:
    """A hook with a state."""

    def __call__(self, module: nn.Module, given: object, output: Any) -> Any:  # noqa: ANN401
        return output * FACTOR


@pytest.mark.parametrize(
    "hook",
    [
        around(torch.ones(2)),
        torch.no_grad()(around(torch.ones(2))),
        functools.partial(torch.add, torch.ones(2)),
        nn.Linear(2, 2).forward,
        [torch.ones(2)].append,
        Steering(),
        Steering().__call__,
    ],
    ids=["closure", "decorated", "partial", "of a module", "builtin", "object", "method"],
)
def test_hooks_that_nothing_tells_apart_are_like_no_others(hook: Hook) -> None:
    module = hooked(hook)
    assert lines(module) != lines(module)
    code = ModelCode(plain)
    code.lines("place", module)
    assert code.unstable == ["hook after place"]


def test_methods_that_were_put_on_a_module() -> None:
    def of(name: str, value: Callable[[nn.Module], object]) -> list[str]:
        module = nn.Linear(2, 2)
        setattr(module, name, value(module))
        found = lines(module)
        assert found == lines(module)
        return found

    def doubled(module: nn.Module) -> Hook:
        before = module.forward
        return lambda given: before(given) * 2.0

    def tripled(module: nn.Module) -> Hook:
        before = module.forward
        return lambda given: before(given) * 3.0

    def bound(module: nn.Module) -> Hook:
        return types.MethodType(steer, module)

    found = [
        of("forward", doubled),
        of("forward", tripled),
        of("forward", bound),
        of("forward", lambda _: functools.partial(nn.functional.softmax, dim=0)),
        of("forward", lambda _: functools.partial(nn.functional.softmax, dim=1)),
        of("_forward_method", doubled),
        of("impl", lambda _: types.SimpleNamespace(forward=steer)),
    ]
    assert all(found)
    assert len({str(each) for each in found}) == len(found)
    assert of("activation", lambda _: nn.functional.silu) == [], "an attribute that torch made"


def test_methods_that_were_put_on_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for method in (steer, steer_more, torch.no_grad()(steer), nn.ReLU.forward):
        monkeypatch.setattr(nn.Linear, "forward", method)
        found.append(str(lines(nn.Linear(2, 2))))
        assert found[-1] != "[]"
    assert len(set(found)) == 4


def test_classes_of_other_packages_count_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    (before,) = lines(LlamaRMSNorm(2))
    monkeypatch.setattr(module_code, "_version", lambda package: "another one")
    assert lines(LlamaRMSNorm(2)) != [before]


CACHE: dict[int, int] = {}


class Remote(nn.Linear):
    """As code that comes with a model."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.rotate = around(torch.ones(2))
        CACHE[len(CACHE)] = 1

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return helper(super().forward(given))


def helper(given: torch.Tensor) -> torch.Tensor:
    return given * FACTOR


def test_remote_code_counts_with_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    before = lines(Remote())
    assert before == lines(Remote()) != []
    monkeypatch.setitem(globals(), "helper", steer_more)
    assert lines(Remote()) != before


def test_it_is_the_same_in_another_process(tmp_path: Path) -> None:
    code = (
        "from tests.connector.identity.test_module_code import *\n"
        "print(of_hook(steer), of_hook(torch.no_grad()(around(2.0))), lines(Remote()))"
    )
    environment = environment_with_tests(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**environment, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    here = f"{of_hook(steer)} {of_hook(torch.no_grad()(around(2.0)))} {lines(Remote())}"
    assert done.stdout.strip().splitlines()[-1] == here


def test_a_look_finds_what_was_put_on_or_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    probe = CodeProbe(model.modules())
    assert not probe.changed()
    handle = model[0].register_forward_hook(steer)
    assert probe.changed()
    handle.remove()
    assert not probe.changed()
    model[1].forward = steer  # type: ignore[method-assign, assignment]  # as users do
    assert probe.changed()
    del model[1].forward
    assert not probe.changed()
    with monkeypatch.context() as patch:
        patch.setattr(nn.ReLU, "forward", steer)
        assert probe.changed()
    assert not probe.changed()
    del model
    gc.collect()
    assert probe.changed(), "it keeps no module alive"
