"""Declaration of options, and the option tree as data.

Fields of an :class:`OptionModel` carry a description, a :class:`Reason` for the default and, where
the type does not say it all, :class:`Allowed`; a :class:`Condition` where an option has no effect
under others, and :class:`PerRequest` where requests may choose it. The error lines
(``problems.py``), the warnings (``effects.py``), a request's options (``request.py``) and the
generated option table (``cli/docs/docs.py``) read these declarations.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.registry import Registry, is_place
from vllm_ssdkv.base.sizes import format_size

_TYPE_TEXT: Final[dict[type, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
}


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition for an option to have an effect; of several, all must hold.

    Attributes:
        holds: Called with all options, and with the group or list entry that has this one.
        text: Reads well after "has no effect unless ".
    """

    holds: Callable[[Any, Any], bool]
    text: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason for the default of an option."""

    text: str


@dataclass(frozen=True, slots=True)
class PerRequest:
    """A request may choose this option for itself.

    Attributes:
        instead: Metadata of the request's option in place of the engine's; empty: the same.
        clears: Another option of the group, which this one takes the place of.
    """

    instead: tuple[object, ...] = ()
    clears: str = ""


def or_text(schema: JsonSchemaValue) -> JsonSchemaValue:
    """JSON Schema of a value that may also be a text."""
    return {"anyOf": [{"type": "string"}, *schema.get("anyOf", [schema])]}


@dataclass(frozen=True, slots=True)
class Allowed:
    """Values that an option accepts, where its type does not say so. Bounds are appended.

    Attributes:
        text: Reads well after "allowed: ".
        is_size: It may be a text with a unit. Bounds are bytes and are printed with one.
    """

    text: str
    is_size: bool = False

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Sizes are integers once they are validated; the schema is of what users write."""
        schema = handler(core_schema)
        return or_text(schema) if self.is_size else schema


def _absolute_path(value: str) -> str:
    if not value:
        raise ValueError("empty")
    if "\0" in value:
        raise ValueError("a path has no NUL byte")
    path = os.path.expanduser(value)
    if path.startswith("~"):
        raise ValueError("there is no such user; a folder whose name begins so is ./~...")
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise ValueError("the working directory, where it begins, was removed") from None


PATH_TEXT: Final = "a path (~ is the home directory; relative to where vLLM is started)"
PathText = Annotated[str, AfterValidator(_absolute_path)]
"""A path: absolute, normalised, ``~`` expanded. Need not exist. Declare ``Allowed(PATH_TEXT)``."""


def names_text(registry: Registry[Any], *others: str, guests: bool = True) -> str:
    """Text of the names that an option accepts: ``others`` and those of our own classes."""
    own = [name for name in registry.names() if not registry.is_guest(name)]
    texts = [json.dumps(name) for name in (*others, *own)]
    return " or ".join([*texts, "module:Class of your own"] if guests else texts)


def checked_name(registry: Registry[Any], value: str, *, other: str | None = None) -> str:
    """A name that an option accepts. A guest is imported and checked.

    Raises:
        ValueError: there is no such name, or the guest does not fit.
    """
    if value == other:
        return value
    if not is_place(value) and value not in registry.names():
        raise ValueError("")
    if registry.is_guest(value):
        try:
            registry.resolve(value)
        except ConfigError as error:
            raise ValueError(str(error).partition(": ")[2]) from error
    return value


class OptionModel(BaseModel):
    """Frozen; an unknown name is an error; no value is converted to another type silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    removed: ClassVar[Mapping[str, str]] = {}
    """Options that there were, and for each what its error says."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the option table.

    Attributes:
        path: Dotted name; ``[]`` marks the entries of a list.
        default: The default as JSON, or None when the option must be given.
    """

    path: str
    allowed: str
    default: str | None
    description: str
    reason: str
    conditions: tuple[Condition, ...] = ()


def conditions_of(field: FieldInfo) -> tuple[Condition, ...]:
    """Conditions that an option is declared with."""
    return tuple(entry for entry in field.metadata if isinstance(entry, Condition))


def _metadata(field: FieldInfo, kind: type) -> list[object]:
    return [entry for entry in field.metadata if isinstance(entry, kind)]


def _without_none(annotation: object) -> tuple[object, bool]:
    """The annotation with ``None`` taken out, and whether it was in."""
    if get_origin(annotation) in {Union, types.UnionType}:
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return members[0], True
    return annotation, False


def model_of(annotation: object) -> type[BaseModel] | None:
    """The model inside ``Model``, ``Model | None`` or ``tuple[Model, ...]``."""
    inner, _ = _without_none(annotation)
    if get_origin(inner) is tuple:
        inner = get_args(inner)[0]
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return inner
    return None


def _is_list(annotation: object) -> bool:
    return get_origin(_without_none(annotation)[0]) is tuple


def _bounds(field: FieldInfo, is_size: bool) -> str:
    def text(bound: object) -> str:
        return format_size(bound) if is_size and isinstance(bound, int) else f"{bound}"

    low: str | None = None
    high: str | None = None
    above: str | None = None
    for entry in field.metadata:
        if isinstance(entry, annotated_types.Ge):
            low = text(entry.ge)
        elif isinstance(entry, annotated_types.Le):
            high = text(entry.le)
        elif isinstance(entry, annotated_types.Gt):
            above = text(entry.gt)
    if low is not None and high is not None:
        return f"from {low} to {high}"
    if low is not None:
        return f"at least {low}"
    if above is not None and high is not None:
        return f"above {above} and at most {high}"
    if above is not None:
        return f"above {above}"
    return f"at most {high}" if high is not None else ""


def allowed_text(field: FieldInfo) -> str:
    """Text of the values that the field accepts, e.g. ``an integer, from 1 to 256``."""
    inner, nullable = _without_none(field.annotation)
    declared = _metadata(field, Allowed)
    is_size = False
    if declared and isinstance(declared[0], Allowed):
        text, is_size = declared[0].text, declared[0].is_size
    elif get_origin(inner) is Literal:
        text = " or ".join(json.dumps(choice) for choice in get_args(inner))
    elif (model := model_of(inner)) is not None:
        names = ", ".join(model.model_fields)
        text = f"{'a list of objects' if _is_list(inner) else 'an object'} with {names}"
    elif isinstance(inner, type) and inner in _TYPE_TEXT:
        text = _TYPE_TEXT[inner]
    else:
        raise TypeError(f"no text for values of type {inner!r}; declare Allowed(...)")
    bounds = _bounds(field, is_size)
    return text + (f", {bounds}" if bounds else "") + (", or null" if nullable else "")


def _default_text(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    default = field.get_default(call_default_factory=True, validated_data={})
    declared = _metadata(field, Allowed)
    if isinstance(default, int) and any(isinstance(a, Allowed) and a.is_size for a in declared):
        return json.dumps(format_size(default))
    return json.dumps(default)


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[Option]:
    """Every option in declaration order; of groups only lists and those that may be null."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = model_of(field.annotation)
        is_list = _is_list(field.annotation)
        nullable = _without_none(field.annotation)[1]
        if inner is None or is_list or nullable:
            reasons = _metadata(field, Reason)
            yield Option(
                path=path,
                allowed=allowed_text(field),
                default=_default_text(field),
                description=field.description or "",
                reason=reasons[0].text if reasons and isinstance(reasons[0], Reason) else "",
                conditions=conditions_of(field),
            )
        if inner is not None:
            yield from walk(inner, f"{path}[]." if is_list else f"{path}.")
