"""Rows of docs/models.md: of versions that are supported, and some of them run again."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ssdkv.cli.docs.models_page import models_page
from vllm_ssdkv.cli.doctor.check_software import VLLM_RANGE
from vllm_ssdkv.profiling.models.rows import MODES, NOT_RUN, REFUSED, Row, read_rows, write_rows
from vllm_ssdkv.profiling.models.trial import judged

ROWS = read_rows(Path(__file__).parents[3] / "docs/models/rows.jsonl")
RUN = [row for row in ROWS if row.result != NOT_RUN]
SEED = 45


def outcome(row: Row) -> tuple[str, ...]:
    """The number of tokens found may depend on a machine; a refusal's sentence does not."""
    detail = row.detail if row.result == REFUSED else ""
    return row.architecture, row.mode, row.result, detail


def test_every_row_is_of_a_version_that_is_supported() -> None:
    assert RUN
    for row in RUN:
        release = re.match(r"(\d+)\.(\d+)", row.vllm)
        assert release is not None, row
        assert VLLM_RANGE[0] <= (int(release[1]), int(release[2])) < VLLM_RANGE[1], row


def test_every_architecture_has_a_row_in_each_mode() -> None:
    names = {row.architecture for row in ROWS}
    assert len(names) >= 40
    pairs = [(row.architecture, row.mode) for row in ROWS]
    assert sorted(pairs) == sorted((name, mode) for name in names for mode in MODES)


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_rows_drawn_by_a_seed_come_out_again(tmp_path: Path) -> None:
    """Two architectures, and so four rows."""
    names = random.Random(SEED).sample(sorted({row.architecture for row in RUN}), 2)
    again = tmp_path / "rows.jsonl"
    command = [sys.executable, "-P", "-m", "vllm_ssdkv.profiling.models", str(again), *names]
    subprocess.run(command, check=True, timeout=1700)
    found = {outcome(row) for row in read_rows(again) if row.architecture in names}
    assert found == {outcome(row) for row in ROWS if row.architecture in names}
    assert len(found) == 4


@pytest.mark.parametrize(
    ("ours", "result"),
    [
        ({"first": [[1]], "again": [[1]], "cached": 3}, "served"),
        ({"first": [[2]], "again": [[1]], "cached": 3}, "failed"),
        ({"first": [[1]], "again": [[2]], "cached": 3}, "failed"),
        ({"error": "its process ended with status 1"}, "failed"),
        ({"error": "SSDKVConnector cannot start in mode 'page':\n  - no: leave it"}, "refused"),
    ],
)
def test_answers_are_judged_beside_stock_vllm(ours: dict[str, object], result: str) -> None:
    assert judged({"first": [[1]]}, ours)[0] == result


def test_the_last_row_of_a_model_counts(tmp_path: Path) -> None:
    old = Row("llama", "Llama", "page", "", "", NOT_RUN, "")
    new = Row("llama", "Llama", "page", "0.32.0", "2026-11-30", REFUSED, "no: leave it")
    path = tmp_path / "rows.jsonl"
    write_rows(path, [old, new])
    assert read_rows(path) == [new]
    line = "| llama | Llama | not run | refused: no: leave it | vLLM 0.32.0, 2026-11-30 |"
    assert line in models_page([new]).splitlines()
    assert models_page([old]).endswith("\n\n`make models` has not reached these yet: Llama.\n")
