"""A batch in our order and in that of submission: bytes read from the devices, same answers."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SOAK_ROUNDS
from tests.e2e.models import prompts
from tests.e2e.workload import SMALL_DRAM, reuse_mode
from tests.kit.engine import Engine, Tokens
from vllm_ssdkv.batch.order import arrange, block_hashes
from vllm_ssdkv.batch.request import COMPLETIONS, parse_request

QUESTION = 20
SEATS = 4

Devices = Callable[..., list[dict[str, object]]]


def arranged(batch: list[Tokens]) -> tuple[int, ...]:
    """The order in which the Batch API would run these prompts."""
    lines = [
        {"custom_id": "x", "method": "POST", "url": COMPLETIONS, "body": {"prompt": prompt}}
        for prompt in batch
    ]
    texts = [parse_request(json.dumps(line).encode(), None).prompt() for line in lines]
    return arrange([block_hashes(text) for text in texts], [len(text) for text in texts]).positions


def bytes_read(engine: Engine) -> float:
    try:
        return engine.ssdkv("bytes_read")
    except KeyError:  # a device is counted from its first read on
        return 0


SLOW: dict[str, object] = {"bandwidth": "64MiB", "latency": 0.0005}
"""As much slower than a drive as this model's KV is smaller than that of one worth storing."""

CASES = {"short prefixes": (512, []), "slow drives": (512, [SLOW])}
if SOAK_ROUNDS:
    CASES["long prefixes"] = (4096, [])  # which take as long to compute as ten other tests


@pytest.mark.rounds
@pytest.mark.parametrize(("prefix", "throttle"), CASES.values(), ids=CASES)
def test_half_the_bytes_at_most(
    models: dict[str, Path],
    devices: Devices,
    soak_rounds: int,
    prefix: int,
    throttle: list[dict[str, object]],
) -> None:
    """DRAM holds two short contexts, HBM as much as runs at a time; the store holds all of them."""
    contexts, questions = (20, 30) if soak_rounds >= 10 else (8, 8)
    prefixes = prompts([prefix] * contexts, seed=41)
    endings = prompts([QUESTION] * questions, seed=42)
    batch = [start + ending for start in prefixes for ending in endings]
    random.Random(43).shuffle(batch)
    order = arranged(batch)
    io = {"staging": "4MiB", "throttle": throttle}
    capacity = f"{96 * prefix // 512}MiB"
    options = reuse_mode(devices(2, capacity), dram=SMALL_DRAM, io=io)
    kv_tokens = SEATS * (prefix + 2 * QUESTION)
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=kv_tokens,
        max_num_seqs=SEATS,
        max_model_len=2 * prefix,
    ) as engine:
        engine.answers(prefixes, max_tokens=1)
        engine.settle()

        def measured(prompts_in_order: list[Tokens]) -> tuple[list[tuple[int, ...]], float, float]:
            before, began = bytes_read(engine), time.monotonic()
            tokens = [answer.tokens for answer in engine.answers(prompts_in_order, max_tokens=4)]
            engine.settle()
            return tokens, bytes_read(engine) - before, time.monotonic() - began

        plain, plain_bytes, plain_s = measured(batch)
        ordered, ordered_bytes, ordered_s = measured([batch[i] for i in order])
    assert [plain[i] for i in order] == ordered
    assert plain_bytes >= 2 * ordered_bytes
    print(
        f"submission order: {plain_bytes / 2**20:.1f} MiB read, {plain_s:.1f} s; "
        f"by prefix: {ordered_bytes / 2**20:.1f} MiB, {ordered_s:.1f} s"
    )
