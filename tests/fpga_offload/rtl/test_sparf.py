"""The RTL's SparF, simulated: it chooses what the HLS kernel and the product's selector choose.

Token by token and page by page; its masses and states are theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fpga_offload.needs import build_shape, needs_rtlsim
from tests.fpga_offload.rtl.contexts import SparfCall, far_apart, make_sparf
from tests.fpga_offload.sparf_problems import problems, same_as_sparq, same_choice, tied
from tests.sparse.contexts import Contexts
from vllm_ssdkv.base.errors import FpgaLimitError, FpgaListError
from vllm_ssdkv.fpga_offload.backend import Backend
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.fpga_offload.description import GROUPS, HEAD_SIZES, KernelShape
from vllm_ssdkv.fpga_offload.rtlsim import RtlsimBackend
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.sparse.protocol import Budget
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector

NEEDS = needs_rtlsim(64, 2)
SHAPES = [
    pytest.param(KernelShape(64, 2, dtype), id=dtype, marks=NEEDS)
    for dtype in ("float16", "bfloat16")
]
HALF = pytest.param(KernelShape(64, 2, "float16"), marks=NEEDS)
CONTEXTS = ((3, 5, 20), (0, 17, 0), (1, 33, 64), (6, 1, 7), (2, 16, 0))
PAGES = ((3, 5, 4), (0, 17, 0), (1, 33, 9), (6, 1, 1), (2, 16, 0))


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[RtlsimBackend]:
    made = RtlsimBackend(request.param)
    yield made
    made.close(1.0)


@contextmanager
def stalled(shape: KernelShape) -> Iterator[Backend]:
    """The simulated kernels of a shape, with buses that are held back."""
    made = RtlsimBackend(shape)
    made.set_memory(seed=shape.group, stalls=0.15, latency=20)
    yield made
    assert made.close(1.0)


def same(backend: RtlsimBackend, call: SparfCall) -> None:
    """Masks and counts are equal, masses and partials are close."""
    oracle = CsimBackend(backend.shape)
    wanted, found = oracle.sparf(call.work), backend.sparf(call.work)
    assert oracle.close(1.0)
    np.testing.assert_array_equal(found.masks, wanted.masks)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.pages, wanted.pages)
    np.testing.assert_allclose(found.alpha, wanted.alpha, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.lse, wanted.lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.window_mass, wanted.window_mass, rtol=1e-5, atol=1e-6)
    if call.work.attend:
        assert found.partials is not None
        assert wanted.partials is not None
        assert far_apart(found.partials, wanted.partials) < 1e-5


@NEEDS
@settings(deadline=None, max_examples=8)
@given(
    problem=problems(2, head_sizes=[64], groups=[2]),
    granularity=st.sampled_from(["token", "page"]),
    share=st.floats(0.01, 1),
    channels=st.integers(1, 64),
    sinks=st.integers(0, 40),
    rest=st.booleans(),
)
def test_the_choice_is_the_selectors(
    problem: Contexts,
    granularity: Literal["token", "page"],
    share: float,
    channels: int,
    sinks: int,
    rest: bool,
) -> None:
    kernels = CpuScoringKernels(1)
    budget = Budget(share=share)
    selector = SparfSelector(budget, channels, granularity, sinks, kernels, estimate_rest=rest)
    same_choice(problem, selector, stalled)


@NEEDS
@pytest.mark.parametrize("values", [1, 3])
def test_ties_go_as_the_selectors(values: int) -> None:
    """Few different tokens, and pages that are copies of few."""
    draw = np.random.default_rng(values)
    tokens = tied(draw.integers(0, values, 9 * 64))
    pages = tied(draw.integers(0, 5, (values, 16))[draw.integers(0, values, 9 * 4)].ravel())
    budget = Budget(tokens=100)
    same_choice(tokens, SparfSelector(budget, 8, "token", 0, CpuScoringKernels(1)), stalled)
    same_choice(pages, SparfSelector(budget, 8, "page", 0, CpuScoringKernels(1)), stalled)


@NEEDS
@settings(deadline=None, max_examples=4)
@given(
    problem=problems(2, head_sizes=[64], groups=[2]),
    share=st.floats(0.05, 1),
    channels=st.floats(0.05, 1),
)
def test_it_is_sparq(problem: Contexts, share: float, channels: float) -> None:
    """With the mean V, as published, in fp64."""
    same_as_sparq(problem, share, channels, stalled)


@pytest.mark.parametrize("backend", SHAPES, indirect=True)
@pytest.mark.parametrize("block_tokens", [16, 64, 144])
def test_the_choice_is_the_other_kernels(backend: RtlsimBackend, block_tokens: int) -> None:
    same(backend, make_sparf(backend.shape, CONTEXTS, block_tokens, 8, seed=block_tokens))


@pytest.mark.parametrize("backend", SHAPES, indirect=True)
@pytest.mark.parametrize(("block_tokens", "page_tokens"), [(16, 16), (64, 32), (144, 48)])
def test_pages_are_the_other_kernels(
    backend: RtlsimBackend, block_tokens: int, page_tokens: int
) -> None:
    call = make_sparf(
        backend.shape, PAGES, block_tokens, 8, seed=5, sinks=1, page_tokens=page_tokens, mean=True
    )
    same(backend, call)


@pytest.mark.parametrize("backend", [HALF], indirect=True)
@pytest.mark.parametrize("together", [1, 4, 64])
def test_neighbours_are_chosen_together(backend: RtlsimBackend, together: int) -> None:
    fewer = max(16, together)
    same(backend, make_sparf(backend.shape, CONTEXTS[::2], 32, fewer, seed=8, together=together))


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
@pytest.mark.parametrize("stalls", [0.2, 0.7])
def test_stalls_on_every_channel(backend: RtlsimBackend, stalls: float) -> None:
    """Blocks of 176 tokens: the last beats of their channels come in turns of their own."""
    backend.set_memory(seed=4, stalls=stalls, latency=30)
    same(backend, make_sparf(backend.shape, CONTEXTS, 32, 8, seed=4, mean=True))
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
@pytest.mark.parametrize("by_page", [False, True])
def test_a_long_window_without_a_context(backend: RtlsimBackend, by_page: bool) -> None:
    """The choice of no token is over long before the window's scores are there."""
    contexts = ((0, 600, 20), (2, 3, 5), (1, 600, 7))
    pages: dict[str, Any] = {"page_tokens": 16} if by_page else {}
    same(backend, make_sparf(backend.shape, contexts, 16, 4, seed=4, **pages))


