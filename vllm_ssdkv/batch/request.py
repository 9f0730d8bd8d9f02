"""The request on a line of the input.

Users write these lines, so each is looked at before it is decoded: a line of 16 MiB may hold five
million lists, which take 400 MiB as objects, and vLLM seconds in which nobody else is served. What
is looked at here takes a few C calls per line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vllm_ssdkv.base.sizes import KIB, MIB
from vllm_ssdkv.batch.lines import MAX_LINE, LineError

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
ENDPOINTS: Final = (CHAT, COMPLETIONS, EMBEDDINGS)

MAX_CUSTOM_ID: Final = 512
"""Characters."""
MAX_MODEL: Final = 256
"""Characters of the name of a model: vLLM's errors repeat it."""
MAX_PARTS: Final = 131_072
"""Objects, lists and texts of one line, keys included."""
MAX_MESSAGE_PARTS: Final = 16_384
"""Parts of messages: vLLM tries up to twenty types for each, which takes as many microseconds."""
MAX_NUMBERS: Final = 1_048_576
"""Numbers of one line: a prompt of a million token ids."""
MAX_FIELDS: Final = 64 * KIB
"""Bytes of all fields of a body together, but for prompts, tools and lists of numbers."""
MAX_IDS: Final = 2 * MIB
"""Bytes of a list of numbers, such as of token ids, that is no prompt."""
MAX_SEARCHED: Final = 4 * KIB
"""Bytes of fields that vLLM looks for after each token, or tokenizes."""
MAX_DEPTH: Final = 32
"""Lists and objects around a value in a field of a body, the field's own included."""
MAX_TRANSFER_DEPTH: Final = 4
"""Depth of ``kv_transfer_params``, counted as for :data:`MAX_DEPTH`. vLLM passes these on to its
engine core as they are, and ends when they are nested some hundred deep."""
BYTES_PER_TOKEN: Final = 4
"""Estimate for a text whose tokens are not counted."""

_PROMPTS: Final = {
    CHAT: ("messages", "tools", "documents"),
    COMPLETIONS: ("prompt", "prompt_embeds"),
    EMBEDDINGS: ("input", "messages"),
}
"""Fields that may be long, by endpoint."""
_SEARCHED: Final = ("stop", "bad_words")
_TRANSFER: Final = "kv_transfer_params"
_TO_LISTS: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_ALL: Final = ", ".join(ENDPOINTS)
_CHUNK: Final = MIB
_OBJECTS: Final = re.compile(rb"\[\s*\{")
_ESCAPES: Final = re.compile(rb"\\*")
_OF_NUMBERS: Final = b"0123456789,[]- \t\r\n"
_NONE: Final = msgspec.Raw(b"")
_NULL: Final = (b"", b"null")
_NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request. ``None`` is no limit.

    Attributes:
        text: Bytes of one prompt that is text.
        answers: Answers, or embeddings, of one request.
        logprobs: Log probabilities of one request, a token's own and those of its alternatives.
            vLLM makes an object of each while nobody else is served.
        context: Tokens of a prompt and its answer. What is not given counts as that.
        under_way: Bytes of all lines that are under way together, or one line. As objects, and
            as what vLLM makes of them, texts take some ten times as much.
    """

    text: int | None = None
    answers: int | None = None
    logprobs: int | None = None
    context: int = 2**31
    under_way: int = MAX_LINE


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Size:
    """Demands of a request on the engine, as far as its line tells.

    Attributes:
        tokens: Estimated tokens of its prompts; exact where they are token ids.
        answers: Answers it gets: prompts times ``n``.
        answer_tokens: What each may have, or 0 where it does not say.
        logprobs: Log probabilities in its answer, at most.
    """

    tokens: int
    answers: int = 1
    answer_tokens: int = 0
    logprobs: int = 0


_Body = dict[str, msgspec.Raw]
"""The fields of a body, without making objects of what is in them."""


class _Line(msgspec.Struct):
    custom_id: msgspec.Raw = _NONE
    method: msgspec.Raw = _NONE
    url: msgspec.Raw = _NONE
    body: msgspec.Raw = _NONE


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a batch. It keeps the text of its line, and makes objects when asked."""

    custom_id: str
    endpoint: str
    model: str | None
    size: Size
    _raw: msgspec.Raw
    _fields: _Body

    def body(self) -> dict[str, Any]:
        """The body as objects.

        Raises:
            LineError: a text of it is not UTF-8, or a number is too large.
        """
        try:
            value: dict[str, Any] = msgspec.json.decode(self._raw)
        except _NOT_JSON as error:
            raise not_json(error, self.custom_id) from None
        return value

    def prompt(self) -> bytes:
        """Text that stands for the prompt when prompts are compared: requests whose prompts begin
        alike have values that begin alike.

        What a chat template puts first (tools), and what keeps KV apart (model, salt), comes
        first. This is the text before the template: rendering and tokenizing twice would cost
        more than the difference is worth, which is where blocks begin.
        """
        names = ("model", "cache_salt", "chat_template", "chat_template_kwargs", "tools")
        fields = [_get(self._fields, name) for name in names]
        return b"\n".join(map(memoryview, (*fields, _subject(self.endpoint, self._fields))))


