"""Decoding without vLLM, with contexts attended to by the HLS kernels: as without a device.

The models compute in 16 bit, where two orders of summation are a step of rounding apart; the tokens
that are decoded from are the same in both.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.io import FaultConfig
from vllm_ssdkv.config.io_engine import FaultRule
from vllm_ssdkv.config.offload import OffloadConfig, OffloadFault, OffloadThrottle
from vllm_ssdkv.config.selectors import SelectorName
from vllm_ssdkv.offload.offloader import Offloader
from vllm_ssdkv.profiling.decode_harness.decoder import PagedDecoder
from vllm_ssdkv.profiling.decode_harness.models import make_model, small_config
from vllm_ssdkv.profiling.decode_harness.tokens import ROOM, config_of, prompts
from vllm_ssdkv.store.io.testing.faulty import FaultyEngine
from vllm_ssdkv.store.memory.arena import BorrowedArena
from vllm_ssdkv.store.read.peer_path import ReadPath

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
    fpga: OffloadConfig | None,
    corrupt: float = 0.0,
) -> tuple[torch.Tensor, Counters]:
    """Logits [steps, requests, vocabulary] after tokens that do not depend on them. ``corrupt``:
    share of the reads into the FPGA's memory that bring wrong bytes."""
    model: Any = make_model(small_config(family, head_size=64), torch.device("cpu"), dtype)
    config = config.model_copy(update={"offload": fpga})
    asked, names, seen = prompts(model.config.vocab_size), ["a", "b"], []
    with PagedDecoder(model, config, ROOM, directory) as decoder:
        if corrupt:
            spoil(decoder.worker.page_mode.offloader, corrupt)
        seen.append(torch.stack([decoder.prefill(*one) for one in zip(names, asked, strict=True)]))
        for step in range(COUNT):
            seen.append(decoder.step(names, torch.tensor([step, 100 + step])))
        for name in names:
            decoder.forget(name)
        counters = decoder.worker.counters
    return torch.stack(seen).float(), counters


def spoil(offloader: Offloader | None, share: float) -> None:
    """Have so many reads into the FPGA's memory bring wrong bytes."""
    assert offloader is not None
    device = offloader.device
    peer = device.peer
    assert peer is not None
    memory = BorrowedArena(np.ctypeslib.as_array(_bytes_at(peer)))
    rule = FaultRule(kind="corrupt", probability=share, seed=3)
    engine = FaultyEngine(peer.files.engine, 1, memory, [rule])
    device.peer = replace(peer, files=replace(peer.files, engine=engine))


def _bytes_at(peer: ReadPath) -> ctypes.Array[ctypes.c_uint8]:
    nbytes = peer.staging.pieces * peer.files.geometry.layer_bytes
    return (ctypes.c_uint8 * nbytes).from_address(peer.address)


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
    wanted, without = decoded(tmp_path / "host", family, dtype, config, fpga=None)
    found, counters = decoded(tmp_path / "fpga", family, dtype, config, fpga=FPGA)
    assert (found - wanted).abs().max() <= NEAR[dtype]
    assert without.total("offload_kernel_calls", kernel="attend") == 0
    assert counters.total("offload_kernel_calls", kernel="attend") >= COUNT * LAYERS
    chosen = counters.total("offload_kernel_calls", kernel="sparf")
    assert chosen == (COUNT * LAYERS if selector == "sparf" else 0)
    for cause in ("error", "answer", "deadline"):
        assert counters.total("offload_failures", cause=cause) == 0


@pytest.mark.parametrize("corrupt", [0.0, 0.3])
def test_pages_that_drives_write_into_the_fpgas_memory(corrupt: float, tmp_path: Path) -> None:
    """The kernel's checksums are compared before anything is folded; wrong pages come again through
    the host's memory, and no drive is charged with what happened on the way."""
    config = config_of("exact").model_copy(update={"dram_gib": 5 / 1024})
    small = "llama", torch.float16, config
    wanted, without = decoded(tmp_path / "host", *small, fpga=FPGA)
    peer = FPGA.model_copy(update={"peer": True})
    found, counters = decoded(tmp_path / "peer", *small, fpga=peer, corrupt=corrupt)
    assert (found - wanted).abs().max() <= NEAR[torch.float16]
    assert without.total("offload_peer_pages", found="right") == 0
    assert counters.total("offload_peer_pages", found="right") > 0
    assert (counters.total("offload_peer_pages", found="wrong") > 0) == (corrupt > 0)
    for cause in ("error", "answer", "deadline"):
        assert counters.total("offload_failures", cause=cause) == 0
    assert counters.total("checksum_failures") == 0
    assert counters.total("slots_dropped", cause="read_error") == 0


def test_an_fpga_that_fails_amid_its_own_reads(tmp_path: Path) -> None:
    """Who attends in its place reads all of it through the host's memory, and checks it."""
    config = config_of("exact").model_copy(update={"dram_gib": 5 / 1024})
    wanted, _ = decoded(tmp_path / "host", "llama", torch.float16, config, fpga=None)
    fault = OffloadFault(kind="error", after=3)
    failing = FPGA.model_copy(update={"peer": True, "fault": fault})
    found, counters = decoded(tmp_path / "peer", "llama", torch.float16, config, fpga=failing)
    assert (found - wanted).abs().max() <= NEAR[torch.float16]
    assert counters.total("offload_failures", cause="error") > 0
    assert counters.total("offload_peer_pages", found="right") > 0


def test_drives_that_cannot_write_into_the_fpgas_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found out at start: the drive is not charged, and pages come through the host's memory."""
    config = config_of("exact")
    fault = FaultConfig(kind="eio", op="read")
    io = config.io.model_copy(update={"faults": (fault,)})
    peer = FPGA.model_copy(update={"peer": True})
    config = config.model_copy(update={"io": io, "offload": peer})
    model: Any = make_model(small_config("llama", head_size=64), torch.device("cpu"), torch.float16)
    with caplog.at_level("WARNING"), PagedDecoder(model, config, ROOM, tmp_path / "s") as decoder:
        assert decoder.worker.page_mode.offloader is not None
        assert decoder.worker.page_mode.offloader.device.peer is None
        assert not decoder.opened.files.health.quarantined
    assert "cannot be read into memory of another device: Input/output error" in caplog.text


def test_drives_of_a_paper_with_kernels_of_an_fpga(tmp_path: Path) -> None:
    """The twin has the kernels attend to each drive's part, and merges the states."""
    config = config_of("sparf", budget=0.5)
    wanted, _ = decoded(tmp_path / "host", "llama", torch.float16, config, fpga=FPGA)
    throttle = OffloadThrottle(profile="smartssd", drives=2)
    drives = FPGA.model_copy(update={"throttle": throttle})
    found, counters = decoded(tmp_path / "drives", "llama", torch.float16, config, fpga=drives)
    assert (found - wanted).abs().max() <= NEAR[torch.float16]
    assert counters.total("offload_kernel_calls", kernel="attend") > COUNT * LAYERS
