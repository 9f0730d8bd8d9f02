"""Scores of some columns, from tables of whatever kernels made them (``kernels/scoring.py``)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.operands.block_layout import on_host
from vllm_ssdkv.sparse.scores import Floats, Scores


def scores_of(scores: Scores, pages: NDArray[np.int32], begin: NDArray[np.int32]) -> Floats:
    """Score of each page of the lists ``begin``, int32 [R * kv_heads + 1], on the host, [n].

    From a table on a GPU they come in one copy, which waits for the current stream.
    """
    heads = (len(begin) - 1) // (len(scores.first) - 1)
    row, head = np.divmod(np.repeat(np.arange(len(begin) - 1), np.diff(begin)), heads)
    if isinstance(scores.score, torch.Tensor):
        where = [torch.from_numpy(part.astype(np.int64)) for part in (row, head, pages)]
        found = scores.score[tuple(part.to(scores.score.device) for part in where)]
        return on_host(found, np.float32)
    columns = np.diff(scores.first)
    at = scores.first[row] * heads + head * columns[row] + pages
    taken: Floats = scores.score[at]
    return taken
