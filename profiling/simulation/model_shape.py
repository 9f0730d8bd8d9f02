"""Shape of a model, from the ``config.json`` that Hugging Face models come with.

What counts here: bytes of KV per token and layer, which are exact, and parameters, which leave out
biases and norms. vLLM is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.profiling.simulation.description import DATA, read_mapping
from vllm_ssdkv.profiling.simulation.layer_states import STATES, StateSize

LayerKind: TypeAlias = Literal["full", "sliding", "chunked", "latent", "state", "none"]
"""``latent``: one vector for all heads (MLA). ``none``: it uses the KV of another layer."""

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_KIND_OF: Final[Mapping[str, LayerKind]] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
}
_PLAIN_MLP: Final = frozenset(
    {"opt", "gpt2", "gptj", "gpt_neox", "gpt_bigcode", "bloom", "falcon", "mpt", "phi", "gpt3"}
)
"""Types whose MLP has two matrices; that of others has three."""
_ALL_HEADS: Final = frozenset({"opt", "bloom", "gpt2", "gpt_neox", "gptj", "gpt3"})
"""Types whose heads have K and V of their own, whatever ``num_key_value_heads`` says."""
_LENGTHS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Fields that bound the tokens of a sequence; vLLM takes the smallest."""
_SCALED_LENGTHS: Final = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
"""Kinds of scaled RoPE whose models name the length after scaling."""
_HEADS_DIVIDE: Final = _ALL_HEADS - {"gpt3"} | {"qwen2", "stablelm", "jamba", "falcon"}
"""Types whose heads divide the hidden size, whatever ``head_dim`` says: vLLM does not read it."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Longest sequence of a model, its output included.

    Attributes:
        field: Of ``config.json``, which says it.
    """

    tokens: int
    field: str


@dataclass(frozen=True, slots=True)
class Layer:
    """Kept KV, or state, of one layer.

    Attributes:
        numbers: Of K and V of one token.
        window: Tokens that it attends to, at most; None: all.
        state: Of a layer that keeps one in place of KV.
    """

    kind: LayerKind
    numbers: int = 0
    window: int | None = None
    state: StateSize | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that a simulation needs.

    Example:
        model = ModelShape.read(Path("Llama-3.1-8B/config.json"))
        model.kv_bytes_per_token()

    Attributes:
        dtype: Of weights, and of KV unless another is asked for.
        parameters: Weights in matrices, embeddings included.
        active: Of these, what one token goes through: not the other experts.
        vocabulary_parameters: Of these, embeddings and the last projection.
        positions: None: the file does not say it.
    """

    name: str
    layers: tuple[Layer, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    parameters: int
    active: int
    vocabulary_parameters: int
    positions: Positions | None = None

    @classmethod
    def read(cls, path: Path, *, name: str | None = None) -> ModelShape:
        """The shape that a file says.

        Raises:
            ConfigError: it cannot be read, or see :meth:`of`.
        """
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}") from None
        return cls.of(config, name=name or path.parent.name or str(path), where=str(path))

    @classmethod
    def of(cls, config: object, *, name: str, where: str = "config.json") -> ModelShape:
        """The shape that an object of that file says.

        Raises:
            ConfigError: a field is missing or wrong, or layers are of a kind that is not described.
        """
        return _Reader(config, where).shape(name)

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Bytes of KV that one more token adds, over all layers.

        Raises:
            ConfigError: ``dtype`` is not known.
        """
        return sum(layer.numbers for layer in self.layers) * bytes_of(dtype or self.dtype)

    def kv_bytes(self, tokens: int, dtype: str | None = None) -> int:
        """Bytes that attention to so many tokens reads: windows are no longer than they are."""
        number = bytes_of(dtype or self.dtype)
        return number * sum(
            layer.numbers * min(tokens, layer.window or tokens) for layer in self.layers
        )

    def state_bytes(self) -> int:
        """Bytes of all states of one sequence, whatever its length."""
        number = bytes_of(self.dtype)
        return sum(layer.state.nbytes(number) for layer in self.layers if layer.state is not None)

    def x_bytes_per_token(self) -> int:
        """Bytes of the inputs of all attention layers, in place of their KV."""
        attends = sum(1 for layer in self.layers if layer.numbers)
        return attends * self.hidden * bytes_of(self.dtype)

    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * bytes_of(self.dtype)

    def attention_layers(self) -> int:
        """Number of layers that have KV of their own."""
        return sum(1 for layer in self.layers if layer.numbers)


def bytes_of(dtype: str) -> int:
    """Bytes of one number. Raises ConfigError: the type is not known."""
    known = DTYPE_BYTES.get(dtype.removeprefix("torch."))
    if known is None:
        raise ConfigError(f"dtype {dtype!r} is not known; one of {', '.join(DTYPE_BYTES)}")
    return known


