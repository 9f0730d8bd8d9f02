"""Laws of K in a few bits, and of the logits of pages from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.test_dense import ISAS, using
from tests.oracles import codes as oracle
from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.block_layout import DTYPES, BlockLayout
from vllm_ssdkv.kernels.paged import CpuPageKernels, PageKernels
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.profiling.dense_oracle import write_block
from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries
from vllm_ssdkv.sparse.selectors.adaptive import AdaptiveSelector
from vllm_ssdkv.sparse.selectors.codes import CodesSelector
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import code_bytes, with_summaries

NATIVE = CpuPageKernels(2)
BITS = (1, 2, 4)
RMS = {1: 0.76, 2: 0.37, 4: 0.10}
"""Error of a logit from normal numbers, of ``scale * |q| * |x| / sqrt(D)``."""


class Coded:
    """A row of complete blocks of one token in the window, as codes."""

    def __init__(
        self, kernels: PageKernels, layout: BlockLayout, keys: torch.Tensor, bits: int
    ) -> None:
        """``keys`` [blocks, block_tokens, kv_heads, head_size], of the layout's dtype."""
        self.layout, self.bits, self.keys = layout, bits, keys
        self.blocks = torch.full((len(keys), layout.block_bytes), 0xFF, dtype=torch.uint8)
        for block, key in zip(self.blocks, keys, strict=True):
            write_block(layout, block, key.float(), torch.full(key.shape, torch.nan))
        self.record = _kernels.code_bytes(layout.shape, bits)
        self.records = np.full((len(keys), layout.kv_heads, self.record), 0xA5, np.uint8)
        kernels.encode(addresses(self.blocks.numpy()), layout, self.places, bits)

    @property
    def places(self) -> NDArray[np.uint64]:
        return addresses(self.records)

    def context(self) -> ContextSummaries:
        def one(value: int) -> NDArray[np.int32]:
            return np.array([value], np.int32)

        places = self.places
        return ContextSummaries(self.layout, one(0), one(len(places)), one(1), codes_base=places)

    def logits(self, query: torch.Tensor, scale: float) -> NDArray[np.float32]:
        """Logits of pages, [q_heads, pages]."""
        kernels = CpuScoringKernels(2)
        found, _ = kernels.code_logits(query[None], self.context(), scale, self.bits)
        return found.reshape(len(query), -1)

    def decoded(self) -> NDArray[np.float64]:
        """Keys that the records stand for, [kv_heads, tokens, head_size]."""
        layout = self.layout
        found = [
            [
                oracle.Record.of(head, layout.block_tokens, layout.head_size, self.bits).keys(
                    self.bits
                )
                for head in block
            ]
            for block in self.records
        ]
        heads = range(layout.kv_heads)
        return np.stack([np.concatenate([block[head] for block in found]) for head in heads])


def addresses(memory: NDArray[np.uint8]) -> NDArray[np.uint64]:
    steps = np.arange(len(memory), dtype=np.uint64) * np.uint64(memory.strides[0])
    return np.uint64(memory.ctypes.data) + steps


def page_logits(
    query: NDArray[np.float64], keys: NDArray[np.float64], tokens: int, scale: float
) -> NDArray[np.float64]:
    """Log of the mean of exp over each page's tokens, [q_heads, pages], of one KV head each."""
    group = len(query) // len(keys)
    logits = scale * np.einsum("hgd,htd->hgt", query.reshape(len(keys), group, -1), keys)
    paged = logits.reshape(len(query), -1, tokens)
    top = paged.max(-1)
    return top + np.log(np.exp(paged - top[..., None]).mean(-1))


def table_error(query: NDArray[np.float64], weight: float, bits: int, scale: float) -> float:
    """The most that tables of 7 bits are wrong by, with keys of no larger weight."""
    turned = np.abs(query @ oracle.turned(query.shape[-1]).T)
    shared = 4 // bits
    padded = np.pad(turned, ((0, 0), (0, -turned.shape[-1] % shared)))
    halves = padded.reshape(len(query), -1, shared).sum(-1) * oracle.LEVELS[bits][-1]
    step = halves.max(-1) / 63.5
    return float((step / 2 * halves.shape[-1]).max() * weight * scale)


def heaviest(coded: Coded) -> float:
    """The largest weight of any key."""
    layout = coded.layout
    return max(
        float(
            oracle.Record.of(head, layout.block_tokens, layout.head_size, coded.bits).weights.max()
        )
        for block in coded.records
        for head in block
    )


