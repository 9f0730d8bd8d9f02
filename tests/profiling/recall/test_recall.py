"""The demo model's questions: its words, its tasks, and where the answers lie."""

from __future__ import annotations

import hashlib
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.profiling.recall import recall


def spans(haystack: tuple[int, ...], needle: tuple[int, ...]) -> list[int]:
    """Every position at which `needle` begins in `haystack`."""
    width = len(needle)
    return [i for i in range(len(haystack) - width + 1) if haystack[i : i + width] == needle]


def ids(words: str) -> tuple[int, ...]:
    vocabulary = recall.vocabulary()
    return tuple(vocabulary.index(word) for word in words.split())


def test_the_vocabulary_is_the_model_s() -> None:
    words = recall.vocabulary()
    config = json.loads((recall.MODEL_DIR / "config.json").read_text())
    assert len(words) == len(set(words)) == config["vocab_size"]
    assert config["head_dim"] == recall.HEAD_SIZE
    assert {word: words.index(word) for word in recall.SYMBOLS} == recall.SYMBOLS
    assert words[recall.FILLER.start : recall.FILLER.start + 4] == ("the", "of", "and", "to")
    content = words[recall.CONTENT.start : recall.CONTENT.stop]
    assert len(content) == 512
    vowels = set("aeiou")
    assert all(
        len(w) == 4 and {w[1], w[3]} <= vowels and not {w[0], w[2]} & vowels for w in content
    )
    assert words[recall.FILLER.stop - 1] not in content
    assert words[recall.CONTENT.stop].startswith("<x")


def test_the_tokenizer_makes_the_same_ids_of_the_text() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(recall.MODEL_DIR)
    prompt = recall.ask("chain", 2048, 3).prompt
    assert tuple(tokenizer(recall.text(prompt))["input_ids"]) == prompt
    chat = [{"role": "user", "content": recall.text(prompt[1:])}]
    templated = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tuple(tokenizer(templated, add_special_tokens=False)["input_ids"]) == prompt


def test_the_weights_are_whole() -> None:
    """What the figures in the model's README were measured with."""
    weights = (recall.MODEL_DIR / "model.safetensors").read_bytes()
    assert (
        hashlib.sha256(weights).hexdigest()
        == "0b61a408c1c603687af1fa29872cfc34182c3bdd3da74ab909226778c97e2726"
    )


@given(
    task=st.sampled_from(recall.TASKS),
    tokens=st.integers(recall.MIN_CONTEXT, 6000),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_a_question_can_be_answered_from_the_older_half_only(
    task: recall.Task, tokens: int, seed: int
) -> None:
    question = recall.ask(task, tokens, seed)
    assert len(question.prompt) == tokens
    assert question.prompt[0] == recall.SYMBOLS["<bos>"]
    assert tokens // 2 <= question.distance < tokens
    asked = {"multikey": 4, "single": 4, "chain": 4, "copy": 3}[task]
    context, question_ids = question.prompt[:-asked], question.prompt[-asked:]
    ends = [span + width for span, width in needed_spans(task, context, question_ids, question)]
    assert max(ends) == tokens - question.distance


def needed_spans(
    task: recall.Task,
    context: tuple[int, ...],
    asked: tuple[int, ...],
    question: recall.Question,
) -> list[tuple[int, int]]:
    """Where the needles are from which the answer follows; each must occur exactly once."""
    if task == "copy":
        needles = [ids("[") + asked[1:] + question.answer]
    elif task == "chain":
        links = " ".join(recall.text(asked[1:] + question.answer).split()).removesuffix(" ;")
        pointers, value = links.split(" = ")
        keys = pointers.split(" -> ")
        assert len(keys) == 5
        needles = [ids(f"{a} -> {b} ;") for a, b in itertools.pairwise(keys)]
        needles.append(ids(f"{keys[-1]} = {value} ;"))
    else:
        needles = [asked[1:] + question.answer]
    found = [(spans(context, needle), len(needle)) for needle in needles]
    assert all(len(starts) == 1 for starts, _ in found)
    return [(starts[0], width) for starts, width in found]


def test_tasks_differ_in_what_else_is_in_the_context() -> None:
    equals = recall.SYMBOLS["="]
    count = {t: recall.ask(t, 4096, 0).prompt.count(equals) for t in ("single", "multikey")}
    assert count == {"single": 2, "multikey": 1 + 4096 // 4 // 8}


def test_the_same_arguments_give_the_same_question_and_others_another() -> None:
    assert recall.ask("copy", 2048, 1) == recall.ask("copy", 2048, 1)
    prompts = {recall.ask(task, 2048, seed).prompt for task in recall.TASKS for seed in (1, 2)}
    assert len(prompts) == 2 * len(recall.TASKS)


@pytest.mark.parametrize("tokens", [0, recall.MIN_CONTEXT - 1, recall.MAX_CONTEXT + 1])
def test_lengths_that_the_model_was_not_tried_at_are_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match="1024 to 32768"):
        recall.ask("single", tokens, 0)


def test_filler_fills_and_needles_are_kept_whole() -> None:
    rng = np.random.default_rng(0)
    needles = [np.arange(400, 400 + n) for n in (3, 5, 8)]
    tokens, ends = recall._scatter(rng, needles, 16)
    assert sorted(tokens.tolist()) == sorted(np.concatenate(needles).tolist()), "no room for filler"
    for needle, end in zip(needles, ends.tolist(), strict=True):
        assert tokens[end - len(needle) : end].tolist() == needle.tolist()