class _Reader:
    """Fields of one ``config.json``, under the names that families give them."""

    def __init__(self, config: object, where: str) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(f"{where}: got {type(config).__name__}; give an object")
        inner = config.get("text_config")
        outer = config
        if isinstance(inner, Mapping):
            config = {**inner}
        self._config: Mapping[str, Any] = config
        self._outer: Mapping[str, Any] = outer
        self._where = where
        kind = config.get("model_type") or outer.get("model_type")
        self.type = str(kind or "")

    def shape(self, name: str) -> ModelShape:
        hidden = self.whole("hidden_size", "n_embd", "d_model")
        heads = self.whole("num_attention_heads", "n_head", "n_heads", default=1)
        if self.type in STATES and "num_attention_heads" not in self._config:
            heads = 1
        head_size = hidden // heads
        if self.type not in _HEADS_DIVIDE:
            head_size = self.whole("head_dim", "kv_channels", default=head_size)
        kv_heads = self._kv_heads(heads)
        layers = tuple(self._layers(kv_heads, head_size))
        count = self._parameters(hidden, heads, kv_heads, head_size, layers)
        sizes = (hidden, heads, kv_heads, head_size)
        return ModelShape(name, layers, *sizes, self._dtype(), *count, self._positions())

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there, a whole number above 0."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ConfigError(f"{self._where}: {name}: got {value!r}; a whole number above 0")
            return value
        if default is None:
            raise ConfigError(f"{self._where}: {names[0]}: missing; give a whole number above 0")
        return default

    def _positions(self) -> Positions | None:
        """The bound that vLLM derives for ``--max-model-len``."""
        fields = [name for name in _LENGTHS if self._config.get(name) is not None]
        if self._config.get("model_max_length") is not None:
            fields = ["model_max_length"]
        found = [Positions(self.whole(name), name) for name in fields]
        if not found:
            return None
        least = min(found, key=lambda one: one.tokens)
        return Positions(int(least.tokens * self._rope_factor()), least.field)

    def _rope_factor(self) -> float:
        """By which scaled RoPE makes the length larger that the file names."""
        named = self._config.get("rope_parameters") or self._config.get("rope_scaling")
        if not isinstance(named, Mapping) or "gemma3" in self.type:
            return 1.0
        # Of some families each kind of layer has its own.
        own = [one for one in named.values() if isinstance(one, Mapping)]
        factor = 1.0
        for one in own or [named]:
            if (one.get("rope_type") or one.get("type")) in _SCALED_LENGTHS:
                continue
            value = one.get("factor")
            if isinstance(value, int | float) and not isinstance(value, bool):
                factor = float(value)
        return factor

    def _dtype(self) -> str:
        named = None
        for holder in (self._config, self._outer):
            named = named or holder.get("dtype") or holder.get("torch_dtype")
        text = str(named or "float16").removeprefix("torch.")
        if text not in DTYPE_BYTES:
            raise ConfigError(
                f"{self._where}: dtype: got {named!r}; one of {', '.join(DTYPE_BYTES)}"
            )
        return text

    def _kv_heads(self, heads: int) -> int:
        config = self._config
        if self.type in _ALL_HEADS:
            return heads
        if self.type == "gpt_bigcode" and config.get("multi_query", True):
            return self.whole("num_key_value_heads", default=1)
        if self.type == "falcon" and not config.get("new_decoder_architecture"):
            return 1 if config.get("multi_query", True) else heads
        attention = config.get("attn_config")
        if isinstance(attention, Mapping) and isinstance(attention.get("kv_n_heads"), int):
            return int(attention["kv_n_heads"])
        return self.whole(
            "num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=heads
        )

    def _layers(self, kv_heads: int, head_size: int) -> Sequence[Layer]:
        count = self.whole("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        kinds = self._kinds(count)
        shared = self.whole_or_zero("num_kv_shared_layers")
        found = []
        for number, kind in enumerate(kinds):
            own: LayerKind = "none" if number >= count - shared else kind
            size, heads = self._own_heads(number, head_size, kv_heads)
            found.append(self._layer(own, heads, size))
        return found

    def _own_heads(self, number: int, size: int, heads: int) -> tuple[int, int]:
        """Size and number of a layer's heads, where ``per_layer_config`` says others."""
        entries = self._config.get("per_layer_config")
        if not isinstance(entries, Mapping):
            return size, heads
        own = entries.get(str(number), {})
        fields = _Reader(own, f"{self._where}: per_layer_config: {number}")
        return (
            fields.whole("head_dim", default=size),
            fields.whole("num_key_value_heads", default=heads),
        )

    def whole_or_zero(self, name: str) -> int:
        value = self._config.get(name)
        return 0 if value in (None, 0) else self.whole(name)

    def _layer(self, kind: LayerKind, kv_heads: int, head_size: int) -> Layer:
        match kind:
            case "none":
                return Layer("none")
            case "state":
                if self.type not in STATES:
                    raise ConfigError(
                        f"{self._where}: model_type {self.type!r}: states of its layers are not "
                        f"described; known: {', '.join(STATES)}"
                    )
                return Layer("state", state=STATES[self.type](self))
            case "latent":
                return Layer("latent", self.whole("kv_lora_rank") + self.whole("qk_rope_head_dim"))
            case "sliding":
                # Cohere counts the tokens before the newest one.
                window = self.whole("sliding_window") + (self.type == "cohere2")
                return Layer("sliding", 2 * kv_heads * head_size, window)
            case "chunked":
                window = self.whole("attention_chunk_size")
                return Layer("chunked", 2 * kv_heads * head_size, window)
        # Some families give layers that attend to everything heads of another size.
        wide = self.whole("global_head_dim", default=head_size)
        heads = self.whole("num_global_key_value_heads", default=kv_heads)
        return Layer("full", 2 * heads * wide)

    def _kinds(self, count: int) -> list[LayerKind]:
        config = self._config
        if "index_topk" in config:
            raise ConfigError(
                f"{self._where}: index_topk: caches of indexers are not described; "
                "a model without them is needed"
            )
        if self.type in ("mamba", "mamba2", "falcon_mamba"):
            return ["state"] * count
        if config.get("kv_lora_rank") is not None:
            return ["latent"] * count
        named = config.get("layer_types") or config.get("layers_block_type")
        if named is not None:
            return [self._kind_of(entry) for entry in self._list(named, count)]
        if self.type == "jamba":
            period = self.whole("attn_layer_period", default=8)
            offset = self.whole_or_zero("attn_layer_offset")
            return ["full" if i % period == offset else "state" for i in range(count)]
        if self.type in ("bamba", "granitemoehybrid"):
            attends = set(config.get("attn_layer_indices") or ())
            return ["full" if i in attends else "state" for i in range(count)]
        if hint := next((key for key in config if key.startswith(("mamba", "ssm", "linear_"))), ""):
            raise ConfigError(
                f"{self._where}: {hint}: layers with a state, and no layer_types that says which; "
                "give layer_types"
            )
        window = config.get("sliding_window")
        if window and config.get("use_sliding_window", True):
            return ["sliding"] * count
        return ["full"] * count

    def _list(self, named: object, count: int) -> list[object]:
        if not isinstance(named, list) or len(named) != count:
            raise ConfigError(
                f"{self._where}: layer_types: got {named!r}; a list with {count} entries"
            )
        return named

    def _kind_of(self, entry: object) -> LayerKind:
        kind = _KIND_OF.get(entry) if isinstance(entry, str) else None
        if kind is None:
            raise ConfigError(
                f"{self._where}: layer_types: got {entry!r}; one of {', '.join(_KIND_OF)}"
            )
        return kind

    def _parameters(
        self, hidden: int, heads: int, kv_heads: int, head_size: int, layers: Sequence[Layer]
    ) -> tuple[int, int, int]:
        """Weights in matrices: all of them, those that a token goes through, those of its ends."""
        inner = self.whole(
            "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=4 * hidden
        )
        matrices = 2 if self.type in _PLAIN_MLP else 3
        attends = hidden * head_size * (2 * heads + 2 * kv_heads)
        one = matrices * hidden * self.whole("moe_intermediate_size", default=inner)
        experts = self.whole(*("num_local_experts", "num_experts", "n_routed_experts"), default=1)
        used = self.whole("num_experts_per_tok", default=1)
        vocabulary = self.whole("vocab_size", default=1) * hidden
        tied = self._config.get("tie_word_embeddings", self.type in ("opt", "bloom", "gpt2"))
        ends = vocabulary if tied else 2 * vocabulary
        count = len(layers)
        if experts == 1:
            one, used = matrices * hidden * inner, 1
        total = count * (attends + experts * one) + ends
        return total, count * (attends + used * one) + ends, ends


@cache
def known_models() -> dict[str, ModelShape]:
    """Models of the papers and some others, by name: ``data/models.yaml``."""
    path = DATA / "models.yaml"
    found = {}
    for name, entry in read_mapping(path).items():
        config = {key: value for key, value in entry.items() if key != "source"}
        if not isinstance(entry.get("source"), str):
            raise ConfigError(f"{path}: {name}: source is missing: say where the shape is from")
        found[name] = ModelShape.of(config, name=name, where=f"{path}: {name}")
    return found


def find_model(name: str) -> ModelShape:
    """A model by name. Raises ConfigError: there is none of that name."""
    known = known_models()
    if name not in known:
        raise ConfigError(f"model {name!r} is not described; known: {', '.join(known)}")
    return known[name]
