"""What is forced on a request, and what is kept of it."""

from __future__ import annotations

import pytest
import torch

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.forced_decode import Record


def test_the_row_is_kept_before_a_token_is_forced() -> None:
    record, logits = Record((2, 0)), torch.tensor([3.0, 1.0, 0.0])
    forced = record.force([], logits)
    assert forced.argmax() == 2
    assert forced.isfinite().sum() == 1
    record.force([2], -logits)
    assert record.force([2, 0], logits) is logits
    rows = record.whole("a", (2, 0))
    torch.testing.assert_close(rows, torch.stack([logits, -logits]).log_softmax(-1))


def test_the_last_chunk_of_a_prompt_counts() -> None:
    record = Record((1,))
    record.force([], torch.tensor([5.0, 0.0]))
    record.force([], torch.tensor([0.0, 0.0]))
    assert record.whole("a", [1]).exp().tolist() == [[0.5, 0.5]]


def test_logits_in_16_bits_make_rows_in_32() -> None:
    record, logits = Record((0,)), torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)
    record.force([], logits)
    torch.testing.assert_close(record.rows[0], logits.float().log_softmax(-1))


@pytest.mark.parametrize(("steps", "tokens"), [(1, (1, 0)), (2, (1, 1)), (2, (1,))])
def test_a_request_that_was_not_forced_is_no_result(steps: int, tokens: tuple[int, ...]) -> None:
    record = Record((1, 0))
    for step in range(steps):
        record.force([0] * step, torch.zeros(2))
    with pytest.raises(BenchError, match=r"a: . tokens were decoded and . recorded of 2"):
        record.whole("a", tokens)
