"""The HLS kernels on queries, keys and values of a trained model, recorded while it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.fpga_offload.problems import Doubles, Job, Problem
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.fpga_offload.description import PAGE_TOKENS, KernelShape

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "vllm_ssdkv" / "demo_model"
TOKENS = 1500
GROUP, HEAD_SIZE = 2, 64

Recorded = list[tuple[Doubles, Doubles, Doubles]]
"""Numbers by layer and KV head: queries [n, d] of the last token, keys and values [tokens, d]."""


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    found: Recorded = []

    def record(
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        **rest: float | None,
    ) -> tuple[torch.Tensor, None]:
        for head in range(k.shape[1]):
            queries = q[0, head * GROUP : (head + 1) * GROUP, -1]
            numbers = (one.double().numpy() for one in (queries, k[0, head], v[0, head]))
            found.append(tuple(numbers))  # type: ignore[arg-type]
        return sdpa_attention_forward(module, q, k, v, mask, **rest)

    AttentionInterface.register("ssdkv_record", record)
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.bfloat16, attn_implementation="ssdkv_record"
    )
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"][:TOKENS]
    with torch.no_grad():
        model(torch.tensor([ids]))
    assert len(found) == 6
    assert all(key.shape == (TOKENS, HEAD_SIZE) for _, key, _ in found)
    return found


def problem_of(recorded: Recorded, masks: list[int] | None = None) -> Problem:
    """All layers and KV heads as jobs of one call; the last page is partial."""
    pages = -(-TOKENS // PAGE_TOKENS)
    tokens = [PAGE_TOKENS] * (pages - 1) + [TOKENS - (pages - 1) * PAGE_TOKENS]
    sides: list[Iterator[Doubles]] = [iter([one[side] for one in recorded]) for side in (1, 2)]

    def numbers(side: int) -> Doubles:
        padded = np.zeros((pages * PAGE_TOKENS, HEAD_SIZE))
        padded[:TOKENS] = next(sides[side])
        return padded

    # The problem gives job i the queries at place 7 i + 3.
    queries = np.zeros((len(recorded), GROUP, HEAD_SIZE))
    for i, one in enumerate(recorded):
        queries[(7 * i + 3) % len(recorded)] = one[0]
    return Problem(
        KernelShape(HEAD_SIZE, GROUP, "bfloat16"),
        [Job(tokens, masks or ()) for _ in recorded],
        key=lambda *_: numbers(0),
        value=lambda *_: numbers(1),
        query=lambda *_: queries.reshape(-1, HEAD_SIZE),
    )


@pytest.mark.parametrize("masked", [False, True])
def test_recorded_numbers(recorded: Recorded, masked: bool) -> None:
    pages = -(-TOKENS // PAGE_TOKENS)
    draw = np.random.default_rng(0)
    masks = [int(one) for one in draw.integers(0, 1 << 16, pages)] if masked else None
    problem = problem_of(recorded, masks)
    backend = CsimBackend(problem.shape)
    assert max(problem.errors(backend.attend(problem.work))) < 1e-5
    assert backend.close(10)
