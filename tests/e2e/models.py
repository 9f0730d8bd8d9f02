"""Tiny, randomly initialised, deterministic models that vLLM loads like any other.

Trained weights are not needed to compare two engines token by token, but three properties are,
and the initialisation here is chosen for them: greedy decoding does not fall into a loop, the best
two logits are rarely close enough for float rounding to swap them, and attention spreads over a
few dozen tokens anywhere in the context (scores have a standard deviation of about 2.5), so lost or
stale KV changes the logits. Attention sinks take a good part of it.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessor,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB = 512
MAX_POSITIONS = 16384
BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")

# Output standard deviation of each projection for inputs of unit variance. Query and key at 1.6
# give scores of 1.6 * 1.6 = 2.56; the value and output gains keep attention as loud as the
# residual it is added to.
QUERY_KEY_GAIN = 1.6
VALUE_GAIN = 2.0
OUTPUT_GAIN = 2.0
MLP_GAIN = 1.4
ROUTER_GAIN = 2.0
LOGIT_GAIN = 3.0
BIAS_STD = 0.1
GEMMA2_CAP = 6.0
"""Its products have a standard deviation of about 10: most of them feel the cap."""
GEMMA2_WINDOW = 64
GEMMA3_WINDOW = 64
GEMMA4_WINDOW = 80
GPT_OSS_WINDOW = 96
SINK_LOGIT = 7.0
"""A good part of what a few hundred keys weigh in the softmax."""
POSITION_STD = 0.5
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
"""Options of every model."""


def _tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: every string encodes, every id below its size decodes."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = ["a small tokenizer for small models", "the cache keeps what the model has seen"]
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        pad_token=SPECIAL_TOKENS[PAD],
    )


def _gain(name: str) -> float:
    if "q_proj" in name or "k_proj" in name:
        return QUERY_KEY_GAIN
    if "v_proj" in name:
        return VALUE_GAIN
    if "o_proj" in name or "out_proj" in name:
        return OUTPUT_GAIN
    if "lm_head" in name:
        return LOGIT_GAIN
    if "gate.weight" in name:
        return ROUTER_GAIN
    return MLP_GAIN


def _std(name: str, parameter: torch.Tensor) -> float:
    if "embed_positions" in name:
        return POSITION_STD
    if "embed_tokens" in name:
        return 1.0
    if parameter.ndim < 2:
        return BIAS_STD
    return _gain(name) / math.sqrt(parameter.shape[-1])


def _initialise(model: PreTrainedModel, seed: int) -> None:
    """Overwrite every parameter; the order of names, not of modules, fixes the random stream."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * _std(name, parameter))
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.add_(QUERY_KEY_GAIN)
                if name.endswith("q_norm.weight") and model.config.model_type == "gemma4_text":
                    parameter.div_(math.sqrt(len(parameter)))  # its scores are not divided
            elif "embed_tokens" in name and model.config.tie_word_embeddings:
                parameter.div_(
                    4 * math.sqrt(parameter.shape[-1])
                )  # else the same token would follow
            elif name.endswith("sinks"):
                parameter.add_(SINK_LOGIT)
            elif ("norm" in name or "ln_f" in name) and name.endswith("weight"):
                parameter.add_(1.0)
                if "embeddings" in name:
                    parameter.div_(8)  # for the same reason


def _save(model: PreTrainedModel, path: Path, seed: int) -> Path:
    model = model.to(torch.float32).eval()
    _initialise(model, seed)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def make_llama(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    hidden: int = 256,
) -> Path:
    """Grouped-query attention with rotary positions."""
    config = LlamaConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    return _save(LlamaForCausalLM(config), path, seed)


