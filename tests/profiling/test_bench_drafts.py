"""The bench of drafts in page mode, on a short context."""

from pathlib import Path

import pytest
from rich.console import Console

from vllm_ssdkv.profiling.bench_drafts import _table, measure


@pytest.mark.engine
@pytest.mark.soak  # `make test` has drafts in page mode in e2e/test_speculative.py
def test_a_step_gives_several_tokens_for_one_walk(tmp_path: Path) -> None:
    (row,) = measure(tmp_path, [1024], [3], 1, Console(stderr=True))
    assert row["context"] == 1024
    assert 1 < row["tokens_per_step"] <= 4
    assert list(tmp_path.iterdir()) == []
    console = Console(record=True, width=100)
    none = {**row, "drafts": 0, "tokens_per_s": row["tokens_per_s"] / 2}
    console.print(_table([row, none]))
    assert "2.00x" in console.export_text()
