"""Answers of nodes are held against what the nodes were asked for."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ssdkv.base.errors import NodeError
from vllm_ssdkv.offload.node_blocks import NodePart, RowBlocks

PAGES = 4
"""Of a layer; blocks have two layers. Nodes 0 and 1 have each half of the pages of a layer."""


def blocks() -> RowBlocks:
    """Two rows, which have slot 7 both; slot 9 is on node 1 alone."""
    slots = np.array([7, 9, 7])
    nodes = np.array([[0, 0, 1, 1] * 2, [1, 1, 1, 1] * 2, [0, 0, 1, 1] * 2], dtype=np.int8)
    rows = np.array([0, 0, 1])
    parts = {
        0: NodePart(np.array([0, 2]), np.array([0, 1]), np.array([5, 6])),
        1: NodePart(np.array([0, 1, 2]), np.array([0, 1]), np.array([5, 6])),
    }
    return RowBlocks(slots, rows, nodes, True, parts, 1)


def check(node: int, layer: int, slots: list[int], numbers: list[int]) -> None:
    blocks().check_missed(node, layer * PAGES, PAGES, np.array(slots), np.array(numbers))


def test_pages_that_were_asked_for_may_be_missed() -> None:
    check(0, 0, [7, 7], [0, 1])
    check(1, 1, [9, 7, 9], [4, 6, 7])
    check(0, 1, [], [])


@pytest.mark.parametrize(
    ("slots", "numbers"),
    [
        pytest.param([7], [4, 5], id="lengths"),
        pytest.param([9], [4], id="a block of the other node"),
        pytest.param([8], [4], id="an unknown block"),
        pytest.param([-1], [4], id="no slot"),
        pytest.param([1 << 62], [4], id="a slot beyond all"),
        pytest.param([7], [6], id="a page of the other node"),
        pytest.param([7], [0], id="another layer"),
        pytest.param([7], [8], id="no page"),
        pytest.param([7], [-4], id="a negative page"),
        pytest.param([7, 7], [4, 4], id="twice"),
    ],
)
def test_other_pages_are_refused(slots: list[int], numbers: list[int]) -> None:
    with pytest.raises(NodeError, match="the node misses"):
        check(0, 1, slots, numbers)
