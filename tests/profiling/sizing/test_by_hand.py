"""Plans against arithmetic by hand: weights, KV of a request, requests that fit, a decode step.

By hand, from the shape that a model's authors publish and a GPU's data sheet:

- weights: parameters in layers x bytes of one, and words x width x 2 bytes for the embedding and,
  where it is another matrix, the last projection. Llama-3.1-8B: 32 x (4096 x 128 x 2 x (32 + 8) +
  3 x 4096 x 14336) x 2 + 2 x 128256 x 4096 x 2 = 16.06 GB.
- KV of a request: layers x 2 x KV heads x channels x bytes x tokens of prompt and answer; of a
  layer with a window no more tokens than that.
- requests that fit: (0.9 x memory - weights) / that, rounded down. DeepSeek-V3 on 8 H200 (each has
  the latents of all heads): (0.9 x 8 x 141 - 672.77) GB / (8 x 8.58 GiB) = 4.6.
- step: (weights in layers, of b requests the experts that are likely 1 - (1 - k / E)^b of all, the
  last projection, and KV up to the middle of the answers) / (0.896 x bandwidth), and 3 ms. Of
  DeepSeek-V3: (15.3 + 0.1193 x 653.9 + 1.85 + 8 x 4 x 9.229) GB / (0.896 x 8 x 4800) = 11.35 ms.

Near storage, 8 requests of Llama-3.1-8B on an A100 with 4 PM9A3: 8 x (33,024 - 1,024) tokens x 128
KiB = 33.55 GB lie outside of HBM, and a step has 13.9 ms of weights and vLLM's own. Then, in ms:

- host, all in 64 GiB of DRAM: cores at 0.66 x 200 = 132 GB/s and the link at 0.85 x 32 = 27.2 end
  together: 33.55 GB / 159.2 GB/s = 210.7; 32 layers wait 85 us: 2.7.
- host, 4 GiB: frames hold 4.21 of 34.62 GB, so drives read 29.34 GB / (0.95 x 27.6 GB/s) = 1119.1;
  what the GPU attends to is read ahead, which hides the weights, and 2.7 remains.
- FPGA, all in DRAM: likewise 33.55 GB / (11.6 + 27.2 GB/s) = 864.7, and 2.7.
- nodes without attention: the engine's port is half of theirs, so 29.34 GB / 3.125 GB/s = 9389.3;
  the first of 32 layers is read at 6.25 GB/s before it crosses: 146.7.
- nodes with attention: 29.34 GB / (2 x 2 x 0.95 x 0.97 x 6.9 GB/s) = 1153.6; 32 x 0.412 = 13.2.
- X, 4 requests of OPT-13B (4 x 15,616 tokens x 800 KiB = 51.17 GB outside of HBM) on an H100:
  frames hold 17.08 of 54.53 GB, so 0.666 is read; storage brings 26.22 / 0.666 = 39.4 GB/s, the
  link 27.2. The least share whose storage and link are alike is 2 x 27.2 / (39.4 + 27.2) = 0.817,
  in 64ths 53: (1 - 53/128) x 51.17 GB / 39.4 GB/s = 761.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.sizing.forecast import Choice, Sizing, hit_s
from vllm_ssdkv.profiling.sizing.machine import MachineFile, checked, machine_of
from vllm_ssdkv.profiling.sizing.plan import Wish, best_of, choices
from vllm_ssdkv.profiling.sizing.workload import of_lengths

HAND: list[tuple[str, dict[str, Any], str, int, str, float, float, int, float]] = [
    ("llama-3.1-8b", {}, "a100-40", 1, "16384", 16.06, 2.0625, 9, 27.87),
    ("llama-3.1-8b", {}, "h100-80", 1, "128K", 16.06, 16.00, 3, 25.14),
    ("llama-3.1-70b", {"weights": "fp8"}, "h100-80", 2, "64K", 72.65, 20.00, 3, 25.44),
    ("qwen3-32b", {}, "h100-80", 2, "32768", 65.52, 8.12, 8, 25.19),
    ("qwen3-32b", {"kv": "fp8"}, "h100-80", 2, "32768", 65.52, 4.06, 17, 25.91),
    ("qwen3-30b-a3b", {}, "h200", 1, "128K", 61.04, 12.00, 5, 22.24),
    ("gpt-oss-120b", {}, "h100-80", 1, "128K", 65.14, 4.50, 1, 6.27),
    ("gemma-3-27b", {}, "h100-80", 1, "64K", 54.02, 5.41, 3, 26.77),
    ("deepseek-v3", {}, "h200", 8, "128K", 672.77, 8.58, 4, 14.35),
    ("glm-4.5-air", {}, "h100-80", 4, "64K", 213.66, 11.50, 6, 15.57),
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


DRIVES = [{"kind": "pm9a3", "count": 4, "capacity_bytes": "3.84TB"}]
HOST = {"dram_bandwidth": 200e9}
CARD = {"fpga": {"xclbin": "/kernels.xclbin", "attend_bandwidth": 11.6e9}}
NODES: dict[str, Any] = {
    "addresses": ["tcp://10.0.0.1:8470", "tcp://10.0.0.2:8470"],
    "network": "ethernet-25g",
    "state_dir": "/srv/kv",
    "memory_bandwidth": 50e9,
}
NEAR: list[tuple[str, str, str, dict[str, Any], Choice, float]] = [
    ("llama-3.1-8b", "a100-40", "64GiB", HOST, Choice("page", batch=8, offload="host"), 227.3),
    ("llama-3.1-8b", "a100-40", "4GiB", HOST, Choice("page", batch=8, offload="host"), 1121.8),
    ("llama-3.1-8b", "a100-40", "64GiB", CARD, Choice("page", batch=8, offload="fpga"), 881.3),
    ("llama-3.1-8b", "a100-40", "4GiB", {"nodes": NODES}, Choice("page", batch=8), 9549.9),
    (
        *("llama-3.1-8b", "a100-40", "4GiB", {"nodes": NODES}),
        *(Choice("page", batch=8, offload="node"), 1180.7),
    ),
    ("opt-13b", "h100-80", "16GiB", HOST, Choice("page", batch=4, offload="host", x=True), 776.0),
]
"""Model, GPU, DRAM, who attends, the way; ms of a step."""


@pytest.mark.parametrize("row", NEAR, ids=lambda row: f"{row[0]}-{row[2]}-{row[4].text}")
def test_a_way_near_storage_by_hand(
    row: tuple[str, str, str, dict[str, Any], Choice, float],
) -> None:
    name, gpu, dram, more, way, step_ms = row
    given = {"gpu": gpu, "gpu_link": "pcie4-x16", "dram": dram, "drives": DRIVES, **more}
    on = machine_of(checked(MachineFile, given, "test"), "test")
    model = replace(find_model(name), positions=None)
    prompt = "16384" if name == "opt-13b" else "32768"
    sizing = Sizing(model, of_lengths(prompt, "512", at_a_time=way.batch, found=0), on)
    found = sizing.forecast(way)
    # With X, a layer's device begins only behind the projection of the layer before.
    assert 1000 * found.step_s == pytest.approx(step_ms, rel=0.03 if way.x else 0.01)
    # Drives read nothing of frames.
    assert (found.read_bytes_per_s == 0) == (dram == "64GiB")


def test_a_hit_from_nodes_by_hand() -> None:
    """16,384 tokens of 128 KiB at 3.125 GB/s: 687 ms; and of a node 0.657 ns a byte, and 2 ms."""
    given = {"gpu": "a100-40", "dram": "4GiB", "drives": DRIVES, "nodes": NODES}
    on = machine_of(checked(MachineFile, given, "test"), "test")
    work = of_lengths("16384", "512", at_a_time=1, found=1)
    found = hit_s(Sizing(find_model("llama-3.1-8b"), work, on), 16384)
    assert found == pytest.approx(0.687 + 0.657 * 2.147 + 0.002, rel=0.01)
