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
from vllm_ssdkv.profiling.simulation.weights import TIED, Weights, bits, count

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


_PATTERNS: Final[Mapping[str, int]] = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
    "llama4_text": 4,
}
"""Types of which one layer in so many attends to everything, where no field says which."""
_WIDE_HEADS: Final[Mapping[str, int]] = {
    "gemma": 256,
    "gemma2": 256,
    "gemma3_text": 256,
    "gemma4_text": 256,
}
"""Size of a head, where no field says it."""
_PLAIN: Final = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi", "phi3", "olmo2"}
    | {"granite", "starcoder2", "stablelm", "glm4", "glm4_moe", "falcon", "gpt_bigcode"}
    | {"deepseek_v2", "deepseek_v3", "lamda", "gptj", "mpt"}
)
TYPES: Final = tuple(sorted(_PLAIN | _ALL_HEADS | set(_PATTERNS) | set(_WIDE_HEADS) | set(STATES)))
"""Values of ``model_type`` that are understood."""


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
        head_size: Channels of a head, where the layer has KV of heads.
    """

    kind: LayerKind
    numbers: int = 0
    window: int | None = None
    state: StateSize | None = None
    head_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that a simulation needs.

    Example:
        model = ModelShape.read(Path("Llama-3.1-8B/config.json"))
        model.kv_bytes_per_token()

    Attributes:
        dtype: Type of weights that are not quantised, and of KV unless another is asked for.
        weights: Weights in matrices, and their bytes as stored.
        positions: None: the file does not say it.
        kv_dtype: Type of KV; None: ``dtype``.
    """

    name: str
    layers: tuple[Layer, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    weights: Weights
    positions: Positions | None = None
    kv_dtype: str | None = None

    @property
    def parameters(self) -> int:
        """Weights in matrices, embeddings included."""
        return self.weights.dense + self.weights.experts + self.weights.ends

    @property
    def active(self) -> int:
        """Weights that one token goes through: not the other experts."""
        return self.weights.dense + self.weights.used + self.weights.ends

    @classmethod
    def read(
        cls, path: Path, *, name: str | None = None, stored: int | str | None = None
    ) -> ModelShape:
        """The shape that a file says. ``stored``: see :meth:`of`.

        Raises:
            ConfigError: it cannot be read, or see :meth:`of`.
        """
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}") from None
        name = name or path.parent.name or str(path)
        return cls.of(config, name=name, where=str(path), stored=stored)

    @classmethod
    def of(
        cls,
        config: object,
        *,
        name: str,
        where: str = "config.json",
        stored: int | str | None = None,
    ) -> ModelShape:
        """The shape that an object of that file says.

        Args:
            stored: Bytes of all weights, or ``quant_method`` of the weights in layers, whatever
                the file says.

        Raises:
            ConfigError: a field is missing or wrong, or layers are of a kind that is not described.
        """
        return _Reader(config, where).shape(name, stored)

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Bytes of KV that one more token adds, over all layers.

        Raises:
            ConfigError: ``dtype`` is not known.
        """
        return sum(layer.numbers for layer in self.layers) * self._kv_number(dtype)

    def kv_bytes(self, tokens: int, dtype: str | None = None) -> int:
        """Bytes that attention to so many tokens reads: windows are no longer than they are."""
        return self._kv_number(dtype) * sum(
            layer.numbers * min(tokens, layer.window or tokens) for layer in self.layers
        )

    def _kv_number(self, dtype: str | None) -> int:
        return bytes_of(dtype or self.kv_dtype or self.dtype)

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
        return round(self.weights.layer_bytes) + self.weights.ends * bytes_of(self.dtype)

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

    def shape(self, name: str, stored: int | str | None) -> ModelShape:
        if self.type not in TYPES:
            raise ConfigError(
                f"{self._where}: model_type: got {self.type!r}, which is not understood; one of "
                f"{', '.join(TYPES)}"
            )
        hidden = self.whole("hidden_size", "n_embd", "d_model")
        none = 1 if self.type in STATES else None
        heads = self.whole("num_attention_heads", "n_head", "n_heads", default=none)
        head_size = _WIDE_HEADS.get(self.type, hidden // heads)
        if self.type not in _HEADS_DIVIDE:
            head_size = self.whole("head_dim", "kv_channels", default=head_size)
        kv_heads = self._kv_heads(heads)
        layers = tuple(self._layers(kv_heads, head_size))
        sizes = (hidden, heads, kv_heads, head_size)
        weights = self._weights(sizes, layers, stored)
        return ModelShape(name, layers, *sizes, self._dtype(), weights, self._positions())

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
        """Factor by which scaled RoPE enlarges the length that the file names."""
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

    def value(self, name: str) -> Any:  # noqa: ANN401 - as JSON has it
        return self._config.get(name)

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
                return Layer("sliding", 2 * kv_heads * head_size, window, head_size=head_size)
            case "chunked":
                window = self.whole("attention_chunk_size")
                return Layer("chunked", 2 * kv_heads * head_size, window, head_size=head_size)
        # Some families give layers that attend to everything heads of another size.
        wide = self.whole("global_head_dim", default=head_size)
        heads = self.whole("num_global_key_value_heads", default=kv_heads)
        return Layer("full", 2 * heads * wide, head_size=wide)

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
        if self.type == "llama4_text":
            rope = (
                self._list(config["no_rope_layers"], count)
                if config.get("no_rope_layers")
                else None
            )
            return self._mixed("chunked", count, rope)
        window = config.get("sliding_window")
        if window and config.get("use_sliding_window", True):
            return self._mixed("sliding", count, None)
        return ["full"] * count

    def _mixed(
        self, kind: LayerKind, count: int, named: Sequence[object] | None
    ) -> list[LayerKind]:
        """Layers of this kind, but for those that attend to everything."""
        if named is not None:
            return [kind if entry else "full" for entry in named]
        every = self.whole(
            *("sliding_window_pattern", "no_rope_layer_interval"),
            default=_PATTERNS.get(self.type, count + 1),
        )
        return ["full" if number % every == 0 else kind for number in range(1, count + 1)]

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

    def _weights(
        self, sizes: tuple[int, int, int, int], layers: Sequence[Layer], stored: int | str | None
    ) -> Weights:
        hidden, *_ = sizes
        dense, experts, used = count(self, [self._attends(*sizes, of) for of in layers], hidden)
        head = self.whole("vocab_size") * hidden
        tied = self._outer.get("tie_word_embeddings", self.type in TIED)
        ends = head if self._config.get("tie_word_embeddings", tied) else 2 * head
        given = self._config.get("quantization_config") or self._outer.get("quantization_config")
        if stored is not None:
            given = {"quant_method": stored} if isinstance(stored, str) else None
        number = bytes_of(self._dtype())
        plain, of_experts = bits(given, 8 * number, self._where)
        parts = [dense * plain / 8, experts * of_experts / 8]
        if isinstance(stored, int):
            left = stored - ends * number
            if left <= 0:
                raise ConfigError(
                    f"{self._where}: weights: got {stored:,} bytes; embeddings alone have "
                    f"{ends * number:,}"
                )
            times = left / sum(parts)
            parts = [times * part for part in parts]
        return Weights(dense, experts, used, head, ends, *parts)

    def _attends(self, hidden: int, heads: int, kv_heads: int, head_size: int, layer: Layer) -> int:
        """Weights of a layer's attention."""
        if layer.kind == "latent":
            rope, rank = self.whole("qk_rope_head_dim"), self.whole("kv_lora_rank")
            plain, value = self.whole("qk_nope_head_dim"), self.whole("v_head_dim")
            query = heads * (plain + rope)
            low = self.whole_or_zero("q_lora_rank")
            asked = low * (hidden + query) if low else hidden * query
            return (
                asked + hidden * (rank + rope) + heads * (rank * (plain + value) + value * hidden)
            )
        size = layer.head_size or head_size
        numbers = 2 * kv_heads * head_size if layer.kind == "state" else layer.numbers
        if layer.kind == "full" and self._config.get("attention_k_eq_v"):
            numbers //= 2
        return hidden * (2 * heads * size + numbers)


