"""Identity of KV: the table of ways to change it and not to, walked with engines and without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from vllm.lora.request import LoRARequest

from tests.conftest import SOAK_ROUNDS
from tests.e2e.identity_table import CASES, Case, Start, as_in_a_new_process
from tests.e2e.models import make_minimax_m2, prompts
from tests.e2e.workload import reuse_mode
from tests.kit.alone import environment_with_tests
from tests.kit.engine import MAX_TOKENS, Answer, Engine

BLOCK = 32
PROMPT = prompts((700,), seed=31)[0]
BESIDE_IMAGE = PROMPT[:40]
"""So short that an image is a good part of the context."""
ROUNDING = 1e-3
"""Of logarithms of probabilities, in float32."""

WITH_ENGINES = (
    "tensors in the middle of the file",
    "reloaded in the engine",
    "moved, in two shards",
)
"""In every run; the other cases have engines in ``make soak``."""


class Running:
    """An engine to which the cases do what they do in it."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def add_adapter(self, adapter: LoRARequest) -> None:
        assert self._engine.llm.llm_engine.add_lora(adapter)

    def reload(self, weights: Path) -> None:
        llm = self._engine.llm
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})
        assert llm.reset_prefix_cache()


def answer(start: Start, store: list[dict[str, object]] | None) -> tuple[Answer, int]:
    """Of an engine, over a store or of stock vLLM; and tokens of the prompt. Nothing is verified:
    a comparison must not find out what the identity does not."""
    ssdkv = None if store is None else reuse_mode(store)
    options = {"max_model_len": 2048, "enable_prefix_caching": store is not None, **start.options}
    prompt: dict[str, object] = {"prompt_token_ids": BESIDE_IMAGE if start.image else PROMPT}
    if start.image:
        colours = Image.linear_gradient("L").convert("RGB").resize((40, 30))
        prompt["multi_modal_data"] = {"image": colours}
    with (
        as_in_a_new_process(start),
        Engine(start.model, ssdkv=ssdkv, kv_tokens=4096, **options) as engine,
    ):
        start.within(Running(engine))
        (output,) = engine.llm.generate(
            [prompt], engine.sampling(logprobs=1), use_tqdm=False, lora_request=start.adapter
        )
        if ssdkv is not None:
            engine.settle()
    (text,) = output.outputs
    chances = [{t: p.logprob for t, p in position.items()} for position in text.logprobs]
    found = Answer(tuple(text.token_ids), int(output.num_cached_tokens or 0), tuple(chances))
    return found, len(output.prompt_token_ids)


def alike(one: Answer, other: Answer) -> bool:
    """Whether two answers are the same, and as probable."""
    if one.tokens != other.tokens:
        return False
    pairs = zip(one.tokens, one.logprobs, other.logprobs, strict=True)
    return max(abs(a[token] - b[token]) for token, a, b in pairs) < ROUNDING


def chosen() -> list[object]:
    """Cases that have engines in this run."""
    return [
        pytest.param(case, id=case.name, marks=() if in_test else pytest.mark.soak)
        for case in CASES
        if (in_test := case.name in WITH_ENGINES) or SOAK_ROUNDS
    ]


@pytest.mark.parametrize("case", chosen())
def test_engines(
    case: Case, devices: Callable[..., list[dict[str, object]]], tmp_path: Path
) -> None:
    store = devices(1)
    first = case.start(tmp_path)
    before, _ = answer(first, store)
    assert before.cached == 0
    second = case.then(first)
    wanted, _ = answer(second, None)
    got, prompt = answer(second, store)
    assert alike(got, wanted)
    assert got.cached == (0 if case.changes else (prompt - 1) // BLOCK * BLOCK)
    # The version stands for kernels that this machine does not have.
    assert alike(wanted, before) is (not case.changes or bool(second.version))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of the blocks of one prompt in the first and second start, by case."""
    environment = environment_with_tests(tmp_path_factory.mktemp("path"))
    done = subprocess.run(
        [
            sys.executable,
            *("-P", "-m", "tests.e2e.identity_probe"),
            str(tmp_path_factory.mktemp("cases")),
        ],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_table_is_whole() -> None:
    assert [sum(case.changes is changes for case in CASES) for changes in (True, False)] == [14, 8]
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_keys(case: Case, keys: dict[str, list[str]]) -> None:
    before, after = keys[case.name]
    assert len(before) == len(after) == 3 * 64
    assert (before != after) is case.changes


@pytest.mark.soak
def test_a_model_that_writes_into_its_configuration(
    devices: Callable[..., list[dict[str, object]]], tmp_path: Path
) -> None:
    """Only workers make the model, so what its class writes is seen in some processes alone."""
    model, store = make_minimax_m2(tmp_path / "model"), devices(1)
    for cached in (0, (len(PROMPT) - 1) // BLOCK * BLOCK):
        with Engine(
            model,
            ssdkv=reuse_mode(store),
            kv_tokens=4096,
            load_format="dummy",
            max_model_len=2048,
            tensor_parallel_size=2,
            in_process=False,
        ) as engine:
            assert engine.answers([PROMPT], MAX_TOKENS)[0].cached == cached
