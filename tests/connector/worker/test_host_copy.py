"""Integers on their way to the host."""

from __future__ import annotations

import numpy as np
import torch

from vllm_ssdkv.connector.worker.host_copy import HostCopy


def test_a_part_of_a_table_is_read_where_it_lies() -> None:
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    found = HostCopy(table[:2, :3]).numpy()
    assert np.shares_memory(found, table.numpy())
    assert found.tolist() == [[0, 1, 2], [4, 5, 6]]