MODELS: Final = DATA / "models.yaml"
INDEX: Final = "model.safetensors.index.json"


def stored_bytes(directory: Path) -> int | None:
    """Bytes of the weights in a model's directory, by safetensors; None: there are none.

    Raises:
        ConfigError: the index has no size.
    """
    index = directory / INDEX
    if not index.is_file():
        return sum(file.stat().st_size for file in directory.glob("*.safetensors")) or None
    try:
        size = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index}: metadata.total_size: {error!r}; give --weights") from None
    if not isinstance(size, int | float) or isinstance(size, bool) or size <= 0:
        raise ConfigError(f"{index}: metadata.total_size: got {size!r}; give --weights")
    return int(size)


def model_id(name: str) -> str | None:
    """Name by which vLLM finds a known model; None: its weights are not published."""
    found = read_mapping(MODELS)[name].get("id")
    return None if found is None else str(found)


@cache
def known_models() -> dict[str, ModelShape]:
    """Models of the papers and of today, by name: ``data/models.yaml``."""
    return {name: _described(name, entry) for name, entry in read_mapping(MODELS).items()}


def find_model(name: str, stored: int | str | None = None) -> ModelShape:
    """A model by name. ``stored``: see :meth:`ModelShape.of`.

    Raises:
        ConfigError: there is none of that name.
    """
    known = known_models()
    if name not in known:
        raise ConfigError(
            f"MODEL: {name!r} is no directory, no config.json, and no known name; known: "
            f"{', '.join(known)}"
        )
    return known[name] if stored is None else _described(name, read_mapping(MODELS)[name], stored)


def _described(name: str, entry: Mapping[str, Any], stored: int | str | None = None) -> ModelShape:
    if not isinstance(entry.get("source"), str):
        raise ConfigError(f"{MODELS}: {name}: source is missing: say where the shape is from")
    config = {key: value for key, value in entry.items() if key not in ("source", "id")}
    return ModelShape.of(config, name=name, where=f"{MODELS}: {name}", stored=stored)
