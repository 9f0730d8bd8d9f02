"""Memory that answers the simulated `sparf` with an error, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.fpga_offload.needs import needs_rtlsim
from tests.fpga_offload.rtl.contexts import make_sparf
from vllm_ssdkv.base.errors import FpgaMemoryError
from vllm_ssdkv.fpga_offload.description import KernelShape
from vllm_ssdkv.fpga_offload.rtlsim import Port, RtlsimBackend

SHAPE = KernelShape(64, 2, "float16")


@pytest.fixture
def backend() -> Iterator[RtlsimBackend]:
    made = RtlsimBackend(SHAPE)
    yield made
    made.close(1.0)


@needs_rtlsim(64, 2)
@pytest.mark.parametrize(
    ("port", "answers", "argument"),
    [
        ("list", 0, "jobs"),
        ("list", 1, "q"),
        ("page", 0, "pages"),
        ("out", 0, "masks"),
        ("out", 1, "choices"),
    ],
)
def test_an_error_is_named_and_the_next_call_runs(
    backend: RtlsimBackend, port: Port, answers: int, argument: str
) -> None:
    call = make_sparf(SHAPE, ((2, 3, 32), (1, 3, 5)), 16, 4, seed=7)
    wanted = backend.sparf(call.work).masks
    backend.set_fault(port, answers)
    with pytest.raises(FpgaMemoryError, match=rf"^sparf: memory .* {argument} \("):
        backend.sparf(call.work)
    np.testing.assert_array_equal(backend.sparf(call.work).masks, wanted)