layouts = st.builds(
    lambda page, groups, heads, size, dtype: BlockLayout.unpadded(
        page * groups, page, heads, size, dtype
    ),
    st.sampled_from([4, 8, 16, 32]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([8, 16, 32, 40, 64, 80, 96, 128, 256]),
    st.sampled_from(DTYPES),
)


def drawn(layout: BlockLayout, blocks: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    shape = (blocks, layout.block_tokens, layout.kv_heads, layout.head_size)
    offset = 3 * torch.randn(shape[2:], generator=random)
    return (torch.randn(shape, generator=random) + offset).to(layout.dtype)


@given(
    layout=layouts, bits=st.sampled_from(BITS), group=st.integers(1, 20), seed=st.integers(0, 99)
)
@settings(max_examples=40, deadline=None)
def test_logits_are_those_of_the_keys_that_records_stand_for(
    layout: BlockLayout, bits: int, group: int, seed: int
) -> None:
    coded = Coded(NATIVE, layout, drawn(layout, 3, seed), bits)
    query = torch.randn(
        (group * layout.kv_heads, layout.head_size), generator=torch.Generator().manual_seed(seed)
    )
    scale = layout.head_size**-0.5
    keys = coded.decoded()
    q = query.double().numpy()
    wanted = page_logits(q, keys, layout.page_tokens, scale)
    limit = table_error(q, heaviest(coded), bits, scale) + 1e-4
    found = {}
    for isa in ISAS:
        with using(isa):
            found[isa] = coded.logits(query, scale)
        np.testing.assert_allclose(found[isa], wanted, rtol=0, atol=limit)
        np.testing.assert_array_equal(found[isa], found[ISAS[0]])


@given(layout=layouts, bits=st.sampled_from(BITS), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_records_are_the_oracles_whatever_the_instruction_set(
    layout: BlockLayout, bits: int, seed: int
) -> None:
    keys = drawn(layout, 2, seed)
    made = {}
    for isa in ISAS:
        with using(isa):
            made[isa] = Coded(NATIVE, layout, keys, bits).records
        np.testing.assert_array_equal(made[isa], made[ISAS[0]])
    rows = keys.double().numpy() @ oracle.turned(layout.head_size).T
    for block, records in zip(rows, made[ISAS[0]], strict=True):
        for head, data in enumerate(records):
            mean = block[:, head].mean(0)
            step = np.abs(mean).max() / 127
            record = oracle.Record.of(data, layout.block_tokens, layout.head_size, bits)
            np.testing.assert_allclose(record.mean, mean, rtol=0, atol=0.501 * step + 1e-6)
            number, _, weight = oracle.quantised(block[:, head] - record.mean, bits)
            # A number on an edge may go either way, and takes its key's weight along.
            assert (number == record.numbers).mean() > 0.99
            same = (number == record.numbers).all(-1)
            np.testing.assert_allclose(record.weights[same], weight[same], rtol=2**-8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
def test_the_error_of_a_logit(size: int, bits: int) -> None:
    """Keys are normal numbers around their mean; the tables' error counts."""
    layout = BlockLayout.unpadded(128, 1, 1, size, torch.float32)
    keys = torch.randn((8, 128, 1, size), generator=torch.Generator().manual_seed(size))
    query = torch.randn((16, size), generator=torch.Generator().manual_seed(bits))
    coded = Coded(NATIVE, layout, keys, bits)
    scale = size**-0.5
    # A page of one token: its logit.
    found = coded.logits(query, scale)
    flat = keys.reshape(-1, size).double()
    wanted = scale * query.double() @ flat.T
    error = torch.from_numpy(found).double() - wanted
    unit = scale * query.double().norm(dim=1)[:, None] * flat.norm(dim=1) / size**0.5
    assert float((error / unit).square().mean().sqrt()) < 1.15 * RMS[bits]
    mean = float((error / unit).mean())
    assert abs(mean) < 5 * RMS[bits] / error.numel() ** 0.5 + 0.01


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_random_rotations_make_logits_right_on_average(size: int, bits: int) -> None:
    """Orthogonal ones; and two rounds of random signs, where one is wrong for keys with few large
    channels."""
    random = np.random.default_rng(size + bits)
    draws = 4000
    first, second = np.eye(size)[:2]
    normal = random.standard_normal((2, size))
    unit = size**-0.5
    for x, q in ((3 * first + second, second), (first, first), (normal[0], normal[1])):
        product = float(q @ x)
        size_of = np.linalg.norm(q) * np.linalg.norm(x) * unit
        two = estimate(*hadamard_rounds(random, draws, x, q), bits)
        basis = random.standard_normal((draws, 2, size))
        whole = estimate(*orthogonal(basis, x, q), bits)
        for estimates, bias in ((two, 0.1 * size_of), (whole, 0.0)):
            error = abs(estimates.mean() - product)
            assert error < 4 * estimates.std() / draws**0.5 + bias + 1e-9


def hadamard_rounds(
    random: np.random.Generator, draws: int, x: NDArray[np.float64], q: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A key and a query, each [draws, size], after two rounds of random signs."""
    matrix = oracle.hadamard(len(x))
    found = np.stack([np.broadcast_to(x, (draws, len(x))), np.broadcast_to(q, (draws, len(q)))])
    for _ in range(2):
        found = (found * random.choice([-1.0, 1.0], (1, draws, len(x)))) @ matrix.T
    return found[0], found[1]


def orthogonal(
    basis: NDArray[np.float64], x: NDArray[np.float64], q: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The same after a random rotation: two random vectors with their lengths and angle."""
    one = basis[:, 0] / np.linalg.norm(basis[:, 0], axis=-1, keepdims=True)
    other = basis[:, 1] - (basis[:, 1] * one).sum(-1, keepdims=True) * one
    other /= np.linalg.norm(other, axis=-1, keepdims=True)
    length = np.linalg.norm(x)
    along = float(q @ x) / length
    across = np.sqrt(max(0.0, float(q @ q) - along**2))
    return length * one, along * one + across * other


def estimate(y: NDArray[np.float64], q: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    _, code, weight = oracle.quantised(y, bits)
    found: NDArray[np.float64] = weight * (code * q).sum(-1)
    return found


def test_one_round_of_signs_would_not_do() -> None:
    """The reason for the second one: the law above notices."""
    size, x, q = 64, 3 * np.eye(64)[0] + np.eye(64)[1], np.eye(64)[1]
    random = np.random.default_rng(0)
    flips = random.choice([-1.0, 1.0], (2000, size))
    matrix = oracle.hadamard(size)
    found = estimate((x * flips) @ matrix.T, (q * flips) @ matrix.T, 2)
    assert abs(found.mean() - 1) > 0.4


@given(layout=layouts, bits=st.sampled_from(BITS), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_the_order_of_a_pages_tokens_does_not_matter(
    layout: BlockLayout, bits: int, seed: int
) -> None:
    keys = drawn(layout, 2, seed)
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(layout.page_tokens, generator=random)
    paged = keys.reshape(2, layout.groups, layout.page_tokens, *keys.shape[2:])
    query = torch.randn((layout.kv_heads, layout.head_size), generator=random)
    scale = layout.head_size**-0.5
    one = Coded(NATIVE, layout, keys, bits)
    # The same records, as a mean that is added up in another order may be rounded otherwise.
    other = Coded(NATIVE, layout, paged[:, :, order].reshape(keys.shape), bits)
    if not np.array_equal(one.records[..., -4:], other.records[..., -4:]):
        return
    np.testing.assert_allclose(
        one.logits(query, scale), other.logits(query, scale), rtol=1e-5, atol=2e-2
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_page_of_a_broken_key_is_chosen_first(isa: str, broken: float) -> None:
    layout = BlockLayout.unpadded(32, 16, 2, 64, torch.float32)
    keys = drawn(layout, 3, 1)
    keys[1, 20, 1, 7] = broken
    query = torch.randn((4, 64), generator=torch.Generator().manual_seed(0))
    with using(isa):
        coded = Coded(NATIVE, layout, keys, 2)
        logits = coded.logits(query, 0.125)
        chosen = CodesSelector(Budget(tokens=16), 0, CpuScoringKernels(1), 2).select(
            query[None], coded.context(), 0.125
        )
    assert np.isnan(logits[2:, 3]).all()
    assert not np.isnan(np.delete(logits, 3, axis=1)).any()
    assert not np.isnan(logits[:2]).any()
    assert chosen.pages[chosen.begin[1] : chosen.begin[2]].tolist() == [3]


def test_keys_of_zeros_and_of_one_value() -> None:
    layout = BlockLayout.unpadded(16, 16, 1, 64, torch.float16)
    query = torch.randn((1, 64), generator=torch.Generator().manual_seed(0))
    zeros = Coded(NATIVE, layout, torch.zeros((1, 16, 1, 64), dtype=torch.float16), 2)
    assert zeros.logits(query, 1.0).tolist() == [[0.0]]
    alike = torch.randn((1, 1, 1, 64), generator=torch.Generator().manual_seed(2)).half()
    same = Coded(NATIVE, layout, alike.expand(1, 16, 1, 64).contiguous(), 2)
    wanted = float(query[0] @ alike.float().flatten())
    assert same.logits(query, 1.0)[0, 0] == pytest.approx(wanted, abs=0.1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [8, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_a_record_has_the_bytes_that_the_store_keeps(bits: int, size: int, groups: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layout = BlockLayout.unpadded(16 * groups, 16, 2, size, dtype)
        pages = SlotGeometry("paged", 3, 2, groups, layout.page_payload_bytes)
        made = with_summaries(
            pages,
            16,
            channels=False,
            scaled_from=dtype.itemsize,
            record=f"codes_{bits}",  # type: ignore[arg-type]
        )
        assert made.code_bits == bits
        assert code_bytes(made, 16) == _kernels.code_bytes(layout.shape, bits)


@pytest.mark.parametrize(
    ("size", "tokens", "least"), [(64, 128, 12), (128, 128, 13), (64, 16, 11), (128, 16, 11)]
)
def test_two_bits_take_a_small_part_of_the_kv(size: int, tokens: int, least: float) -> None:
    layout = BlockLayout.unpadded(tokens, 16, 1, size, torch.bfloat16)
    assert layout.block_bytes / _kernels.code_bytes(layout.shape, 2) >= least


def test_wrong_arguments_are_refused() -> None:
    layout = BlockLayout.unpadded(16, 16, 1, 64, torch.float16)
    coded = Coded(NATIVE, layout, torch.zeros((1, 16, 1, 64), dtype=torch.float16), 2)
    with pytest.raises(ValueError, match="1, 2 or 4 bits"):
        CpuScoringKernels(1).code_logits(torch.zeros(1, 1, 64), coded.context(), 1.0, 3)
    with pytest.raises(ValueError, match="1, 2 or 4 bits"):
        CpuPageKernels(1).encode(coded.places, layout, coded.places, 8)
    context = ContextSummaries(layout, *(np.zeros(1, np.int32),) * 2, np.ones(1, np.int32))
    with pytest.raises(ValueError, match="codes"):
        CpuScoringKernels(1).code_logits(torch.zeros(1, 1, 64), context, 1.0, 2)


@pytest.mark.parametrize("mass", [0.9, 0.95, 0.99])
def test_adaptive_covers_the_mass_that_it_is_asked_for(mass: float) -> None:
    """Estimate and truth agree, in the mean over heads and queries; some keys stand out.

    Logits vary by 1.2, as around the means of pages in models. Where they vary by 2.5, it counts
    that pages are chosen which were overrated: asked for .9 it covers .85.
    """
    layout = BlockLayout.unpadded(128, 16, 2, 64, torch.bfloat16)
    random = torch.Generator().manual_seed(5)
    keys = torch.randn((16, 128, 2, 64), generator=random)
    keys[
        torch.randint(0, 16, (40,), generator=random),
        torch.randint(0, 128, (40,), generator=random),
    ] *= 2
    coded = Coded(NATIVE, layout, keys.to(torch.bfloat16), 2)
    scorer = CodesSelector(Budget(share=1.0), 0, CpuScoringKernels(1), 2)
    selector = AdaptiveSelector(scorer, mass, 0.0, Budget(share=1.0), 0, CpuScoringKernels(1))
    every = coded.keys.double().permute(2, 0, 1, 3).reshape(2, -1, 64)
    estimated, true, read = [], [], []
    for _ in range(32):
        query = torch.randn((4, 64), generator=random) * 1.25
        chosen = selector.select(query[None], coded.context(), 0.125)
        logits = 0.125 * torch.einsum("hgd,htd->hgt", query.double().view(2, 2, 64), every)
        share = logits.softmax(-1).mean(1).reshape(2, -1, 16).sum(-1)
        for head in range(2):
            pages = chosen.pages[chosen.begin[head] : chosen.begin[head + 1]]
            true.append(float(share[head, torch.from_numpy(pages).long()].sum()))
            read.append(len(pages) / 128)
        estimated += chosen.mass[0].tolist()
    assert abs(np.mean(estimated) - np.mean(true)) < 0.02
    assert np.mean(true) > mass - 0.02
    assert np.mean(read) < 0.99