def parse_request(text: bytes, endpoint: str | None, limits: Limits = NO_LIMITS) -> Request:
    """The request on a line.

    Args:
        text: The line; empty stands for one that was too long.
        endpoint: What every ``url`` of this batch has to be; None: any that there is.
        limits: What it may ask for.

    Raises:
        LineError: it is not one.
    """
    if not text:
        raise LineError("line_too_long", f"This line is longer than {MAX_LINE} bytes.")
    custom_id = None
    try:
        line, custom_id = _named(text)
        return _request(text, line, custom_id, endpoint, limits)
    except LineError as problem:
        problem.custom_id = custom_id
        raise
    except _NOT_JSON as error:
        raise not_json(error, custom_id) from None


def not_json(error: Exception, custom_id: str | None) -> LineError:
    """The error of a line that is no JSON."""
    if isinstance(error, RecursionError):
        problem = f"This line is nested more than {MAX_DEPTH} deep."
        return LineError("nested_too_deeply", problem, None, custom_id)
    return LineError("invalid_json_line", f"This line is not JSON: {error}", None, custom_id)


def custom_id_of(text: bytes) -> str | None:
    """The ``custom_id`` of a line, if it has one."""
    try:
        return _named(text)[1]
    except (LineError, *_NOT_JSON):
        return None


def _named(text: bytes) -> tuple[_Line, str]:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.ValidationError:
        raise LineError("invalid_json_line", "This line is not a JSON object.") from None
    custom_id = _short(line.custom_id, MAX_CUSTOM_ID)
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise LineError(
            "invalid_custom_id",
            f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID} characters.",
            "custom_id",
        )
    return line, custom_id


def _request(
    text: bytes, line: _Line, custom_id: str, endpoint: str | None, limits: Limits
) -> Request:
    if _short(line.method, 16) != "POST":
        raise LineError("invalid_method", "'method' must be 'POST'.", "method")
    url = _short(line.url, 64)
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise LineError("invalid_url", f"'url' must be one of {_ALL}.", "url")
    if endpoint is not None and url != endpoint:
        problem = f"'url' must be the batch's endpoint, {endpoint}."
        raise LineError("mismatched_url", problem, "url")
    _check_parts(text, MAX_PARTS, "This line has")
    try:
        body = msgspec.json.decode(line.body, type=_Body)
    except msgspec.ValidationError:
        raise LineError("invalid_body", "'body' must be an object.", "body") from None
    _check_parts(bytes(_get(body, "messages")), MAX_MESSAGE_PARTS, "'messages' has")
    _check_depth(body)
    _check_fields(url, body)
    if not _is_off(_get(body, "stream")):
        raise LineError("invalid_stream", "'stream' is not available in a batch.", "stream")
    model = _short(_get(body, "model"), MAX_MODEL)
    if model is not None and (not isinstance(model, str) or len(model) > MAX_MODEL):
        problem = f"'model' must be a string of up to {MAX_MODEL} characters."
        raise LineError("invalid_model", problem, "model")
    return Request(custom_id, url, model, _size(url, body, limits), line.body, body)


