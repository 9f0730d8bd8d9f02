"""Delayed write-back (HILOS, InstInfer): decoded tokens wait in the window until a block is full.

A block of one token is an immediate write. Whatever the interval, tokens are those of
transformers' own cache, a device attends or none, and between two full blocks nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_ssdkv.config.offload import OffloadConfig
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder, Room
from vllm_ssdkv.profiling.decode_harness.models import make_model, small_config
from vllm_ssdkv.profiling.decode_harness.tokens import config_of, own_tokens, prompts

INTERVALS = 1, 16, 64
STEPS = 70
"""More than the longest interval."""

WINDOW = 64
HEAD_SIZE = 16
HOST = OffloadConfig(threads=1, share=1.0)
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:  # noqa: ANN401 - transformers' model
    return make_model(
        small_config("llama", head_size=HEAD_SIZE), torch.device("cpu"), torch.float32
    )


@pytest.fixture(scope="module")
def immediate(
    model: Any,  # noqa: ANN401
    tmp_path_factory: pytest.TempPathFactory,
) -> torch.Tensor:
    """Logits where each token is written by the step that computes it."""
    return decoded(model, tmp_path_factory.mktemp("immediate"), 1, None)[1]


def decoded(
    model: Any,  # noqa: ANN401
    directory: Path,
    interval: int,
    offload: OffloadConfig | None,
) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of each request and logits [steps, requests, vocabulary]. After each step every full
    block is written, and nothing else."""
    update = {"offload": offload, "hbm_window_tokens": WINDOW}
    config = config_of("exact").model_copy(update=update)
    names, asked = ["a", "b"], prompts(model.config.vocab_size)
    seen = []
    with PagedDecoder(model, config, Room(2, 512, interval, chunk=64), directory / "s") as decoder:
        counters, slot_bytes = decoder.worker.counters, decoder.layout.geometry.slot_bytes
        (path,) = map(str, decoder.opened.files.health.paths)

        def count() -> None:
            assert decoder.drain(PATIENCE_S)
            blocks = sum(decoder.tokens(name) // interval for name in names)
            assert counters.total("bytes_written", device=path) == blocks * slot_bytes

        logits = torch.stack([decoder.prefill(*pair) for pair in zip(names, asked, strict=True)])
        for _ in range(STEPS):
            count()
            seen.append(logits)
            logits = decoder.step(names, logits.argmax(-1))
        count()
        if offload is not None:
            assert counters.total("offload_steps", by="device") >= STEPS
    logits = torch.stack(seen)
    return logits.argmax(-1).T.tolist(), logits


@pytest.mark.parametrize("offload", [None, HOST], ids=["step", "host"])
@pytest.mark.parametrize("interval", INTERVALS)
def test_no_interval_changes_a_token(
    interval: int,
    offload: OffloadConfig | None,
    model: Any,  # noqa: ANN401
    immediate: torch.Tensor,
    tmp_path: Path,
) -> None:
    tokens, logits = decoded(model, tmp_path, interval, offload)
    asked = prompts(model.config.vocab_size)
    assert tokens == [own_tokens(model, ids, STEPS) for ids in asked]
    assert torch.allclose(logits, immediate, atol=2e-5)
