"""Memory that a node and an engine share."""

from __future__ import annotations

import mmap
import os

import pytest

from vllm_ssdkv.base.errors import NodeError, ProtocolError
from vllm_ssdkv.node.protocol.shared_memory import forbid_writing, make_shared, map_shared

NBYTES = 3 * mmap.PAGESIZE


def test_what_one_side_writes_the_other_reads() -> None:
    descriptor = make_shared("ssdkv-test", NBYTES)
    ours = map_shared(descriptor, NBYTES, writable=True)
    forbid_writing(descriptor)
    theirs = map_shared(descriptor, NBYTES, writable=False)
    ours[5:8] = b"abc"
    assert theirs[5:8] == b"abc"
    with pytest.raises(TypeError):
        theirs[0] = 1
    # Nor by another way, once it is forbidden.
    with pytest.raises(NodeError, match="cannot map"):
        map_shared(descriptor, NBYTES, writable=True)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.pwrite(descriptor, b"x", 0)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    with pytest.raises(NodeError, match="cannot map"):
        map_shared(again, NBYTES, writable=True)
    os.close(again)
    os.close(descriptor)


def test_it_never_shrinks_or_grows() -> None:
    descriptor = make_shared("ssdkv-test", NBYTES)
    for nbytes in (0, 2 * NBYTES):
        with pytest.raises(OSError, match="Operation not permitted"):
            os.ftruncate(descriptor, nbytes)
    os.close(descriptor)


def test_memory_that_may_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("ssdkv-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, NBYTES)
    with pytest.raises(ProtocolError, match="cannot shrink") as error:
        map_shared(descriptor, NBYTES, writable=True)
    assert error.value.cause == "memory"
    os.close(descriptor)


def test_memory_of_another_length_is_not_mapped() -> None:
    descriptor = make_shared("ssdkv-test", NBYTES)
    for nbytes in (mmap.PAGESIZE, NBYTES + 1, 1 << 40):
        with pytest.raises(ProtocolError, match="were announced"):
            map_shared(descriptor, nbytes, writable=True)
    os.close(descriptor)


def test_what_is_no_memory_is_not_mapped() -> None:
    reading, writing = os.pipe()
    with pytest.raises(ProtocolError, match="no shared memory"):
        map_shared(reading, NBYTES, writable=True)
    os.close(reading)
    os.close(writing)
