"""Resets of vLLM's cache in a warm engine: the store stays, and shows what the weights made.

Two engines over one store, one after the other, and a stock one for the right answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.conftest import SOAK_ROUNDS
from tests.e2e.models import prompts
from tests.e2e.workload import reuse_mode
from tests.kit.engine import Engine

BLOCK = 32
PROMPTS = prompts((700, 350), seed=41)
HITS = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
NONE = [0] * len(PROMPTS)
INSTANTS = 20 if SOAK_ROUNDS else 2
"""Resets at random while requests run."""
Edit = Callable[[Any], Callable[[], None]]
"""Has a model compute something else; what it returns puts it right again."""


def part_of_weights(model: Any) -> Callable[[], None]:  # noqa: ANN401 - vLLM's model
    """Words that no look at a few of them sees."""
    weight = model.model.layers[1].input_layernorm.weight
    before = weight.data.clone()
    weight.data[100:120] *= 3

    def undo() -> None:
        weight.data.copy_(before)

    return undo


def steer(module: Any, given: object, output: Any) -> Any:  # noqa: ANN401 - hooks of torch
    return (output[0] * 1.05, *output[1:]) if isinstance(output, tuple) else output * 1.05


def hook(model: Any) -> Callable[[], None]:  # noqa: ANN401 - vLLM's model
    """Activation steering."""
    handle = model.model.layers[1].mlp.down_proj.register_forward_hook(steer)
    return handle.remove  # type: ignore[no-any-return]  # the model is Any


def replaced_forward(model: Any) -> Callable[[], None]:  # noqa: ANN401 - vLLM's model
    """A method that calls the one in whose place it is."""
    layer = model.model.layers[1].mlp
    before = layer.forward
    layer.forward = lambda given: before(given) * 1.1

    def undo() -> None:
        del layer.forward

    return undo


def steering_vector(model: Any) -> Callable[[], None]:  # noqa: ANN401 - vLLM's model
    """A hook that reads a tensor, which nothing in a later process tells from another one."""
    vector = torch.linspace(-1, 1, 256)
    handle = model.model.layers[1].mlp.down_proj.register_forward_hook(
        lambda module, given, output: (output[0] + vector, *output[1:])
    )
    return handle.remove  # type: ignore[no-any-return]  # the model is Any


EDITS: dict[str, Edit] = {
    "part of weights": part_of_weights,
    "hook": hook,
    "forward": replaced_forward,
}
UNSTABLE: dict[str, Edit] = {"steering vector": steering_vector}
"""Edits after which each digest is like no other."""


@contextmanager
def edited(engine: Engine, edit: Edit) -> Iterator[None]:
    """Edit the model, then reset vLLM's cache as one must, and the same back."""
    (undo,) = engine.llm.apply_model(edit)
    assert engine.llm.reset_prefix_cache()
    try:
        yield
    finally:
        undo()
        assert engine.llm.reset_prefix_cache()


def ask(engine: Engine, wanted: list[tuple[int, ...]], cached: list[int]) -> None:
    """Each prompt alone."""
    for prompt, tokens, hit in zip(PROMPTS, wanted, cached, strict=True):
        (answer,) = engine.answers([prompt])
        assert (answer.tokens, answer.cached) == (tokens, hit)
        engine.settle()


def sleep(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.wake_up()


def pause(engine: Engine) -> None:
    core = engine.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler("keep", clear_cache=True)
    core.resume_scheduler()


RESETS: dict[str, Callable[[Engine], object]] = {
    "HBM alone": lambda engine: engine.llm.reset_prefix_cache(),
    "connector too": lambda engine: engine.llm.reset_prefix_cache(reset_connector=True),
    "sleep": sleep,
    "pause": pause,
}


def reset_at_random(engine: Engine, wanted: list[tuple[int, ...]], draw: random.Random) -> None:
    """A reset at some step of requests that load, compute and decode."""
    assert engine.llm.reset_prefix_cache()
    names = [str(draw.random()) for _ in PROMPTS]
    for name, prompt in zip(names, PROMPTS, strict=True):
        engine.add(name, prompt)
    instant, told = draw.randrange(1, 40), draw.choice([False, True])

    def reset(step: int) -> None:
        if step == instant:
            loading = bool(engine.scheduler.connector.scheduler.loads.of_requests)
            # vLLM itself raises where requests that it would preempt wait for loads.
            engine.llm.llm_engine.reset_prefix_cache(not loading, told)

    found = engine.run(reset)
    assert [found[name] for name in names] == wanted
    engine.settle()
    engine.assert_nothing_held()


def test_resets_keep_the_store(
    models: dict[str, Path], devices: Callable[..., list[dict[str, Any]]]
) -> None:
    options: dict[str, Any] = {"kv_tokens": 8192}
    with Engine(models["llama"], enable_prefix_caching=False, **options) as engine:
        right = [answer.tokens for answer in engine.answers(PROMPTS)]
        others = {}
        for name, edit in (EDITS | UNSTABLE).items():
            with edited(engine, edit):
                others[name] = [answer.tokens for answer in engine.answers(PROMPTS)]
            assert others[name] != right
    ssdkv = reuse_mode(devices(1))
    with Engine(models["llama"], ssdkv=ssdkv, **options) as engine:
        ask(engine, right, NONE)
        stored = engine.ssdkv("slots_ready")
        for reset in RESETS.values():
            reset(engine)
            ask(engine, right, HITS)
        assert engine.ssdkv("slots_ready") == stored
        draw = random.Random(5)
        for _ in range(INSTANTS):
            reset_at_random(engine, right, draw)
        for name, edit in EDITS.items():
            with edited(engine, edit):
                ask(engine, others[name], NONE)
                assert engine.llm.reset_prefix_cache()
                ask(engine, others[name], HITS)
            ask(engine, right, HITS)
        assert engine.ssdkv("slots_dropped") == 0
        assert engine.ssdkv("weights_changed") == 2 * len(EDITS)
        for name, edit in UNSTABLE.items():
            with edited(engine, edit):
                ask(engine, others[name], NONE)
                assert engine.llm.reset_prefix_cache()
                ask(engine, others[name], NONE)
            ask(engine, right, HITS)
    with Engine(models["llama"], ssdkv=ssdkv, **options) as engine:
        ask(engine, right, HITS)
        for name, edit in EDITS.items():
            with edited(engine, edit):
                ask(engine, others[name], HITS)
        for name, edit in UNSTABLE.items():
            with edited(engine, edit):
                ask(engine, others[name], NONE)
        ask(engine, right, HITS)