def make_scaled(path: Path, *, scales: tuple[float, float] = (0.3, 1.7)) -> Path:
    """Qwen3 whose files have scales of K and V in fp8: in each layer others, none a power of 2."""
    make_qwen3(path)
    config = json.loads((path / "config.json").read_text())
    kind = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": kind | {"symmetric": True},
    }
    (path / "config.json").write_text(json.dumps(config))
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for layer in range(config["num_hidden_layers"]):
        for name, scale in zip("kv", scales, strict=True):
            of_layer = torch.tensor(scale * (1 + layer / 5))
            tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = of_layer
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def make_qwen3(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    hidden: int = 256,
) -> Path:
    """Grouped-query attention that normalises each head's query and key before rotating them."""
    config = Qwen3Config(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    return _save(Qwen3ForCausalLM(config), path, seed)


def make_opt(
    path: Path, *, seed: int = 0, layers: int = 2, heads: int = 4, head_dim: int = 32
) -> Path:
    """Multi-head attention (one KV head per query head), learned positions, biases, layer norm."""
    hidden = heads * head_dim
    config = OPTConfig(
        **COMMON,
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        ffn_dim=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        do_layer_norm_before=True,
        dropout=0.0,
    )
    return _save(OPTForCausalLM(config), path, seed)


def make_mixtral(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 1,
    head_dim: int = 64,
    hidden: int = 128,
    experts: int = 4,
) -> Path:
    """Mixture of experts (two of `experts` per token) over multi-query attention."""
    config = MixtralConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_local_experts=experts,
        num_experts_per_tok=2,
        sliding_window=None,
    )
    return _save(MixtralForCausalLM(config), path, seed)


def make_bloom(path: Path, *, seed: int = 0, heads: int = 4, head_dim: int = 64) -> Path:
    """Positions by ALiBi only, one KV head per query head; the last head sees the farthest."""
    config = BloomConfig(
        **(COMMON | {"tie_word_embeddings": True}),
        hidden_size=heads * head_dim,
        n_layer=2,
        n_head=heads,
        hidden_dropout=0.0,
    )
    return _save(BloomForCausalLM(config), path, seed)


def _gemma_sizes(layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    hidden = heads * head_dim // 2
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
    }


def make_gemma2(
    path: Path, *, seed: int = 0, heads: int = 4, kv_heads: int = 2, head_dim: int = 64
) -> Path:
    """Soft-capped logits, and sliding windows in every other layer."""
    config = Gemma2Config(
        **(COMMON | {"tie_word_embeddings": True}),
        **_gemma_sizes(4, heads, kv_heads, head_dim),
        sliding_window=GEMMA2_WINDOW,
        attn_logit_softcapping=GEMMA2_CAP,
    )
    return _save(Gemma2ForCausalLM(config), path, seed)


def make_large_heads(path: Path) -> Path:
    """Llama with heads of 512 channels."""
    return make_llama(path, layers=2, heads=2, kv_heads=1, head_dim=512)


def make_gemma3(
    path: Path, *, seed: int = 0, heads: int = 4, kv_heads: int = 2, head_dim: int = 64
) -> Path:
    """Sliding windows in three of five layers, which vLLM puts into two groups."""
    config = Gemma3TextConfig(
        **COMMON,
        **_gemma_sizes(5, heads, kv_heads, head_dim),
        sliding_window=GEMMA3_WINDOW,
        layer_types=[
            f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")
        ],
    )
    return _save(Gemma3ForCausalLM(config), path, seed)


def make_gemma4(path: Path, *, seed: int = 0, full_is_larger: bool = True) -> Path:
    """Layers with full attention and with windows, of different heads, so that vLLM gives the
    smaller KV of a token blocks of more tokens."""
    config = Gemma4TextConfig(
        **COMMON,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2 if full_is_larger else 4,
        head_dim=64,
        global_head_dim=128,
        attention_k_eq_v=not full_is_larger,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        sliding_window=GEMMA4_WINDOW,
        layer_types=[
            f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")
        ],
    )
    return _save(Gemma4ForCausalLM(config), path, seed)


def make_gemma4_windows(path: Path) -> Path:
    """As :func:`make_gemma4`; windows have more KV of a token, full attention larger blocks."""
    return make_gemma4(path, full_is_larger=False)


