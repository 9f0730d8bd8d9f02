"""KV leaves HBM layer by layer while later layers compute: real vLLM, both modes.

On the CPU no layer goes alone by default; here all do, by the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.e2e.stock import Stock
from tests.e2e.workload import LONG, ROOMY_DRAM, kv_tokens, page_mode, reuse_mode
from tests.kit.engine import Engine
from vllm_ssdkv.connector.worker.block_copy import OpaquePort
from vllm_ssdkv.connector.worker.layer_copy import MOST_WAITING
from vllm_ssdkv.connector.worker.paged_port import PagedPort

PROMPTS = LONG[1:5]
HITS = [(len(prompt) - 1) // 32 * 32 for prompt in PROMPTS]
WINDOW, CHUNK = 128, 256
SLOW_S = 0.1

Devices = Callable[..., list[dict[str, str]]]


@dataclass
class Case:
    model: str
    mode: str
    kv_tokens: int
    options: Mapping[str, object] = field(default_factory=dict)


CASES = {
    "reuse": Case("llama", "reuse", 16384),
    "page": Case("llama", "page", 2 * kv_tokens(WINDOW, CHUNK), {"replicas": 2}),
    # Two KV cache groups in the same memory.
    "reuse-windows": Case("gemma3", "reuse", 16384),
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on each layer takes long to copy."""

    def begin() -> None:
        for port in (OpaquePort, PagedPort):
            monkeypatch.setattr(port, "save_layer", delayed(port.save_layer))

    def delayed(save_layer: Callable[..., None]) -> Callable[..., None]:
        def save_slowly(*arguments: Any) -> None:  # noqa: ANN401 - passed through
            time.sleep(SLOW_S)
            save_layer(*arguments)

        return save_slowly

    return begin


def start(case: Case, model: Path, places: list[dict[str, str]], key: Path) -> Engine:
    key.write_text("5a" * 32 + "\n")
    key.chmod(0o600)
    options = {**case.options, "encryption": {"key_file": str(key)}}
    made = (
        reuse_mode(places, dram=ROOMY_DRAM, **options)
        if case.mode == "reuse"
        else page_mode(places, window=WINDOW, dram=ROOMY_DRAM, **options)
    )
    return Engine(
        model,
        ssdkv=made,
        kv_tokens=case.kv_tokens,
        max_model_len=4352,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
    )


def copied(engine: Engine, when: str) -> float:
    return engine.ssdkv("layers_copied", when=when)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_layers_go_beside_the_next(
    case: Case,
    models: dict[str, Path],
    stock: Stock,
    devices: Devices,
    tmp_path: Path,
    by_layers: None,
    slow: Callable[[], None],
) -> None:
    wanted = [a.tokens for a in stock.answers(case.model, PROMPTS)]
    places = devices(2)
    with start(case, models[case.model], places, tmp_path / "key") as engine:
        assert [a.tokens for a in engine.answers(PROMPTS)] == wanted
        again = engine.answers(PROMPTS)
        assert [a.tokens for a in again] == wanted
        assert [a.cached for a in again] == HITS
        layers = len(get_kv_transfer_group().worker.layout.layer_names)
        steps = engine.ssdkv("step_copies", way="layers")
        assert steps >= sum(HITS) / CHUNK
        assert engine.ssdkv("step_copies", way="frames") == 0
        assert copied(engine, "beside") + copied(engine, "end") == layers * steps
        # How many depends on what else the machine does.
        assert copied(engine, "beside") > 0
        slow()
        # Given up amid its prompt: what was copied of it is found as far as it was computed.
        engine.add("given up", LONG[0][: 8 * CHUNK])
        for _ in range(3):
            engine.step()
        engine.abort("given up")
        engine.run()
        engine.settle()
        engine.assert_nothing_held()
        assert engine.ssdkv("layers_waiting") == MOST_WAITING
        if layers > MOST_WAITING:
            assert engine.ssdkv("layer_copy_waits") > 0
            worker = get_kv_transfer_group().worker
            assert worker.counters.total("layer_copy_wait_seconds") > SLOW_S / 2
    with start(case, models[case.model], places, tmp_path / "key") as engine:
        found = engine.answers(PROMPTS)
        assert [a.tokens for a in found] == wanted
        assert [a.cached for a in found] == HITS
        assert engine.ssdkv("hit_tokens", tier="ssd") > 0
        for name in ("checksum_failures", "header_mismatches", "load_failures"):
            assert engine.ssdkv(name) == 0, name


def test_a_step_that_fails_commits_nothing_of_it(
    models: dict[str, Path],
    stock: Stock,
    devices: Devices,
    tmp_path: Path,
    by_layers: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third step of a prompt ends the engine after its first layers were copied."""
    case, prompt, places = CASES["reuse"], PROMPTS[1], devices(2)
    wanted = stock.answers("llama", [prompt])
    with start(case, models["llama"], places, tmp_path / "key") as engine:
        engine.add("a", prompt)
        engine.step()
        engine.step()
        engine.step()  # the second step's report
        calls = []
        save_layer = OpaquePort.save_layer

        def fail(*arguments: Any) -> None:  # noqa: ANN401 - passed through
            calls.append(arguments)
            if len(calls) == 2:
                raise OSError("no memory for a copy")
            save_layer(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(OpaquePort, "save_layer", fail)
            with pytest.raises(OSError, match="no memory for a copy"):
                engine.step()
        assert len(calls) >= 2
    with start(case, models["llama"], places, tmp_path / "key") as engine:
        (found,) = engine.answers([prompt])
        assert found.tokens == wanted[0].tokens
        assert 0 < found.cached <= 3 * CHUNK
        assert engine.ssdkv("header_mismatches") == engine.ssdkv("checksum_failures") == 0
