"""Problems of given options, as one line per problem for the user."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.schema import OptionModel, allowed_text, model_of, walk

_Options = TypeVar("_Options", bound=OptionModel)

_MAX_VALUE_CHARS: Final = 120


def path_text(location: Sequence[int | str]) -> str:
    """``("devices", 0, "path")`` as ``devices[0].path``."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _find(
    model: type[BaseModel], location: Sequence[int | str]
) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """The model that holds the last part of the location, and that field where it exists."""
    holder: type[BaseModel] | None = model
    field: FieldInfo | None = None
    for part in location:
        if isinstance(part, int):
            continue
        if field is not None:
            holder = model_of(field.annotation)
        if holder is None:
            return None, None
        field = holder.model_fields.get(part)
        if field is None:
            return holder, None
    return holder, field


def _given(raw: object, error: ErrorDetails) -> str:
    """The value as the user wrote it, shortened."""
    value: object = raw
    for part in error["loc"]:
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            value = value[part]
            continue
        if not isinstance(value, Mapping) or part not in value:
            value = error["input"]
            break
        value = value[part]
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _unknown(model: type[BaseModel], location: Sequence[int | str]) -> str:
    holder, _ = _find(model, location)
    names = list(holder.model_fields) if holder is not None else []
    name = str(location[-1])
    if holder is not None and issubclass(holder, OptionModel) and name in holder.removed:
        return f"{path_text(location)}: {holder.removed[name]}"
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    elsewhere = [option.path for option in walk(model) if option.path.endswith(f".{name}")]
    if elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    elif near:
        hint = f"did you mean {path_text([*location[:-1], near[0]])}?"
    else:
        hint = f"known here: {', '.join(names)}"
    return f"{path_text(location)}: unknown option; {hint}"


def checked_options(
    model: type[_Options],
    options: Mapping[str, object],
    where: str,
    as_json: Callable[[object], object] | None = None,
) -> _Options:
    """Check options and freeze them.

    The values are taken as JSON whatever way they came (command line, file, Python), so the same
    text means the same everywhere.

    Args:
        model: The class of the options.
        options: What was given.
        where: Where it comes from, for the text of errors.
        as_json: Makes JSON of a value that is none.

    Raises:
        ConfigError: one line per problem, each with the option's path, the value given and what is
            allowed; for an unknown name the nearest valid one.
    """
    try:
        text = json.dumps(dict(options), default=as_json)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    try:
        return model.model_validate_json(text)
    except ValidationError as failure:
        lines = problems(model, json.loads(text), failure)
        raise ConfigError(f"{where}:\n" + "\n".join(f"  {line}" for line in lines)) from None


def problems(model: type[BaseModel], raw: object, failure: ValidationError) -> list[str]:
    """One line per problem: the option, the value given, what is allowed."""
    lines: list[str] = []
    for error in failure.errors(include_url=False):
        location = error["loc"]
        detail = str(error.get("ctx", {}).get("error", ""))
        if error["type"] == "extra_forbidden":
            lines.append(_unknown(model, location))
        elif not location:
            # Raised by the check over all options: each line already names its options.
            lines.extend((detail or f"options: {error['msg']}").splitlines())
        else:
            _, field = _find(model, location)
            is_entry = isinstance(location[-1], int)
            inner = model_of(field.annotation) if field is not None else None
            if is_entry and inner is not None:
                allowed = f"an object with {', '.join(inner.model_fields)}"
            else:
                allowed = allowed_text(field) if field is not None else error["msg"]
            start = path_text(location)
            if error["type"] == "missing":
                lines.append(f"{start}: missing; give {allowed}")
            else:
                middle = f"{detail}; " if detail else ""
                lines.append(f"{start}: got {_given(raw, error)}; {middle}allowed: {allowed}")
    return lines
