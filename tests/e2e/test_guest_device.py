"""A device from outside this package attends, with the real vLLM: the tokens of stock vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT, kv_tokens, page_mode
from tests.kit.engine import Engine

EXAMPLES = Path(__file__).parents[2] / "examples" / "guests"
WINDOW, CHUNK = 128, 256


def test_the_examples_device_attends(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    options = page_mode(
        devices(2), window=WINDOW, offload={"kind": "torch_device:TorchDevice", "share": 1.0}
    )
    wanted = [answer.tokens for answer in stock.answers("llama", SHORT)]
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=kv_tokens(WINDOW, CHUNK),
        max_num_batched_tokens=CHUNK,
    ) as engine:
        assert [answer.tokens for answer in engine.answers(SHORT)] == wanted
        assert engine.ssdkv("offload_tickets") > 0
        assert engine.ssdkv("offload_failures") == 0
