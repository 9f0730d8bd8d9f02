"""Workloads from prompts, lengths and counts of a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.profiling.sizing.workload import (
    Counted,
    Workload,
    of_counted,
    of_lengths,
    of_prompts,
)


def batch_file(path: Path, *bodies: object) -> Path:
    file = path / "batch.jsonl"
    lines = [{"custom_id": str(n), "url": "/v1", "body": body} for n, body in enumerate(bodies)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


def chat(text: str, **other: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **other}


def test_prompts_are_counted_with_what_they_share(tmp_path: Path) -> None:
    common = "x" * 4000
    file = batch_file(
        tmp_path,
        chat(f"{common}{'a' * 400}", max_tokens=100),
        {"prompt": f"{common}{'b' * 400}", "max_tokens": 300},
        chat("other", max_completion_tokens=200),
    )
    found = of_prompts(file, at_a_time=8, tokenize=None)
    assert found.prompt == pytest.approx((1100 + 1100 + 1) / 3)
    assert found.output == 200
    assert found.longest == 1400
    assert found.at_a_time == 3, "no more than there are"
    assert found.found == pytest.approx(4000 / 8805)
    assert "4 bytes" in found.notes[0]
    words = of_prompts(file, at_a_time=1, tokenize=lambda text: list(range(len(text) // 100)))
    assert words.prompt == pytest.approx((44 + 44 + 1) / 3, abs=1)
    assert words.notes == ()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1: no JSON"),
        ("7", "line 1: body: missing"),
        ('{"body": {}}', "line 1: body.messages: missing"),
        ('{"body": {"prompt": "a", "max_tokens": 0}}', "line 1: body.max_tokens: got 0"),
        ('{"body": {"messages": [{"content": 7}]}}', "body.messages[0].content: got 7"),
        ("", "no request"),
    ],
)
def test_nonsense_of_prompts_names_line_and_field(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "batch.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError) as found:
        of_prompts(file, at_a_time=1, tokenize=None)
    assert told in str(found.value)


def test_lengths_are_a_number_or_two() -> None:
    found = of_lengths("1000-3000", "64", at_a_time=2, found=0.25)
    assert (found.prompt, found.output, found.longest) == (2000, 64, 3064)
    assert found.new_tokens == 2000 * 0.75 + 64
    for text in ("", "a", "3-1", "0", "1-2-3", "-5", "999999999999"):
        with pytest.raises(ConfigError, match="--prompt: got"):
            of_lengths(text, "1", at_a_time=1, found=0)


def test_a_server_tells_means_and_the_longest() -> None:
    counted = Counted(10, 5000, 10, 1000, 2000, 200, 5000, 4000, 3)
    found = of_counted(counted, "url", at_a_time=None)
    assert (found.prompt, found.output, found.longest) == (500, 100, 2200)
    assert (found.at_a_time, found.found) == (3, 0.8)
    with pytest.raises(ConfigError, match="no request has ended"):
        of_counted(Counted(0, 0, 0, 0, 0, 0, 0, 0, 0), "url", at_a_time=None)


def test_sizes_out_of_range_are_named() -> None:
    for field, value in (("prompt", 0.0), ("found", 1.5), ("at_a_time", 0)):
        sizes = {"prompt": 1.0, "output": 1.0, "longest": 2, "at_a_time": 1, "found": 0.0}
        with pytest.raises(ConfigError, match=f"workload: {field}: got"):
            Workload(**{**sizes, field: value})  # type: ignore[arg-type]  # wrong on purpose


def test_a_prompt_with_a_k_is_a_context_with_its_answer() -> None:
    found = of_lengths("128K", "512", at_a_time=1, found=0)
    assert (found.prompt, found.longest) == (131_072 - 512, 131_072)
    found = of_lengths("1024-64k", "16-2K", at_a_time=1, found=0)
    assert found.longest == 65_536
    assert found.prompt == (1024 + 65_536 - 2048) / 2
    with pytest.raises(ConfigError, match="--prompt: got '1K'; 1 to"):
        of_lengths("1K", "1K", at_a_time=1, found=0)
    with pytest.raises(ConfigError, match="--prompt: got '1M'; tokens, such as"):
        of_lengths("1M", "512", at_a_time=1, found=0)
