"""Scores of pages, as the engine's selectors make them, and of tokens; numpy, from whole keys.

Queries are [group, steps, size], scores [steps, pages]. Scores of a group add up, or are the mean
of the heads' weights.
"""

from __future__ import annotations

import numpy as np

from vllm_ssdkv.profiling.clusters.trace import F32, PAGE, pages_of

CHANNEL_SHARE = 8
"""``sparf`` reads 1 of so many channels, the engine's default."""


def softmax(logits: F32) -> F32:
    """Weights along the last axis."""
    shifted: F32 = np.subtract(logits, logits.max(-1, keepdims=True), dtype=np.float32)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(-1, keepdims=True)
    return shifted


def channel_logits(query: F32, keys: F32, scale: float) -> F32:
    """SparQ's logits of tokens by the group's largest channels, [group, steps, tokens]."""
    size = query.shape[-1]
    count = max(1, size // CHANNEL_SHARE)
    order = np.argsort(-np.abs(query).sum(0), axis=-1)[:, :count]
    mask = np.zeros(query.shape[1:], np.float32)
    np.put_along_axis(mask, order, 1, axis=-1)
    kept = query * mask
    share = np.abs(kept).sum(-1) / np.maximum(np.abs(query).sum(-1), 1e-9)
    logits: F32 = np.matmul(kept, keys.T, dtype=np.float32)
    logits *= (scale / np.sqrt(np.maximum(share, 1e-9)))[..., None]
    return logits


def best_token(logits: F32) -> F32:
    """Score of a page by the best token of the group's added logits."""
    total = logits.sum(0)
    best: F32 = total.reshape(len(total), -1, PAGE).max(-1)
    return best


def weight_sum(logits: F32) -> F32:
    """Score of a page by the sum of its tokens' softmax weights, mean of the group."""
    return pages_of(softmax(logits).mean(0))


def paged(keys: F32) -> F32:
    """Keys by page, [pages, page tokens, size]."""
    pages: F32 = keys.reshape(-1, PAGE, keys.shape[-1])
    return pages


def bounds(query: F32, keys: F32, scale: float) -> F32:
    """Score by the largest logit that smallest and largest channels of a page allow."""
    pages = paged(keys)
    return within_bounds(query, pages.min(1), pages.max(1), scale)


def within_bounds(query: F32, least: F32, most: F32, scale: float) -> F32:
    """The same, from smallest and largest channels, [entries, size] each."""
    logits: F32 = np.maximum(query, np.float32(0)) @ most.T
    logits += np.minimum(query, np.float32(0)) @ least.T
    return group_weights(logits, scale)


def group_weights(products: F32, scale: float) -> F32:
    """Softmax of products [group, steps, entries] times ``scale``, mean of the group."""
    mean: F32 = softmax(products * np.float32(scale)).mean(0)
    return mean


def mean_key(query: F32, keys: F32, scale: float) -> F32:
    """Score by the logit of a page's mean key."""
    return group_weights(query @ paged(keys).mean(1).T, scale)


def spread(query: F32, keys: F32, scale: float) -> F32:
    """Score by mean and variance per channel: the mean of exp(logit) if channels are normal."""
    pages = paged(keys)
    logits = query @ pages.mean(1).T * np.float32(scale)
    logits += (query * query) @ pages.var(1).T * np.float32(scale * scale / 2)
    return group_weights(logits, 1)