@pytest.mark.parametrize("backend", [HALF], indirect=True)
def test_what_it_does_not_know_is_refused(backend: RtlsimBackend) -> None:
    call = make_sparf(backend.shape, ((2, 3, 5),), 16, 4, seed=7, attend=False)
    for changes, name in (
        ({"channel_group": 3}, "channel_group"),
        ({"channel_group": 128}, "channel_group"),
        ({"channel_group": 8}, "keep_channels"),
        ({"by_page": True, "page_tokens": 24}, "page_tokens"),
        ({"by_page": True, "page_tokens": 32}, "page_tokens"),
        ({"by_page": True, "page_tokens": 0}, "page_tokens"),
        ({"window": True}, "flags"),
        ({"keep_channels": 0}, "keep_channels"),
        ({"block_tokens": 24}, "block_tokens"),
    ):
        changed: dict[str, Any] = dict(changes)
        with pytest.raises(FpgaListError, match=f"argument {name} is out of range"):
            backend.sparf(replace(call.work, **changed))
    long = replace(call.work, block_tokens=65536, channels=call.work.channels, by_page=False)
    with pytest.raises((FpgaLimitError, FpgaListError), match="job 0"):
        backend.sparf(long)


@pytest.mark.soak
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_shape(head_size: int, group: int) -> None:
    build_shape(f"{head_size}:{group}:sparf")
    for dtype in ("float16", "bfloat16"):
        fuzz(RtlsimBackend(KernelShape(head_size, group, dtype)))


def fuzz(backend: RtlsimBackend) -> None:
    """Tokens and pages, ties, groups of channels, the mean; with and without stalls.

    Of shapes with more than 256 channels each block of channels with two of the three kinds.
    """
    shape = backend.shape
    all_pairs = shape.head_size * shape.group <= 256
    sizes = ((16, 4, 1), (144, 24, 8), (64, shape.head_size, 2))
    for run, (seed, stalls) in enumerate(((3, 0.0), (4, 0.3))):
        backend.set_memory(seed=seed, stalls=stalls, latency=40)
        for place, (block_tokens, channels, together) in enumerate(sizes):
            plain: dict[str, Any] = {"seed": seed, "together": together, "sinks": 3}
            kinds = [
                (CONTEXTS, plain),
                (CONTEXTS, plain | {"mean": True, "levels": seed % 3}),
                (PAGES, plain | {"mean": True, "page_tokens": 16}),
            ]
            for contexts, options in kinds if all_pairs else [kinds[(place + run) % 3]]:
                same(backend, make_sparf(shape, contexts, block_tokens, channels, **options))
    backend.close(1.0)
