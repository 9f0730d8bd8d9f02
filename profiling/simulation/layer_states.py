"""Sizes of the states that layers keep in place of KV: Mamba, Mamba 2, linear attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol


class Fields(Protocol):
    """Integers of a configuration."""

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there."""
        ...


@dataclass(frozen=True, slots=True)
class StateSize:
    """State of one layer and sequence.

    Attributes:
        convolution: Numbers of the last inputs of the convolution, in the type of the model.
        carried: Numbers that are carried on, in float32: vLLM's default.
    """

    convolution: int
    carried: int

    def nbytes(self, number: int) -> int:
        """Bytes, with ``number`` bytes to one of the model's type."""
        return self.convolution * number + self.carried * 4


def mamba(fields: Fields) -> StateSize:
    """Mamba: a convolution over the inner channels, and a state for each."""
    inner = fields.whole("intermediate_size", default=2 * fields.whole("hidden_size"))
    return _selective(inner, fields.whole("state_size"), fields.whole("conv_kernel", default=4))


def jamba(fields: Fields) -> StateSize:
    """Jamba's layers of Mamba."""
    inner = fields.whole("mamba_expand", default=2) * fields.whole("hidden_size")
    return _selective(
        inner, fields.whole("mamba_d_state", default=16), fields.whole("mamba_d_conv", default=4)
    )


def _selective(inner: int, state: int, kernel: int) -> StateSize:
    return StateSize(inner * (kernel - 1), inner * state)


def mamba2(fields: Fields) -> StateSize:
    """Mamba 2: a state per head, and a convolution over inputs and both projections."""
    inner = fields.whole("expand", default=2) * fields.whole("hidden_size")
    return _grouped(
        fields.whole("intermediate_size", default=inner),
        fields.whole("num_heads") * fields.whole("head_dim"),
        fields.whole("n_groups", default=8),
        fields.whole("state_size", default=128),
        fields.whole("conv_kernel", default=4),
    )


def granite(fields: Fields) -> StateSize:
    """Layers of Mamba 2 in Granite's hybrids and Bamba."""
    inner = fields.whole("mamba_expand", default=2) * fields.whole("hidden_size")
    return _grouped(
        inner,
        fields.whole("mamba_n_heads", default=128) * fields.whole("mamba_d_head", default=64),
        fields.whole("mamba_n_groups", default=1),
        fields.whole("mamba_d_state", default=256),
        fields.whole("mamba_d_conv", default=4),
    )


def _grouped(inner: int, channels: int, groups: int, state: int, kernel: int) -> StateSize:
    return StateSize((inner + 2 * groups * state) * (kernel - 1), channels * state)


def gated_delta(fields: Fields) -> StateSize:
    """Linear attention by the gated delta rule: a matrix per value head."""
    keys = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
    heads, size = fields.whole("linear_num_value_heads"), fields.whole("linear_value_head_dim")
    kernel = fields.whole("linear_conv_kernel_dim", default=4)
    carried = heads * size * fields.whole("linear_key_head_dim")
    return StateSize((2 * keys + heads * size) * (kernel - 1), carried)


STATES: Final[Mapping[str, Callable[[Fields], StateSize]]] = {
    "mamba": mamba,
    "falcon_mamba": mamba,
    "mamba2": mamba2,
    "jamba": jamba,
    "bamba": granite,
    "granitemoehybrid": granite,
    "qwen3_next": gated_delta,
}
"""States by the type of the model."""
