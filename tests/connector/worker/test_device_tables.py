"""Tables of a device: each step sends what changed, and nothing ends before the device is done."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.connector.worker.device_tables import STEPS, DeviceTables, Leases
from vllm_ssdkv.kernels.operands.step_tables import FIELDS, StepTables, TableRow

SHAPE = StepTables(rows=3, blocks=4, hbm_blocks=9)


@st.composite
def steps(draw: st.DrawFn) -> dict[int, TableRow]:
    """Rows of a step, by the block that they write to."""
    found = {}
    blocks = st.lists(st.integers(1, SHAPE.hbm_blocks - 1), max_size=SHAPE.rows, unique=True)
    for block in draw(blocks):
        addresses = np.array(draw(st.lists(st.integers(1, 5), max_size=SHAPE.blocks)), np.uint64)
        records = addresses * np.uint64(7) if draw(st.booleans()) else addresses[:0]
        found[block] = TableRow(draw(st.integers(0, 6)), addresses, records, -1, 2)
    return found


@given(every=st.lists(steps(), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_changes_make_the_tables_of_the_step(every: list[dict[int, TableRow]]) -> None:
    tables = DeviceTables(SHAPE, torch.device("cpu"))
    memory = tables.memory
    for rows in every:
        changes = tables.update(rows)
        places = changes[:, 0]
        assert len(places.unique()) == len(places)
        assert (memory[places] != changes[:, 1]).all()
        memory[places] = changes[:, 1]
        assert len(tables.update(rows)) == 0
        row_of_block = memory[: SHAPE.hbm_blocks].tolist()
        assert row_of_block == [list(rows).index(i) if i in rows else -1 for i in range(9)]
        fields = memory[SHAPE.fields : SHAPE.frames].view(len(FIELDS), SHAPE.rows)
        for number, row in enumerate(rows.values()):
            have, scored = len(row.frames), len(row.records)
            assert fields[:, number].tolist() == [have, row.first_block, scored, -1, 2]
            for begin, want in ((SHAPE.frames, row.frames), (SHAPE.records, row.records)):
                at = begin + number * SHAPE.blocks
                assert memory[at : at + len(want)].tolist() == want.tolist()


class Mark:
    """A mark in the work of a device that comes by it when the test says so."""

    def __init__(self) -> None:
        self.recorded = self.passed = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        assert self.recorded
        return self.passed

    def synchronize(self) -> None:
        assert self.recorded
        self.passed = True


@pytest.fixture
def marks() -> list[Mark]:
    return []


@pytest.fixture
def leases(marks: list[Mark]) -> Leases:
    def new() -> Mark:
        marks.append(Mark())
        return marks[-1]

    return Leases(new)


def test_what_a_step_uses_is_given_back_when_the_device_has_done_it(
    marks: list[Mark], leases: Leases
) -> None:
    ended: list[int] = []
    leases.end_step(lambda: ended.append(0))
    leases.settle()
    assert (ended, len(leases)) == ([], 1)
    marks[0].passed = True
    leases.settle()
    assert (ended, len(leases)) == ([0], 0)


def test_a_step_waits_for_the_one_before_the_last(marks: list[Mark], leases: Leases) -> None:
    ended: list[int] = []
    for step in range(4):
        leases.settle()
        assert len(leases) < STEPS, "a staging buffer would be written before it was copied"
        leases.end_step(lambda step=step: ended.append(step))  # type: ignore[misc]
    assert ended == [0, 1]
    assert [mark.passed for mark in marks] == [True, True, False, False]
    leases.close()
    assert ended == [0, 1, 2, 3]


def test_what_a_failed_device_was_lent_is_given_back_at_once() -> None:
    class Failed(Mark):
        def record(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    ended: list[int] = []
    leases = Leases(Failed)
    with pytest.raises(RuntimeError, match="illegal"):
        leases.end_step(lambda: ended.append(0))
    assert (ended, len(leases)) == ([0], 0)
