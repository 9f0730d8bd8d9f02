"""Requests to plan for: from prompts, from lengths, or from what a server counted."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from vllm_ssdkv.base.errors import ConfigError

BYTES_PER_TOKEN: Final = 4.0
"""Bytes per token of text without a tokenizer."""
DEFAULT_OUTPUT: Final = 256
"""Tokens of an answer that no request limits."""
MOST_TOKENS: Final = 100_000_000
MOST_AT_A_TIME: Final = 4096
_END: Final = re.compile(r"\s*([0-9][0-9_]*)([kK]?)\s*", re.ASCII)
_Tokens = TypeVar("_Tokens", list[int], bytes)
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests on the mean, and the longest.

    Example:
        Workload(prompt=32768, output=512, longest=40000, at_a_time=8)

    Attributes:
        prompt, output: Tokens of a request, on the mean.
        longest: Tokens of the longest request, its output included.
        at_a_time: Requests that want to be served at a time.
        found: Part of the prompts' tokens that an earlier request had in its prefix.
        notes: What was assumed.
    """

    prompt: float
    output: float
    longest: int
    at_a_time: int = 8
    found: float = 0.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check sizes. Raises ConfigError."""
        for name, least, most in (
            ("prompt", 1, MOST_TOKENS),
            ("output", 1, MOST_TOKENS),
            ("longest", 1, 2 * MOST_TOKENS),
            ("at_a_time", 1, MOST_AT_A_TIME),
            ("found", 0, 1),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"workload: {name}: got {value!r}; {least} to {most:,}")

    def at_most(self, tokens: int) -> Workload:
        """The same, its longest request no longer: a server's buckets are wider than its limit."""
        return replace(self, longest=min(self.longest, tokens))

    @property
    def tokens(self) -> int:
        """Tokens of a context in the middle of its output, on the mean."""
        return max(1, round(self.prompt + self.output / 2))

    @property
    def kept_tokens(self) -> float:
        """Tokens of a request at its end, on the mean."""
        return self.prompt + self.output

    @property
    def new_tokens(self) -> float:
        """Tokens of a request that are computed where others are found."""
        return self.prompt * (1 - self.found) + self.output


def of_lengths(prompt: str, output: str, *, at_a_time: int, found: float) -> Workload:
    """Requests whose lengths are spread evenly: ``32768``, or ``1024-8192``.

    With a K, which is 1,024 tokens, a prompt is a context with its answer: ``128K`` fits a model of
    131,072 positions.

    Raises:
        ConfigError: it names the option.
    """
    least, most = _range("--output", output)
    low, high = _range("--prompt", prompt, answer=most)
    return Workload((low + high) / 2, (least + most) / 2, high + most, at_a_time, found)


def _range(option: str, text: str, *, answer: int = 0) -> tuple[int, int]:
    """Both ends; one with a K is less by ``answer``."""
    low, _, high = text.partition("-")
    ends = [_END.fullmatch(part) for part in (low, high or low)]
    first, last = (_tokens(end, answer) if end else 0 for end in ends)
    if not all(ends):
        raise ConfigError(f"{option}: got {text!r}; tokens, such as 32768, 128K or 1024-8192")
    if not 1 <= first <= last <= MOST_TOKENS:
        raise ConfigError(f"{option}: got {text!r}; 1 to {MOST_TOKENS:,}, the smaller one first")
    return first, last


def _tokens(end: re.Match[str], answer: int) -> int:
    number = int(end[1].replace("_", ""))
    return 1024 * number - answer if end[2] else number


def of_prompts(path: Path, *, at_a_time: int, tokenize: Tokenize | None) -> Workload:
    """Requests of a file in OpenAI's batch form; what they share is counted by their prefixes.

    Raises:
        ConfigError: it cannot be read, has no request, or a line is none: it names line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        text = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ConfigError(f"cannot read {path}: {text}") from error
    prompts, outputs, unlimited = [], [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text, limit = _request(line, f"{path}: line {number}")
        prompts.append(text)
        unlimited += limit is None
        outputs.append(limit or DEFAULT_OUTPUT)
    if not prompts:
        raise ConfigError(f"{path}: no request; give a line of JSON for each")
    notes = []
    if tokenize is None:
        notes.append(f"no tokenizer: a token is taken as {BYTES_PER_TOKEN:g} bytes of text")
        lengths = [max(1, round(len(text.encode()) / BYTES_PER_TOKEN)) for text in prompts]
        shared = _shared([text.encode() for text in prompts])
    else:
        tokens = [tokenize(text) for text in prompts]
        lengths = [max(1, len(one)) for one in tokens]
        shared = _shared(tokens)
    if unlimited:
        notes.append(f"{unlimited} requests have no limit of output: {DEFAULT_OUTPUT} tokens each")
    longest = max(prompt + output for prompt, output in zip(lengths, outputs, strict=True))
    mean, output = statistics.fmean(lengths), statistics.fmean(outputs)
    most = min(at_a_time, len(prompts))
    return Workload(mean, output, longest, most, shared, tuple(notes))


def _request(line: str, where: str) -> tuple[str, int | None]:
    """Text of a request, and its limit of output."""
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from None
    body = content.get("body", content) if isinstance(content, dict) else None
    if not isinstance(body, dict):
        raise ConfigError(f"{where}: body: missing; give an object with messages or prompt")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(f"{where}: body.max_tokens: got {limit!r}; a whole number above 0")
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, str):
        return prompt, limit
    if isinstance(messages, list) and messages:
        return "\n".join(_texts(messages, where)), limit
    raise ConfigError(f"{where}: body.messages: missing; give messages, or a prompt that is text")


def _texts(messages: Iterable[Any], where: str) -> Iterable[str]:
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        else:
            raise ConfigError(f"{where}: body.messages[{number}].content: got {content!r}; text")


def _shared(prompts: Sequence[_Tokens]) -> float:
    """Part of all prompts that an earlier one begins with, too.

    Of sorted prompts a neighbour has the longest common prefix. The first of those that share one
    is not counted, whichever it is.
    """
    ordered = sorted(prompts)
    common = sum(_common(a, b) for a, b in itertools.pairwise(ordered))
    total = sum(len(prompt) for prompt in ordered)
    return common / total if total else 0.0


def _common(a: _Tokens, b: _Tokens) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of a server since its start.

    Attributes:
        prompts, prompt_tokens: Requests, and tokens of all prompts.
        outputs, output_tokens: Requests, and tokens of all answers.
        longest_prompt, longest_output: Upper ends of the buckets that hold the longest.
        asked, found: Tokens that were looked up in stores, and found there.
        running: Requests that run or wait now.
    """

    prompts: float
    prompt_tokens: float
    outputs: float
    output_tokens: float
    longest_prompt: float
    longest_output: float
    asked: float
    found: float
    running: int


def of_counted(counted: Counted, url: str, *, at_a_time: int | None) -> Workload:
    """Requests as a server counted them.

    Raises:
        ConfigError: it has answered none.
    """
    if not counted.prompts or not counted.outputs:
        raise ConfigError(f"{url}: vllm:request_prompt_tokens: no request has ended yet; try later")
    prompt = max(1.0, counted.prompt_tokens / counted.prompts)
    output = max(1.0, counted.output_tokens / counted.outputs)
    longest = round(max(prompt, counted.longest_prompt) + max(output, counted.longest_output))
    found = min(1.0, counted.found / counted.asked) if counted.asked else 0.0
    notes = () if at_a_time or counted.running else ("nothing runs now: one request at a time",)
    most = at_a_time or max(1, counted.running)
    return Workload(prompt, output, longest, most, found, notes)
