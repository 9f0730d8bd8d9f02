"""Reuse mode with a model most of whose layers keep a state in place of KV (Qwen3-Next): a hit ends
where states of all of them were stored, and reads no other ones.

In bfloat16, the only type that vLLM's linear attention has on CPUs. Where a prompt is cut into
steps changes rounding, so the measure is stock vLLM that finds the same prefixes in HBM; one
request runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine.exceptions import EngineDeadError

from tests.e2e.drafters import ngram
from tests.e2e.models import prompts
from tests.e2e.workload import reuse_mode
from tests.faults import set_faults
from tests.kit.engine import MAX_TOKENS, Answer, Engine

pytestmark = pytest.mark.skipif(
    not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's linear attention needs AVX-512 BF16 or AMX",
)

BLOCK = 544
"""Tokens of attention that are as many bytes as a state: vLLM makes blocks that large."""
STATE_GROUPS = 3
CHUNK = 1500
HEAD, *TAILS = prompts((1300, 400, 500, 450), seed=7)
PROMPTS = [*prompts((3000, 1100, 1089, 640, 300), seed=5), *(HEAD + tail for tail in TAILS)]
HITS = [2720, 1088, 1088, 544, 0, 1632, 1632, 1632]
"""What is found of each when it is asked again."""
Devices = Callable[..., list[dict[str, Any]]]


def start(model: Path, options: dict[str, object] | None, **settings: object) -> Engine:
    return Engine(
        model,
        ssdkv=options,
        kv_tokens=16384,
        dtype="bfloat16",
        **{
            "enable_prefix_caching": True,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 1,
            **settings,
        },
    )


def check(got: list[Answer], right: list[Answer]) -> None:
    assert [a.cached for a in got] == [a.cached for a in right]
    assert [a.tokens for a in got] == [a.tokens for a in right]


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    return models["qwen3_next"]


@pytest.fixture(scope="module")
def stock(model: Path) -> tuple[list[Answer], list[Answer]]:
    """Answers of stock vLLM, the second time with what its own cache in HBM has."""
    with start(model, None) as engine:
        return engine.answers(PROMPTS), engine.answers(PROMPTS)


@pytest.fixture(scope="module")
def place(devices: Devices) -> list[dict[str, Any]]:
    return devices(2, "128MiB")


@pytest.fixture(scope="module")
def stored(
    model: Path, stock: tuple[list[Answer], list[Answer]], place: list[dict[str, Any]]
) -> Iterator[Engine]:
    """An engine that has answered the prompts."""
    with start(model, reuse_mode(place)) as engine:
        check(engine.answers(PROMPTS), stock[0])
        engine.settle()
        yield engine


def test_prompts_hit_as_in_hbm(stored: Engine, stock: tuple[list[Answer], list[Answer]]) -> None:
    assert stored.scheduler.block_size == BLOCK
    assert len(stored.scheduler.kv_cache_config.kv_cache_groups) == STATE_GROUPS + 1
    loaded = stored.ssdkv("hit_tokens")
    assert stored.llm.llm_engine.reset_prefix_cache()
    again = stored.answers(PROMPTS)
    check(again, stock[1])
    assert [a.cached for a in again] == HITS
    assert stored.ssdkv("hit_tokens") == loaded + sum(HITS)
    stored.settle()
    stored.assert_nothing_held()


def test_a_restart_reads_one_state_of_each_layer(
    stored: Engine,
    model: Path,
    stock: tuple[list[Answer], list[Answer]],
    place: list[dict[str, Any]],
) -> None:
    stored.settle()
    stored.close()
    with start(model, reuse_mode(place)) as restarted:
        slot = restarted.scheduler.connector.scheduler.rebalancer.placement.geometry.slot_bytes
        alone = [0, 1, 3]
        check(
            restarted.answers([PROMPTS[i] for i in alone]),
            [stock[1][i] for i in alone],
        )
        hits = [HITS[i] // BLOCK for i in alone]
        assert restarted.ssdkv("bytes_read") == slot * sum(hit + STATE_GROUPS for hit in hits)
        restarted.settle()
        restarted.assert_nothing_held()


def test_where_others_went_on_otherwise_a_state_is_stored(model: Path, devices: Devices) -> None:
    """A long beginning that many share and that no step ended with: the second one that asks, in
    whatever process, leaves a state there, and the third one finds it."""
    place, hits = devices(1), []
    for tail in TAILS:
        with start(model, reuse_mode(place), max_num_batched_tokens=4096) as engine:
            (answer,) = engine.answers([HEAD + tail], 2)
            hits.append(answer.cached)
            engine.settle()
    assert hits == [0, 0, len(HEAD) // BLOCK * BLOCK]


@pytest.mark.parametrize("interval", [0, BLOCK])
def test_the_next_turn(model: Path, devices: Devices, interval: int) -> None:
    """Goes on where the last one's prompt ended, or, where vLLM is told to keep more states, from
    one that was decoded through."""
    prompt, more = prompts((2 * BLOCK - 10, 200), seed=9)
    assert len(prompt) < 2 * BLOCK < len(prompt) + MAX_TOKENS
    keep = {"prefix_cache_retention_interval": interval}
    with start(model, None, **keep) as engine:
        (first,) = engine.answers([prompt])
        turn = [*prompt, *first.tokens, *more]
        (right,) = engine.answers([turn])
    assert right.cached == (2 * BLOCK if interval else BLOCK)
    place = devices(1)
    for asked, wanted in ((prompt, first), (turn, right)):
        with start(model, reuse_mode(place), **keep) as engine:
            check(engine.answers([asked]), [wanted])
            engine.settle()
            engine.assert_nothing_held()


def test_states_that_cannot_be_read(
    model: Path, stock: tuple[list[Answer], list[Answer]], devices: Devices, tmp_path: Path
) -> None:
    control, place = tmp_path / "faults.json", devices(2, "128MiB")
    options = reuse_mode(place, dram="16MiB", io={"staging": "4MiB", "fault_file": str(control)})
    set_faults(control)
    with start(model, options) as engine:
        check(engine.answers(PROMPTS), stock[0])
        engine.settle()
    with start(model, options) as engine:
        set_faults(control, {"kind": "corrupt", "op": "read", "probability": 0.2, "count": 6})
        got = engine.answers(PROMPTS)
        assert [a.tokens for a in got] == [a.tokens for a in stock[1]]
        assert engine.ssdkv("recomputed_requests") > 0
        set_faults(control)
        engine.settle()
        engine.assert_nothing_held()


def test_many_requests_at_a_time(model: Path, devices: Devices) -> None:
    """In an HBM that is small for them; logits are the same but for rounding."""
    with start(model, None) as engine:
        right = engine.answers(PROMPTS, 1, logprobs=1)
    tight: dict[str, Any] = {"max_num_seqs": 8, "num_gpu_blocks_override": 24}
    place = devices(1, "128MiB")
    for _ in range(2):
        with start(model, reuse_mode(place), **tight) as engine:
            got = engine.answers(PROMPTS, 1, logprobs=1)
            for one, other in zip(got, right, strict=True):
                (token,) = other.tokens
                assert one.logprobs[0][token] == pytest.approx(other.logprobs[0][token], abs=0.15)
            engine.settle()
            engine.assert_nothing_held()
    assert [a.cached for a in got] == HITS


def test_drafts_beside_states_fail_in_vllm_itself(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without our connector: with drafts vLLM moves states by a Triton kernel, and its CPU build
    has none. Once this fails, ``model_layout`` may serve drafts beside states."""
    with (
        start(model, None, speculative_config=ngram(), in_process=False) as engine,
        pytest.raises(EngineDeadError),
    ):
        engine.answers(PROMPTS[:1])
    said = "".join(capfd.readouterr())
    assert "precopy_mamba_align_fused_kernel" in said
    assert "object is not subscriptable" in said
