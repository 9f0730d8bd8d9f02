"""Weights of a model by its ``config.json``: how many there are, and their bytes as stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from vllm_ssdkv.base.errors import ConfigError

PLAIN_MLP: Final = frozenset(
    {"opt", "gpt2", "gptj", "gpt_neox", "gpt_bigcode", "bloom", "falcon", "mpt", "phi", "gpt3"}
)
"""Types whose MLP has two matrices; that of others has three."""
TIED: Final = frozenset(
    {"opt", "bloom", "gpt2", "gemma", "gemma2", "gemma3_text", "gemma4_text", "cohere2"}
)
"""Types whose last projection is the embedding, unless the file says another thing."""
MXFP4_BITS: Final = 4.25
"""Bits of a weight in MXFP4: four, and a scale of eight for 32 of them."""
NVFP4_BITS: Final = 4.5
"""Bits of a weight in NVFP4: four, and a scale of eight for 16 of them."""
NF4_BITS: Final = 4.5
"""Bits of a weight of bitsandbytes: four, and a scale of 32 for 64 of them."""
SCALE_BITS: Final = 16
"""Bits of the scale that a group of weights has, with GPTQ, AWQ and compressed-tensors."""
KNOWN: Final = (
    "awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt (FP8, NVFP4), mxfp4"
)


class Fields(Protocol):
    """Fields of a configuration, under the names that families give them."""

    type: str

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there."""
        ...

    def whole_or_zero(self, name: str) -> int:
        """The field, or 0 where it is missing."""
        ...

    def value(self, name: str) -> Any:  # noqa: ANN401 - as JSON has it
        """The field as it is; None: it is missing."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of weights in matrices, and bytes of those in layers.

    Attributes:
        dense: Weights in layers that every token goes through.
        experts, used: Weights of all experts, and of those that a token goes through.
        head: Weights of the last projection.
        ends: Weights of the embedding and the last projection, which may be one matrix.
        dense_bytes, expert_bytes: Bytes of the first two, as stored.
    """

    dense: int
    experts: int
    used: int
    head: int
    ends: int
    dense_bytes: float
    expert_bytes: float

    @property
    def layer_bytes(self) -> float:
        """Bytes of all weights in layers."""
        return self.dense_bytes + self.expert_bytes

    def read_bytes(self, batch: int) -> float:
        """Bytes of the weights in layers that a step of so many tokens reads.

        Experts are taken by chance, each as often as the others.
        """
        missed = (1 - self.used / self.experts) ** batch if self.experts else 0.0
        return self.dense_bytes + self.expert_bytes * (1 - missed)


def count(fields: Fields, attention: list[int], hidden: int) -> tuple[int, int, int]:
    """Weights in layers: of all tokens, of all experts, of the experts that a token goes through.

    Args:
        attention: Weights of attention, by layer.
    """
    matrices = 2 if fields.type in PLAIN_MLP else 3
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    inner = fields.whole(*names, default=4 * hidden)
    experts = fields.whole("num_local_experts", "num_experts", "n_routed_experts", default=1)
    taken = fields.whole("num_experts_per_tok", "top_k_experts", default=1)
    of_expert = fields.whole("moe_intermediate_size", default=inner)
    shared = fields.whole_or_zero("n_shared_experts") * of_expert
    shared += fields.whole_or_zero("shared_expert_intermediate_size")
    if fields.type == "llama4_text":
        shared = of_expert
        inner = fields.whole("intermediate_size_mlp")
    if fields.type == "gemma4_text":
        shared = inner
    dense = sum(attention)
    sparse = 0
    for number in range(len(attention)):
        if experts > 1 and _has_experts(fields, number):
            sparse += 1
            dense += matrices * hidden * shared
        else:
            dense += matrices * hidden * inner
    one = matrices * hidden * of_expert
    return dense, sparse * experts * one, sparse * taken * one


def _has_experts(fields: Fields, number: int) -> bool:
    if number < fields.whole_or_zero("first_k_dense_replace"):
        return False
    if number in (fields.value("mlp_only_layers") or ()):
        return False
    named = fields.value("moe_layers")
    if named:
        return number in named
    step = fields.whole("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    return (number + 1) % step == 0


def bits(given: object, plain: float, where: str) -> tuple[float, float]:
    """Bits of a weight in layers: beside experts, and in experts.

    Args:
        given: The field ``quantization_config``; None: weights are stored as they are.
        plain: Bits of a weight that is stored as it is.

    Raises:
        ConfigError: the method is not known.
    """
    if given is None:
        return plain, plain
    fields = given if isinstance(given, Mapping) else {}
    match fields.get("quant_method"):
        case "fp8" | "fbgemm_fp8":
            return 8, 8
        case "mxfp4":
            return plain, MXFP4_BITS
        case "gptq" | "awq":
            found = _grouped(fields.get("bits"), fields.get("group_size"), zero=True)
        case "bitsandbytes":
            found = NF4_BITS if fields.get("load_in_4bit") else 8
        case "modelopt":
            found = {"FP8": 8.0, "NVFP4": NVFP4_BITS}.get(str(fields.get("quant_algo")))
        case "compressed-tensors":
            found = _compressed(fields.get("config_groups"))
        case _:
            found = None
    if found is None:
        raise ConfigError(
            f"{where}: quantization_config: got {given!r}; bytes of weights are known for {KNOWN}; "
            "give --weights"
        )
    return found, found


def _grouped(number: object, group: object, *, zero: bool) -> float | None:
    """Bits of a weight with its part of the scale, and of the zero point, of its group."""
    if not isinstance(number, int) or isinstance(number, bool) or number <= 0:
        return None
    if not isinstance(group, int) or group <= 0:
        return float(number)
    return number + (SCALE_BITS + (number if zero else 0)) / group


def _compressed(groups: object) -> float | None:
    """Bits of a weight; None: groups of layers differ."""
    found = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        of = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(of, Mapping):
            zero = not of.get("symmetric", True)
            found.add(_grouped(of.get("num_bits"), of.get("group_size"), zero=zero))
    return found.pop() if len(found) == 1 else None
