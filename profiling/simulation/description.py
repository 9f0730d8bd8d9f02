"""Descriptions of hardware: typed, frozen, read from YAML, each figure with its source.

A file maps names to descriptions of one kind. A figure is an object with ``value`` and ``source``;
one that is a published result itself, a share of its step, or was fitted to it, names its rows.

    a6000:
      bandwidth: {value: 768.0e+9, source: "data sheet, bytes/s", calibrated: [P3]}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.problems import path_text

DATA: Final = Path(__file__).parent / "data"
"""Descriptions that the package comes with."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A figure: a number above 0."""
Whole = Annotated[int, Field(gt=0)]
"""A figure that counts."""

_RESERVED: Final = frozenset({"name", "sources", "calibrated"})
_KNOWN_OF_FIGURE: Final = frozenset({"value", "source", "calibrated"})


class Description(BaseModel):
    """Base of all descriptions.

    Attributes:
        name: As in its file.
        sources: Where each figure is from, by the names of the fields.
        calibrated: Rows of papers that made a figure, by its field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)
    kind: ClassVar[str]

    name: str
    sources: Mapping[str, str]
    calibrated: Mapping[str, tuple[str, ...]] = {}

    def with_figures(self, **figures: float) -> Self:
        """A copy with other figures, whose source is the caller. Raises ConfigError: not valid."""
        sources = {**self.sources, **dict.fromkeys(figures, "given by the caller")}
        given = {**self.model_dump(), **figures, "sources": sources}
        try:
            return type(self).model_validate(given)
        except ValidationError as failure:
            raise ConfigError(_text_of(self.name, failure)) from None


def _take_apart(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values, sources and marks of the figures of a description.

    Raises:
        ConfigError: a figure has no value or source, or something else; lines of all of them.
    """
    values: dict[str, Any] = {"name": name}
    sources: dict[str, str] = {}
    calibrated: dict[str, tuple[str, ...]] = {}
    problems = []
    for field, figure in given.items():
        problem = "not a figure" if field in _RESERVED else _problem_of_figure(figure)
        if problem is not None:
            problems.append(f"{field}: {problem}")
            continue
        values[field] = figure["value"]
        sources[field] = figure["source"]
        if "calibrated" in figure:
            calibrated[field] = tuple(figure["calibrated"])
    if problems:
        raise ConfigError("\n".join(problems))
    return {**values, "sources": sources, "calibrated": calibrated}


def _problem_of_figure(figure: object) -> str | None:
    if not isinstance(figure, Mapping):
        return f"got {figure!r}; give an object with value and source"
    if unknown := sorted(set(figure) - _KNOWN_OF_FIGURE):
        return f"unknown {unknown[0]!r}; known here: value, source, calibrated"
    if "value" not in figure:
        return "value is missing"
    source = figure.get("source")
    if not isinstance(source, str) or not source.strip():
        return "source is missing: say where the figure is from"
    rows = figure.get("calibrated", ["P"])
    if not (isinstance(rows, list) and rows and all(isinstance(row, str) for row in rows)):
        return f"calibrated: got {rows!r}; give a list of rows"
    return None


def _text_of(where: str, failure: ValidationError) -> str:
    lines = []
    for error in failure.errors(include_url=False):
        detail = str(error.get("ctx", {}).get("error", "")) or error["msg"]
        field = path_text(error["loc"])
        for line in detail.splitlines():
            if error["type"] == "extra_forbidden":
                lines.append(f"{where}: {field}: unknown field; remove it")
            elif error["type"] == "missing":
                lines.append(f"{where}: {field}: missing; give it a value and a source")
            elif field:
                lines.append(f"{where}: {field}: got {error['input']!r}; {line}")
            else:
                lines.append(f"{where}: {line}")
    return "\n".join(lines)


_Kind = TypeVar("_Kind", bound=Description)


def read_mapping(path: Path) -> dict[str, Any]:
    """Content of a YAML file that maps names to objects.

    Raises:
        ConfigError: it cannot be read, is no YAML, or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"{path}: give an object of names and descriptions")
    for name, entry in content.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: {name}: got {entry!r}; give an object")
    return content


def read_descriptions(kind: type[_Kind], path: Path) -> dict[str, _Kind]:
    """All descriptions of a file, by name.

    Raises:
        ConfigError: see :func:`read_mapping`; or a field is unknown, missing or wrong. The text
            names file, description and field.
    """
    found: dict[str, _Kind] = {}
    lines: list[str] = []
    for name, entry in read_mapping(path).items():
        try:
            found[name] = kind.model_validate(_take_apart(name, entry))
        except ConfigError as problem:
            lines.extend(f"{path}: {name}: {line}" for line in str(problem).splitlines())
        except ValidationError as failure:
            lines.append(_text_of(f"{path}: {name}", failure))
    if lines:
        raise ConfigError("\n".join(lines))
    return found
