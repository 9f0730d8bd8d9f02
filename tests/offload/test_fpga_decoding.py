"""Decoding without vLLM, with contexts attended to by the HLS kernels: as without a device.

The models compute in 16 bit, where two orders of summation are a step of rounding apart; the tokens
that are decoded from are the same in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SelectorName, SSDKVConfig
from vllm_ssdkv.config.offload import OffloadConfig
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder
from vllm_ssdkv.profiling.decode_harness.models import make_model, small_config
from vllm_ssdkv.profiling.decode_harness.tokens import ROOM, config_of, prompts

FPGA = OffloadConfig(kind="fpga", backend="csim", share=1.0)
COUNT, LAYERS = 8, 2
NEAR = {torch.float16: 6 / 128, torch.bfloat16: 6 / 16}
"""Six steps between neighbouring numbers from 8 to 16, which is what logits reach; up to three
were seen."""


def decoded(
    directory: Path,
    family: str,
    dtype: torch.dtype,
    config: SSDKVConfig,
    *,
    fpga: bool,
) -> tuple[torch.Tensor, Counters]:
    """Logits [steps, requests, vocabulary] after tokens that do not depend on them."""
    model: Any = make_model(small_config(family, head_size=64), torch.device("cpu"), dtype)
    config = config.model_copy(update={"offload": FPGA if fpga else None})
    asked, names, seen = prompts(model.config.vocab_size), ["a", "b"], []
    with PagedDecoder(model, config, ROOM, directory) as decoder:
        seen.append(torch.stack([decoder.prefill(*one) for one in zip(names, asked, strict=True)]))
        for step in range(COUNT):
            seen.append(decoder.step(names, torch.tensor([step, 100 + step])))
        for name in names:
            decoder.forget(name)
        counters = decoder.worker.counters
    return torch.stack(seen).float(), counters


@pytest.mark.parametrize(
    ("family", "dtype", "selector", "granularity"),
    [
        ("llama", torch.float16, "exact", "page"),
        ("gpt_neox", torch.bfloat16, "exact", "page"),
        ("llama", torch.float16, "sparf", "page"),
        ("llama", torch.bfloat16, "sparf", "token"),
        ("qwen3", torch.float16, "bounds", "page"),
    ],
)
def test_the_same_comes_out(
    family: str,
    dtype: torch.dtype,
    selector: SelectorName,
    granularity: Literal["page", "token"],
    tmp_path: Path,
) -> None:
    config = config_of(selector, budget=0.25)
    sparse = config.sparse.model_copy(update={"granularity": granularity})
    config = config.model_copy(update={"sparse": sparse})
    wanted, without = decoded(tmp_path / "host", family, dtype, config, fpga=False)
    found, counters = decoded(tmp_path / "fpga", family, dtype, config, fpga=True)
    assert (found - wanted).abs().max() <= NEAR[dtype]
    assert without.total("offload_kernel_calls", kernel="attend") == 0
    assert counters.total("offload_kernel_calls", kernel="attend") >= COUNT * LAYERS
    chosen = counters.total("offload_kernel_calls", kernel="sparf")
    assert chosen == (COUNT * LAYERS if selector == "sparf" else 0)
    for cause in ("error", "answer", "deadline"):
        assert counters.total("offload_failures", cause=cause) == 0
