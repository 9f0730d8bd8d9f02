"""Conversion of a Llama model in a GGUF file to a checkpoint as Hugging Face lays it out.

The result loads in vLLM and transformers: bfloat16 weights, tokenizer and chat template. Weights
that the file holds in fewer bits are dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_ssdkv.base.errors import BenchError

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, PreTrainedTokenizerFast

Field = Callable[[str], Any]
"""Value of a key of the file; None, if it has none."""

_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Weights of a layer: their names in GGUF and in Hugging Face's checkpoints."""
_WHOLE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL: Final = 3
"""Type of tokens such as ``<|im_end|>``, which no text makes."""
_TOKENIZER: Final = "gpt2", "smollm"
"""Kind of the tokenizer, and of the splits before it."""


def convert(source: Path, out: Path) -> None:
    """Write the checkpoint of the GGUF file ``source`` into the directory ``out``.

    Raises:
        BenchError: the file is none of GGUF, or of a model or tokenizer of another kind.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise BenchError(f"{source} is not a GGUF file: {error}") from error

    def field(name: str) -> Any:  # noqa: ANN401 - numbers, texts and lists
        found = reader.fields.get(name)
        return None if found is None else found.contents()

    kind = field("general.architecture")
    if kind != "llama":
        raise BenchError(f"{source}: a model of kind {kind!r}; only llama can be converted")
    _save_model(reader.tensors, field, out)
    tokenizer(field, str(source)).save_pretrained(out)


def unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """A projection of queries or keys, ``[heads * head size, hidden]``, with rows reordered.

    GGUF rotates pairs of neighbouring channels of a head, Hugging Face's Llama a channel of the
    first half with one of the second.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def state(weights: dict[str, torch.Tensor], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The weights, named as in GGUF, under the names and in the layout of Hugging Face.

    Raises:
        BenchError: one is missing, or has no place.
    """
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    left = dict(weights)
    found: dict[str, torch.Tensor] = {}
    try:
        for name, other in _WHOLE.items():
            if name != "output.weight" or not config.tie_word_embeddings:
                found[other] = left.pop(name)
        for layer in range(config.num_hidden_layers):
            for name, other in _LAYER.items():
                weight = left.pop(f"blk.{layer}.{name}.weight")
                weight = unpermuted(weight, heads[name]) if name in heads else weight
                found[f"model.layers.{layer}.{other}.weight"] = weight
    except KeyError as error:
        raise BenchError(f"the GGUF file has no weight {error}") from error
    if left:
        raise BenchError(f"weights of the GGUF file that Llama does not have: {sorted(left)}")
    return found


def _save_model(tensors: Any, field: Field, out: Path) -> None:  # noqa: ANN401 - gguf's tensors
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = {
        tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).to(
            torch.bfloat16
        )
        for tensor in tensors
    }
    config = LlamaConfig(
        hidden_size=field("llama.embedding_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        intermediate_size=field("llama.feed_forward_length"),
        vocab_size=len(field("tokenizer.ggml.tokens")),
        rope_theta=field("llama.rope.freq_base"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("llama.context_length"),
        tie_word_embeddings="output.weight" not in weights,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(
        state(weights, config), strict=not config.tie_word_embeddings, assign=True
    )
    model.tie_weights()
    model.save_pretrained(out)


def tokenizer(field: Field, source: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, with its chat template.

    Raises:
        BenchError: it splits text in a way that is not known here.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    if kind != _TOKENIZER:
        raise BenchError(f"{source}: a tokenizer of kind {kind}; only {_TOKENIZER} is known")
    words = field("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in field("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    types = field("tokenizer.ggml.token_type")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=words[field("tokenizer.ggml.bos_token_id")],
        eos_token=words[field("tokenizer.ggml.eos_token_id")],
        pad_token=words[field("tokenizer.ggml.padding_token_id")],
        additional_special_tokens=[
            word for word, of in zip(words, types, strict=True) if of == _CONTROL
        ],
    )
    fast.chat_template = field("tokenizer.chat_template")
    return fast
