"""The generated page of the documentation about the command line, from the commands themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final

import typer

from vllm_ssdkv.cli.docs.doc_pages import NOTICE, items

_INTRO: Final = """\
# Commands

`ssdkv --version` prints the version, `-h` or `--help` after any command explains it.
`ssdkv --install-completion` installs completion for your shell, `--show-completion` prints it.
Exit codes are 0 for success, 1 for failure (also of a single request) and 2 for wrong arguments,
unless the command says otherwise. Results go to the standard output, errors to the standard error.
With `--json` the output is one JSON document and nothing else; progress, tables and logs go to the
standard error.

Paths may be relative or begin with `~`. Sizes are bytes, or have a unit: `KiB`, `MiB`, `GiB`,
`TiB` and `K`, `M`, `G`, `T` are powers of 1024, `KB`, `MB`, `GB`, `TB` powers of 1000.
"""


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - click's, or typer's own copy
    """Every command below a group that is not hidden, in the order of ``--help``."""
    if command.hidden:
        return
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child, inner in children.items():
        yield from _walk(inner, f"{name} {child}")


def _arguments(command: Any) -> Iterator[str]:  # noqa: ANN401 - as above
    """Name, meaning and default of each argument and option but ``--help``."""
    for parameter in command.params:
        is_option = parameter.param_type_name == "option"
        if parameter.hidden or "--help" in parameter.opts:
            continue
        flag = is_option and parameter.is_flag
        name = ", ".join((*parameter.opts, *parameter.secondary_opts)) if is_option else ""
        place = "" if flag else parameter.metavar or (parameter.name.upper())
        shown = f"`{f'{name} {place}'.strip()}`"
        shown_default = getattr(parameter, "show_default", None)
        default = shown_default if isinstance(shown_default, str) else parameter.default
        if parameter.required:
            shown += " (required)"
        elif not (flag or default is None or default == ""):
            shown += f" (default: `{default}`)"
        meaning = "" if "--json" in parameter.opts else f": {parameter.help}"
        if parameter.envvar:
            meaning += f" Also from the environment: `{parameter.envvar}`."
        yield shown + meaning


def commands_page() -> str:
    """Text of ``docs/cli.md``."""
    from vllm_ssdkv.cli.main import app  # which has this page's command, too

    parts = [NOTICE, _INTRO]
    for name, command in _walk(typer.main.get_command(app), "ssdkv"):
        parts.append(f"## `{name}`")
        parts.append(inspect.cleandoc(command.help or ""))
        rows = list(_arguments(command))
        if rows:
            parts.append(items(rows))
    return "\n\n".join(part.strip() for part in parts) + "\n"
