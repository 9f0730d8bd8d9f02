"""Commands of documents, as words, and whether vLLM and our options take those of a server."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.secondary_tier import tier_options


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and text of each block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def statements(block: str) -> Iterator[list[str]]:
    """Lines of a shell block as words; a quoted text may have lines, and so has a here-document."""
    lines = iter(block.replace("\\\n", " ").splitlines())
    for line in lines:
        text = line
        while True:
            try:
                lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
                lexer.whitespace_split = True
                words = list(lexer)
                break
            except ValueError:  # the quotation goes on
                text += "\n" + next(lines)
        if "<<" in words:
            end = words[words.index("<<") + 1]
            while next(lines) != end:
                pass
        yield words


def commands(block: str) -> Iterator[list[str]]:
    """Commands of a shell block, without redirections and the variables that they set."""
    variables: dict[str, str] = {}
    for words in statements(block):
        command: list[str] = []
        rest = iter([*words, ";"])
        for word in rest:
            if word in {">", ">>", "<", "<<", "2>"}:
                next(rest)
            elif word in {";", "&", "&&", "|", "(", ")"}:
                if command:
                    yield command
                command = []
            elif (
                match := re.fullmatch(r"(\w+)=(.*)", word) if command in ([], ["export"]) else None
            ):
                variables[match[1]] = match[2]
                command = []
            else:
                known = word.startswith("$") and word[1:] in variables
                command += shlex.split(variables[word[1:]]) if known else [word]


def check_vllm(words: list[str]) -> None:
    """Have vLLM's own parser take a command, and our check its options."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(given)
    check_connector(given.kv_transfer_config)


def check_connector(config: Any) -> None:  # noqa: ANN401 - of vLLM
    """Check the options of the connector that a command names, or of its tier."""
    assert config.kv_role == "kv_both"
    options = config.kv_connector_extra_config
    if config.kv_connector == "OffloadingConnector":
        for tier in options["secondary_tiers"]:
            tier_options({k: v for k, v in tier.items() if k not in {"type", "module_path"}})
    else:
        assert config.kv_connector == "SSDKVConnector"
        SSDKVConfig.from_extra_config(options)
