"""Order of reads and writes of one device."""

from __future__ import annotations

from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.engines.reads_first import READS_PER_WRITE, ReadsFirst


def test_a_write_is_overtaken_by_so_many_reads_and_no_more() -> None:
    queue = ReadsFirst[str]()
    for _ in range(READS_PER_WRITE):  # these overtake nothing
        queue.put(Op.READ, "read")
        assert queue.take() == "read"
    queue.put(Op.WRITE, "write")
    queue.put(Op.WRITE, "write")
    for _ in range(3 * READS_PER_WRITE):
        queue.put(Op.READ, "read")
    order = []
    while queue:
        expected = queue.peek()
        order.append(queue.take())
        assert order[-1] == expected
    reads = ["read"] * READS_PER_WRITE
    assert order == [*reads, "write", *reads, "write", *reads]


def test_what_is_wanted_of_the_oldest_is_taken() -> None:
    queue = ReadsFirst[int]()
    for number in (1, 3, 2):
        queue.put(Op.READ, number)
        queue.put(Op.WRITE, 10 * number)
    assert queue.take_while(lambda number: number < 3 or 5 < number < 30) == [1, 10]
    assert queue.take_while(lambda _: True) == [3, 2, 30, 20]
    assert not queue
