"""Pages that a layer lacks: the device asks the host for them, and waits for the answer.

``_io.Mailbox`` describes the memory that both reach. The host answers without the interpreter, and
nothing that it does needs the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.step_tables import StepTables
from vllm_ssdkv.triton_kernels.launch import INTERPRETED, inline, jit, on_device_of

HEAD: Final = 2
"""Words of a request, and of a reply, before those of its pages."""

_MAIL_HEAD = tl.constexpr(HEAD)
_TILE: Final = 32

_PAUSE_S: Final = 0.0001
"""Pause of the interpreter between two looks: others need it meanwhile."""


def _now_ns(_semantic: Any = None) -> Any:  # noqa: ANN401 - a value in a kernel
    """Nanoseconds on a clock of the device."""
    if INTERPRETED:
        time.sleep(_PAUSE_S)
        return time.monotonic_ns()
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1, _semantic=_semantic
    )


def _acquired(pointer: Any, _semantic: Any = None) -> Any:  # noqa: ANN401
    """A word that the host has written, and thereby all that it wrote before."""
    if INTERPRETED:
        return tl.load(pointer)
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u64 $0, [$1];",
        "=l,l",
        [pointer],
        tl.int64,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


def _release(pointer: Any, value: Any, _semantic: Any = None) -> Any:  # noqa: ANN401
    """Write a word behind all that was written before."""
    if INTERPRETED:
        return tl.store(pointer, value)
    return tl.inline_asm_elementwise(
        "st.release.sys.global.u64 [$1], $2; mov.u64 $0, $2;",
        "=l,l,l",
        [pointer, value],
        tl.int64,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


for _own in (_now_ns, _acquired, _release):
    _own.__dict__["__triton_builtin__"] = True  # the compiler calls them


@inline
def _leave_out_found(
    key_ptr: torch.Tensor,
    place_ptr: torch.Tensor,
    address_ptr: torch.Tensor,
    nowhere: int,
    count: torch.Tensor,
    TILE: tl.constexpr,
) -> torch.Tensor:
    """Write -1 in place of the keys of pages that are not ``nowhere`` any more; how many are."""
    left = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        place = tl.load(place_ptr + i, mask=i < count, other=0)
        address = tl.load(address_ptr + place, mask=i < count, other=nowhere)
        tl.store(key_ptr + i, -1, mask=address != nowhere)
        left += ((i < count) & (address == nowhere)).to(tl.int32)
    total: torch.Tensor = tl.sum(left, 0)
    return total


@jit
def _wait_kernel(
    state_ptr: torch.Tensor,
    service_ptr: torch.Tensor,
    place_ptr: torch.Tensor,
    address_ptr: torch.Tensor,
    lost_ptr: torch.Tensor,
    request: int,
    reply: int,
    most: int,
    layer: int,
    layers: int,
    row_pages: int,
    nowhere: int,
    SEARCHED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    count = tl.load(state_ptr)
    if count == 0:
        return
    tl.debug_barrier()
    tl.store(state_ptr, 0)
    count = tl.minimum(count, most)
    base = tl.load(service_ptr)
    mail = base // layers % 2 * (_MAIL_HEAD + most)
    request_ptr = tl.cast(request, tl.int64).to(tl.pointer_type(tl.int64)) + mail
    reply_ptr = tl.cast(reply, tl.int64).to(tl.pointer_type(tl.int64)) + mail
    if SEARCHED:
        key_ptr = request_ptr + _MAIL_HEAD
        left = _leave_out_found(key_ptr, place_ptr, address_ptr, nowhere, count, TILE)
        if left == 0:
            return
    until = _now_ns() + tl.load(service_ptr + 1)
    ticket = base + layer + 1
    tl.store(request_ptr + 1, count)
    tl.debug_barrier()
    _release(request_ptr, ticket)
    seen = _acquired(reply_ptr)
    while (seen != ticket) & (_now_ns() < until):
        seen = _acquired(reply_ptr)
    if seen != ticket:
        tl.store(state_ptr + 1, base)
    answered = tl.where(seen == ticket, count, 0)
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        address = tl.load(reply_ptr + _MAIL_HEAD + i, mask=i < answered, other=0, volatile=True)
        place = tl.load(place_ptr + i, mask=address != 0, other=0)
        tl.store(address_ptr + place, address, mask=address != 0)
        lost = (i < count) & (address == 0)
        key = tl.load(request_ptr + _MAIL_HEAD + i, mask=lost, other=0, volatile=True)
        tl.store(lost_ptr + key // row_pages, 1, mask=lost & (key >= 0))


@dataclass(frozen=True, slots=True)
class Misses:
    """Pages that a layer of a step lacks.

    Attributes:
        layers: Layers of a step.
        most: Pages that a layer may ask for; 0: it asks for none.
        state: On the device, int64 [2]: pages that the layer lacks so far, and the base of the
            tickets of the latest step that was not answered in time, which asks no more.
        service: Base of the step's tickets, 0 where nobody answers, and nanoseconds that a layer
            waits: part of the tables, int64 [2].
        place: Place of each page among the layer's addresses, on the device, int64 [most].
        requests, replies: Memory of the host, int64 [2, HEAD + most].
    """

    layers: int
    most: int
    state: torch.Tensor
    service: torch.Tensor
    place: torch.Tensor
    requests: torch.Tensor
    replies: torch.Tensor

    @classmethod
    def empty(cls, layers: int, most: int, shape: StepTables, tables: torch.Tensor) -> Self:
        """Memory for at most so many pages of a layer."""
        device = tables.device
        mail = torch.zeros((2, 2, HEAD + most), dtype=torch.int64, pin_memory=device.type == "cuda")
        return cls(
            layers,
            most,
            torch.zeros(2, dtype=torch.int64, device=device),
            tables[shape.service : shape.fields],
            torch.zeros(max(1, most), dtype=torch.int64, device=device),
            mail[0],
            mail[1],
        )


def wait(
    misses: Misses,
    addresses: torch.Tensor,
    outcome: torch.Tensor,
    *,
    layer: int,
    row_pages: int,
    nowhere: int | None = None,
) -> None:
    """Ask for the pages that a layer lacks, and write their ``addresses``. Rows whose pages do not
    come in time are lost: ``outcome`` [row] is 1. Queued on the current stream.

    ``row_pages``: keys of pages of a row. ``nowhere``: address of pages that are still missing,
    where some may have been found since they were listed; None: all are.
    """
    with on_device_of(addresses):
        _wait_kernel[(1,)](
            misses.state,
            misses.service,
            misses.place,
            addresses,
            outcome,
            misses.requests.data_ptr(),
            misses.replies.data_ptr(),
            misses.most,
            layer,
            misses.layers,
            row_pages,
            nowhere or 0,
            SEARCHED=nowhere is not None,
            TILE=_TILE,
            num_warps=1,
        )
