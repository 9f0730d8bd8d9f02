"""Plans against arithmetic by hand: weights, KV of a request, requests that fit, a decode step.

By hand, from the shape that a model's authors publish and a GPU's data sheet:

- weights: parameters in layers x bytes of one, and words x width x 2 bytes for the embedding and,
  where it is another matrix, the last projection. Llama-3.1-8B: 32 x (4096 x 128 x 2 x (32 + 8) +
  3 x 4096 x 14336) x 2 + 2 x 128256 x 4096 x 2 = 16.06 GB.
- KV of a request: layers x 2 x KV heads x channels x bytes x tokens of prompt and answer; of a
  layer with a window no more tokens than that.
- requests that fit: (0.9 x memory - weights) / that, rounded down.
- step: (weights in layers, of b requests the experts that are likely 1 - (1 - k / E)^b of all, the
  last projection, and KV up to the middle of the answers) / bandwidth, and 3 ms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.sizing.forecast import Sizing
from vllm_ssdkv.profiling.sizing.machine import MachineFile, checked, machine_of
from vllm_ssdkv.profiling.sizing.plan import Wish, best_of, choices
from vllm_ssdkv.profiling.sizing.workload import of_lengths

HAND: list[tuple[str, dict[str, Any], str, int, str, float, float, int, float]] = [
    ("llama-3.1-8b", {}, "a100-40", 1, "16384", 16.06, 2.0625, 9, 25.28),
    ("llama-3.1-8b", {}, "h100-80", 1, "128K", 16.06, 16.00, 3, 22.84),
    ("llama-3.1-70b", {"weights": "fp8"}, "h100-80", 2, "64K", 72.65, 20.00, 3, 23.11),
    ("qwen3-32b", {}, "h100-80", 2, "32768", 65.52, 8.12, 8, 22.88),
    ("qwen3-32b", {"kv": "fp8"}, "h100-80", 2, "32768", 65.52, 4.06, 17, 23.53),
    ("qwen3-30b-a3b", {}, "h200", 1, "128K", 61.04, 12.00, 5, 22.24),
    ("gpt-oss-120b", {}, "h100-80", 1, "128K", 65.14, 4.50, 1, 5.93),
    ("gemma-3-27b", {}, "h100-80", 1, "64K", 54.02, 5.41, 3, 24.30),
    ("deepseek-v3", {}, "h200", 8, "128K", 672.77, 8.58, 37, 26.52),
    ("glm-4.5-air", {}, "h100-80", 4, "64K", 213.66, 11.50, 6, 14.26),
]
"""Model, what differs, GPU, how many, prompt (the answer has 512 tokens); GB, GiB, requests, ms."""


@pytest.mark.parametrize("row", HAND, ids=lambda row: f"{row[0]}-{row[3]}x{row[2]}-{row[4]}")
def test_a_set_up_by_hand(
    row: tuple[str, dict[str, Any], str, int, str, float, float, int, float],
) -> None:
    name, other, gpu, gpus, prompt, weights, kv, requests, step_ms = row
    model = replace(find_model(name, other.get("weights")), kv_dtype=other.get("kv"))
    assert model.weight_bytes() / 1e9 == pytest.approx(weights, rel=0.001)
    work = of_lengths(prompt, "512", at_a_time=64, found=0)
    assert model.kv_bytes(work.longest) / 2**30 == pytest.approx(kv, rel=0.001)
    drives = [{"kind": "pm9a3", "count": 4, "capacity_bytes": "3.84TB"}]
    given = {"gpu": gpu, "gpus": gpus, "dram": "256GiB", "drives": drives}
    sizing = Sizing(model, work, machine_of(checked(MachineFile, given, "test"), "test"))
    (reuse,) = choices(64, [], 0.125)
    found = best_of(sizing, reuse, Wish())
    assert found.choice.batch == requests
    assert 1000 * found.step_s == pytest.approx(step_ms, rel=0.005)