def _short(raw: msgspec.Raw, characters: int) -> object:
    """A value that may be a string of so many characters; anything longer is no string."""
    text = memoryview(raw)
    if not text:
        return None
    # A character takes 12 bytes at most, as two escapes.
    if len(text) > 12 * characters + 2:
        return ...
    return msgspec.json.decode(raw)


def _check_parts(text: bytes, most: int, where: str) -> None:
    """Refuse what would take much memory as objects, or much time.

    Raises:
        LineError: there are too many.
    """
    parts = text.count(b"{") + text.count(b"[") + text.count(b'"') // 2
    numbers = text.count(b",")
    if parts > most or numbers > MAX_NUMBERS:
        parts, numbers = _counted(text, most)
    if parts > most or numbers > MAX_NUMBERS:
        raise LineError(
            "line_too_complex",
            f"{where} more than {most} objects, lists and texts, or more than "
            f"{MAX_NUMBERS} numbers.",
        )


def _counted(text: bytes, most: int) -> tuple[int, int]:
    """Objects, lists and texts, and commas between values: a text counts as one, whatever is in it.

    Ends early when there are too many. Memory is bounded by ``_CHUNK``.
    """
    parts = numbers = texts = 0
    for outside, quotes in _outside_texts(text):
        texts = quotes // 2
        parts += outside.count(b"{") + outside.count(b"[")
        numbers += outside.count(b",")
        if parts + texts > most:
            break
    return parts + texts, numbers


def _outside_texts(text: bytes) -> Iterator[tuple[bytes, int]]:
    """JSON without the contents of its texts, a chunk at a time, and the quotes up to its end."""
    quotes = at = 0
    while at < len(text):
        end = min(at + _CHUNK, len(text))
        if text[end - 1 : end] == b"\\" and (run := _ESCAPES.match(text, end)):
            end = run.end() + 1  # no escape is cut in two
        pieces = text[at:end].replace(rb"\\", b"__").replace(rb"\"", b"__").split(b'"')
        outside = b"".join(pieces[quotes % 2 :: 2])
        quotes += len(pieces) - 1
        yield outside, quotes
        at = end


def _check_depth(body: _Body) -> None:
    """Refuse fields that are nested deeper than anybody needs: vLLM's recursions have no bound.

    Raises:
        LineError: one is.
    """
    for name, raw in body.items():
        most = MAX_TRANSFER_DEPTH if name == _TRANSFER else MAX_DEPTH
        text = bytes(raw)
        if text.count(b"[") + text.count(b"{") <= most:
            continue
        brackets = b"".join(
            outside.translate(_TO_LISTS, _NO_BRACKETS) for outside, _ in _outside_texts(text)
        )
        for _ in range(most):  # each turn takes away what is innermost
            brackets = brackets.replace(b"[]", b"")
        if brackets:
            raise LineError(
                "nested_too_deeply",
                f"'{name[:64]}' is nested more than {most} deep.",
                name[:64],
            )


def _get(body: _Body, name: str) -> msgspec.Raw:
    return body.get(name, _NONE)


def _check_fields(endpoint: str, body: _Body) -> None:
    """Refuse long fields, but for those that hold prompts, and numbers.

    vLLM repeats some in errors, looks for others after each token, or tokenizes them while nobody
    else is served.

    Raises:
        LineError: one is too long, or they are together.
    """
    together = 0
    for name, raw in body.items():
        size = len(name) + len(memoryview(raw))
        if name in _PROMPTS[endpoint]:
            continue
        most = MAX_SEARCHED if name in _SEARCHED else MAX_FIELDS
        if size > MAX_SEARCHED and not _is_text(raw):
            most = MAX_IDS
        else:
            together += size
        if size > most or together > MAX_FIELDS:
            raise LineError(
                "field_too_long",
                f"'{name[:64]}' is longer than {most} bytes, or makes all fields but prompts "
                f"longer than {MAX_FIELDS}.",
                name[:64],
            )


def _is_text(raw: msgspec.Raw) -> bool:
    """Check whether there is more in it than lists of numbers."""
    return bool(bytes(raw).translate(None, _OF_NUMBERS))


