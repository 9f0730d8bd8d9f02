"""Models whose logits are no plain products: soft caps (Gemma 2) and ALiBi (Bloom).

``test_exact.py`` has them with whole contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT, kv_tokens, page_mode
from tests.kit.engine import Engine


@pytest.mark.parametrize("model", ["gemma2", "bloom"])
def test_pages_that_are_listed_are_attended_to_by_the_models_logits(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    model: str,
) -> None:
    """``window`` may choose everything, and is then exact."""
    wanted = stock.answers(model, SHORT)
    sparse: dict[str, object] = {"exact_below": 0, "budget": 1, "token_order": "position"}
    sparse |= {"page_cache": "1MiB", "summaries": "2MiB"}
    options = page_mode(devices(2), dram="10MiB", selector="window", sparse=sparse)
    with Engine(
        models[model], ssdkv=options, kv_tokens=kv_tokens(128, 256), max_num_batched_tokens=256
    ) as engine:
        got = engine.answers(SHORT)
        assert engine.ssdkv("sparse_selections") > 0
    assert [a.tokens for a in got] == [a.tokens for a in wanted]