def make_gpt_oss(
    path: Path, *, seed: int = 0, heads: int = 4, kv_heads: int = 2, head_dim: int = 64
) -> Path:
    """Attention sinks in every layer, sliding windows in every other one, experts."""
    hidden = heads * head_dim
    config = GptOssConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=GPT_OSS_WINDOW,
    )
    return _save(GptOssForCausalLM(config), path, seed)


def make_longrope(path: Path, *, seed: int = 0, heads: int = 4, head_dim: int = 64) -> Path:
    """Phi-3 whose keys are rotated by one table for contexts up to 1024 tokens, by another above.

    vLLM chooses when it starts, by the longest context that it is to serve.
    """
    hidden = heads * head_dim
    config = Phi3Config(
        **(COMMON | {"max_position_embeddings": 4096}),
        original_max_position_embeddings=1024,
        rope_scaling={
            "rope_type": "longrope",
            "short_factor": [1 + 0.02 * i for i in range(head_dim // 2)],
            "long_factor": [1 + 0.6 * i for i in range(head_dim // 2)],
        },
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
    )
    return _save(Phi3ForCausalLM(config), path, seed)


def make_minimax_m2(path: Path) -> Path:
    """Configuration of a model whose class writes into it when vLLM makes it. No weights."""
    config = MiniMaxM2Config(
        **(COMMON | {"max_position_embeddings": 4096}),
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        rotary_dim=64,
        scoring_func="softmax",
    )
    config.architectures = ["MiniMaxM2ForCausalLM"]
    config.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def make_blip2(path: Path, *, seed: int = 0, image_tokens: int = 16, side: int = 28) -> Path:
    """OPT that sees an image as the first ``image_tokens`` tokens of its prompt."""
    width = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    text = OPTConfig(
        **COMMON,
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        do_layer_norm_before=True,
        dropout=0.0,
    )
    vision = Blip2VisionConfig(**width, hidden_size=64, image_size=side, patch_size=14)
    former = Blip2QFormerConfig(**width, hidden_size=64, encoder_hidden_size=64, vocab_size=8)
    config = Blip2Config(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        qformer_config=former.to_dict(),
        num_query_tokens=image_tokens,
        image_token_index=VOCAB - 1,
        tie_word_embeddings=False,
    )
    _save(Blip2ForConditionalGeneration(config), path, seed)
    images = BlipImageProcessor(size={"height": side, "width": side})
    Blip2Processor(images, _tokenizer(), num_query_tokens=image_tokens).save_pretrained(path)
    # As older versions of transformers save it: settings of images in a file of their own.
    own = path / "processor_config.json"
    settings = json.loads(own.read_text())
    shown = settings.pop("image_processor")
    (path / "preprocessor_config.json").write_text(json.dumps(shown))
    own.write_text(json.dumps(settings))
    return path


def make_qwen3_next(
    path: Path, *, seed: int = 0, heads: int = 4, kv_heads: int = 2, hidden: int = 256
) -> Path:
    """Linear attention (gated delta rule) in three of four layers, each a group of its own."""
    config = Qwen3NextConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden,
        shared_expert_intermediate_size=hidden,
    )
    return _save(Qwen3NextForCausalLM(config), path, seed)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": make_llama,
    "qwen3": make_qwen3,
    "scaled": make_scaled,
    "opt": make_opt,
    "mixtral": make_mixtral,
    "bloom": make_bloom,
    "gemma2": make_gemma2,
    "gemma3": make_gemma3,
    "gemma4": make_gemma4,
    "gemma4_windows": make_gemma4_windows,
    "gpt_oss": make_gpt_oss,
    "large_heads": make_large_heads,
    "qwen3_next": make_qwen3_next,
}


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Uniformly random token ids without special tokens, one list per length."""
    source = random.Random(seed)
    return [[source.randrange(len(SPECIAL_TOKENS), VOCAB) for _ in range(n)] for n in lengths]