def _subject(endpoint: str, body: _Body) -> msgspec.Raw:
    """The field that holds the prompt."""
    names = ("prompt", "prompt_embeds")
    if endpoint != COMPLETIONS:
        names = ("input", "messages") if endpoint == EMBEDDINGS else ("messages", "messages")
    first, second = (_get(body, name) for name in names)
    return first if memoryview(first) else second


def _size(endpoint: str, body: _Body, limits: Limits) -> Size:
    subject = _subject(endpoint, body)
    prompts, tokens = _prompts(subject)
    text = 0
    if not tokens:
        text = sum(len(memoryview(_get(body, name))) for name in _PROMPTS[endpoint])
        tokens = text // BYTES_PER_TOKEN
    if limits.text is not None and text > prompts * limits.text:
        problem = f"A prompt for this model cannot have more than {limits.text} bytes."
        raise LineError("prompt_too_long", problem)
    answers = prompts * _answers(_get(body, "n"))
    if limits.answers is not None and answers > limits.answers:
        raise LineError(
            "too_many_answers",
            f"This line asks for {answers} answers at a time, and batches of this server have "
            f"{limits.answers} places (batch.concurrency): use more lines, or a smaller 'n'.",
        )
    if endpoint == EMBEDDINGS:
        return Size(tokens, answers)
    given = (_number(_get(body, f"max_{name}")) for name in ("completion_tokens", "tokens"))
    answer_tokens = next(filter(None, given), 0)
    longest = min(text or tokens, prompts * limits.context)
    answer = min(answer_tokens or limits.context, limits.context)
    of_a_token = _answer_logprobs(body)
    if not _is_off(_get(body, "use_beam_search")):
        of_a_token = max(of_a_token, 1 + 2 * answers)  # each beam is asked for twice as many
    logprobs = longest * _prompt_logprobs(body) + answers * answer * of_a_token
    if limits.logprobs is not None and logprobs > limits.logprobs:
        raise LineError(
            "too_many_logprobs",
            f"This line may have {logprobs} log probabilities in its answer, and one of this "
            f"server {limits.logprobs}: ask for fewer alternatives, or a smaller 'max_tokens'.",
            "logprobs",
        )
    return Size(tokens, answers, answer_tokens, logprobs)


def _answer_logprobs(body: _Body) -> int:
    """Log probabilities of one token of an answer."""
    return max(_alternatives(_get(body, "logprobs")), _alternatives(_get(body, "top_logprobs")))


def _prompt_logprobs(body: _Body) -> int:
    """Log probabilities of one token of a prompt."""
    echoed = 0 if _is_off(_get(body, "echo")) else _answer_logprobs(body)
    return max(_alternatives(_get(body, "prompt_logprobs")), echoed)


def _alternatives(raw: msgspec.Raw) -> int:
    """Log probabilities of a token with so many alternatives, itself included; -1: all."""
    if _is_off(raw):
        return 0
    value = _short(raw, 1)
    return 1 + value if isinstance(value, int) and value >= 0 else 2**31


def _is_off(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:6]) in (*_NULL, b"false")


def _prompts(subject: msgspec.Raw) -> tuple[int, int]:
    """Number of prompts, and of their tokens where they are token ids. Messages are one prompt."""
    text = memoryview(subject)
    if bytes(text[:1]) != b"[" or _OBJECTS.match(text):
        return 1, 0
    if not _is_text(subject):
        numbers = bytes(text)
        return max(1, numbers.count(b"[") - 1), numbers.count(b",") + 1
    return max(1, len(msgspec.json.decode(text, type=list[msgspec.Raw]))), 0


def _answers(n: msgspec.Raw) -> int:
    """Answers per prompt. vLLM would take "7" for 7, so what is no number is refused here."""
    if bytes(memoryview(n)[:5]) in _NULL:
        return 1
    if not (value := _number(n)):
        raise LineError("invalid_n", "'n' must be a whole number above 0.", "n")
    return value


def _number(raw: msgspec.Raw) -> int:
    """A whole number above 0; 0 stands for anything else."""
    value = _short(raw, 1)
    return value if type(value) is int and 0 < value < 2**31 else 0
