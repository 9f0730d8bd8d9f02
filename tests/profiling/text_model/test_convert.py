"""A GGUF file becomes the checkpoint that it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.profiling.text_model.tiny_gguf import WORDS, tiny_model, write_gguf
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.text_model.convert import convert


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_answers_as_the_one_it_was_made_of(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tied=tied)
    write_gguf(model, tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    ids = torch.tensor([[3, 9, 4, 4, 7, 11, 5, 3]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert again.config.rope_parameters["rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert again.config.tie_word_embeddings is tied


def test_its_tokenizer_knows_special_tokens_digits_and_the_template(tmp_path: Path) -> None:
    write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.encode("<|im_start|>ab12ab", add_special_tokens=False)
    assert [WORDS[i] for i in ids] == ["<|im_start|>", "ab", "1", "2", "ab"]
    assert tokenizer.decode(ids) == "<|im_start|>ab12ab"
    assert tokenizer.apply_chat_template([{"content": "ab"}], tokenize=False) == "<|im_start|>ab"


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"nothing of this kind" * 10)
    with pytest.raises(BenchError, match=r"a\.gguf is not a GGUF file"):
        convert(tmp_path / "a.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"architecture": "qwen2"}, "a model of kind 'qwen2'"),
        ({"split": "llama-bpe"}, "a tokenizer of kind"),
        ({"without": "blk.1.ffn_up.weight"}, "has no weight 'blk.1.ffn_up.weight'"),
        ({"beside": "blk.0.attn_q.bias"}, r"does not have: \['blk.0.attn_q.bias'\]"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, changed: dict[str, str], text: str
) -> None:
    write_gguf(tiny_model(), tmp_path / "tiny.gguf", **changed)
    with pytest.raises(BenchError, match=text):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
