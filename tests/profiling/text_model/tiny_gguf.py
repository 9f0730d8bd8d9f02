"""A tiny Llama, and its GGUF file as llama.cpp writes it."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = (*SPECIAL, *sorted(ByteLevel.alphabet()), "ab")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_model(*, tied: bool = True) -> LlamaForCausalLM:
    """Two layers, four query and two KV heads; attention that its rotation matters to."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(WORDS),
        rope_theta=50_000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    model: LlamaForCausalLM,
    path: Path,
    *,
    architecture: str = "llama",
    split: str = "smollm",
    without: str = "",
    beside: str = "",
) -> None:
    """Write the model; of a wrong file what is wrong."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(list(WORDS))
    writer.add_token_types([3 if word in SPECIAL else 1 for word in WORDS])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_chat_template(TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in _weights(model, heads).items():
        if name != without:
            writer.add_tensor(name, weight.float().numpy())
    if beside:
        writer.add_tensor(beside, torch.zeros(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(model: LlamaForCausalLM, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """Weights as GGUF names and lays them out."""
    found = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        short = name.removesuffix(".weight")
        layer = ""
        if short.startswith("model.layers."):
            _, _, number, short = short.split(".", 3)
            layer = f"blk.{number}."
        short = _NAMES[short]
        # As llama.cpp's convert_hf_to_gguf.py does it.
        count = heads.get(short, 1)
        halves = count, 2, weight.shape[0] // count // 2, *weight.shape[1:]
        permuted = weight.reshape(halves).swapaxes(1, 2).reshape(weight.shape)
        found[f"{layer}{short}.weight"] = permuted if short in heads else weight
    return found
