"""The RTL's SparF, simulated: what it chooses is what the HLS kernel chooses, token by token.

That kernel's choice is the product's own selector's: tests/fpga_offload/test_csim_sparf.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.fpga_offload.needs import needs_rtlsim
from tests.fpga_offload.rtl.contexts import SparfCall, far_apart, make_sparf
from vllm_ssdkv.base.errors import FpgaLimitError, FpgaListError
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.fpga_offload.description import KernelShape
from vllm_ssdkv.fpga_offload.rtlsim import RtlsimBackend

SHAPES = [
    pytest.param(KernelShape(64, 2, dtype), id=dtype, marks=needs_rtlsim(64, 2))
    for dtype in ("float16", "bfloat16")
]
HALF = pytest.param(KernelShape(64, 2, "float16"), marks=needs_rtlsim(64, 2))
CONTEXTS = ((3, 5, 20), (0, 17, 0), (1, 33, 64), (6, 1, 7), (2, 16, 0))


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[RtlsimBackend]:
    made = RtlsimBackend(request.param)
    yield made
    made.close(1.0)


def same(backend: RtlsimBackend, call: SparfCall) -> None:
    """Masks and counts are equal, partials are close."""
    oracle = CsimBackend(backend.shape)
    wanted, found = oracle.sparf(call.work), backend.sparf(call.work)
    assert oracle.close(1.0)
    np.testing.assert_array_equal(found.masks, wanted.masks)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.pages, wanted.pages)
    assert np.isnan(found.alpha).all()
    assert np.isnan(found.lse).all()
    assert np.isnan(found.window_mass).all()
    if call.work.attend:
        assert found.partials is not None
        assert wanted.partials is not None
        assert far_apart(found.partials, wanted.partials) < 1e-5


@pytest.mark.parametrize("backend", SHAPES, indirect=True)
@pytest.mark.parametrize("block_tokens", [16, 64, 144])
def test_the_choice_is_the_other_kernels(backend: RtlsimBackend, block_tokens: int) -> None:
    same(backend, make_sparf(backend.shape, CONTEXTS, block_tokens, 8, seed=block_tokens))


@pytest.mark.parametrize("backend", SHAPES, indirect=True)
@pytest.mark.parametrize("levels", [1, 2])
def test_ties_go_by_place(backend: RtlsimBackend, levels: int) -> None:
    call = make_sparf(backend.shape, ((5, 3, 50), (4, 20, 9)), 64, 5, seed=levels, levels=levels)
    same(backend, call)


@pytest.mark.parametrize("backend", [HALF], indirect=True)
@pytest.mark.parametrize("channels", [1, 64])
def test_one_channel_and_all(backend: RtlsimBackend, channels: int) -> None:
    same(backend, make_sparf(backend.shape, ((3, 40, 30),), 64, channels, seed=3, sinks=5))


@pytest.mark.parametrize("backend", [HALF], indirect=True)
@pytest.mark.parametrize("stalls", [0.3, 0.8])
def test_stalls_on_every_channel(backend: RtlsimBackend, stalls: float) -> None:
    """Blocks of 176 tokens: the last beats of their channels come in turns of their own."""
    backend.set_memory(seed=4, stalls=stalls, latency=30)
    same(backend, make_sparf(backend.shape, CONTEXTS, 64, 16, seed=4))
    same(backend, make_sparf(backend.shape, ((3, 3, 186), (1, 3, 64)), 176, 8, seed=4, levels=2))


@pytest.mark.parametrize("backend", [HALF], indirect=True)
def test_the_choice_alone(backend: RtlsimBackend) -> None:
    same(backend, make_sparf(backend.shape, CONTEXTS, 32, 16, seed=5, attend=False))


@pytest.mark.parametrize("backend", [HALF], indirect=True)
@pytest.mark.parametrize(
    ("part", "field", "value", "text"),
    [
        ("jobs", "first_window", 1 << 30, "job 1 has entries beyond"),
        ("jobs", "first_channels", 9, "job 1 has entries beyond"),
        ("entries", "tokens", 17, "entry 1 has not 1 to 16 tokens"),
        ("entries", "address", 32, "entry 1 has an address"),
    ],
)
def test_a_broken_list_is_named_and_the_next_call_runs(
    backend: RtlsimBackend, part: str, field: str, value: int, text: str
) -> None:
    call = make_sparf(backend.shape, ((2, 3, 32), (2, 3, 5)), 16, 4, seed=6)
    array = getattr(call.work, part).copy()
    array[field][1] = value
    changes: dict[str, Any] = {part: array}
    with pytest.raises(FpgaListError, match=text):
        backend.sparf(replace(call.work, **changes))
    channels = call.work.channels.copy()
    channels[1] += np.uint64(16)
    with pytest.raises(FpgaListError, match="channel block 1 has an address"):
        backend.sparf(replace(call.work, channels=channels))
    same(backend, call)


@pytest.mark.parametrize("backend", [HALF], indirect=True)
def test_what_it_does_not_know_is_refused(backend: RtlsimBackend) -> None:
    call = make_sparf(backend.shape, ((2, 3, 5),), 16, 4, seed=7)
    for changes, name in (
        ({"by_page": True}, "flags"),
        ({"channel_group": 2}, "channel_group"),
        ({"keep_channels": 0}, "keep_channels"),
        ({"block_tokens": 24}, "block_tokens"),
    ):
        changed: dict[str, Any] = dict(changes)
        with pytest.raises(FpgaListError, match=f"argument {name} is out of range"):
            backend.sparf(replace(call.work, **changed))
    long = replace(call.work, block_tokens=65536, channels=call.work.channels, by_page=False)
    with pytest.raises((FpgaLimitError, FpgaListError), match="job 0"):
        backend.sparf(long)
