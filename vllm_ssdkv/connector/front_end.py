"""The check in the front end: wrong options end a start in its first process, before an engine is.

Two hooks of unpatched vLLM come before the engine core (tests/contract/test_front_end.py):

- ``vllm serve`` loads general plugins before it reads its command line. What that will give to us
  is read here in the same way, and a wrong option ends the process as a wrong flag does.
- A ``VllmConfig`` asks, while it is made, whether the connector supports the hybrid KV cache
  manager, and for that looks the class up, here. It does not pass itself: it is the caller that
  makes itself. This serves ``LLM(...)``, and settings that do not go together.

Where a hook is gone, the connector says the same later.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.names import CONNECTOR, OFFLOADING, RECOMPUTE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WRONG_ARGUMENTS: Final = 2
"""The exit code of ``argparse``: a restart makes nothing better."""

_FLAG: Final = "--kv-transfer-config"
_EXTRA: Final = "kv_connector_extra_config"
_MULTI: Final = "MultiConnector"


def __getattr__(name: str) -> type:
    """The connector's class, after a check of the configuration that is being made, if one is.

    Raises:
        ConfigError, UnsupportedError: it cannot be served.
    """
    if name != CONNECTOR:
        raise AttributeError(name)
    from vllm_ssdkv.connector.connector import SSDKVConnector

    vllm_config = _in_the_making(sys._getframe(1))
    if vllm_config is not None:
        check_configuration(vllm_config)
    return SSDKVConnector


def _in_the_making(frame: FrameType | None) -> VllmConfig | None:
    """The VllmConfig whose ``__post_init__`` is among the callers of this frame."""
    from vllm.config import VllmConfig

    while frame is not None:
        if frame.f_code.co_name == "__post_init__":
            made = frame.f_locals.get("self")
            if isinstance(made, VllmConfig):
                return made
        frame = frame.f_back
    return None


def check_configuration(vllm_config: VllmConfig) -> None:
    """Refuse what cannot start, and make paths absolute: workers may run in other directories.

    Raises:
        ConfigError, UnsupportedError: see there.
    """
    from vllm_ssdkv.connector.compatibility import check_engine

    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    for options in _options(CONNECTOR, transfer.kv_connector, transfer.kv_connector_extra_config):
        config = SSDKVConfig.from_extra_config(options)
        if transfer.kv_connector == CONNECTOR:  # a child has a configuration of its own
            check_engine(config, vllm_config, complete=False)
        options.update(config.with_absolute_paths(options))
        if transfer.kv_connector == _MULTI:
            # It hands its children copies, so the connector cannot set this where it is read.
            transfer.kv_load_failure_policy = RECOMPUTE


def check_command_line(arguments: Sequence[str]) -> None:
    """End this process when the command line of vLLM gives us wrong options; else do nothing.

    Only the first process looks: the others are given the same line. What vLLM itself cannot
    read, it tells itself.

    Raises:
        SystemExit: after the text of the error, with the exit code of a wrong flag.
    """
    if multiprocessing.parent_process() is not None:
        return
    transfer = _transfer_config(arguments)
    connector, extra = transfer.get("kv_connector"), transfer.get(_EXTRA)
    try:
        for options in _options(CONNECTOR, connector, extra):
            SSDKVConfig.from_extra_config(options)
        for options in _options(OFFLOADING, connector, extra):
            # Here: a start without it has one module less.
            from vllm_ssdkv.config.secondary_tier import tier_entries, tier_options

            for entry in tier_entries(options):
                tier_options(entry)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(WRONG_ARGUMENTS) from None


def _transfer_config(arguments: Sequence[str]) -> Mapping[str, Any]:
    """``--kv-transfer-config`` as vLLM will read it: as JSON, by dots, or from ``--config``."""
    given = [argument.replace("_", "-") for argument in arguments]
    if not any(argument.startswith((_FLAG, "--config")) for argument in given):
        return {}
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        """Knows one flag, and passes over the others."""

        def parse_known_args(
            self,
            args: Sequence[str] | None = None,
            namespace: argparse.Namespace | None = None,
        ) -> tuple[argparse.Namespace, list[str]]:
            found, _ = super().parse_known_args(args, namespace)
            return found, []

    parser = Parser(add_help=False, exit_on_error=False)
    parser.add_argument(_FLAG, default="{}")
    log = logging.getLogger(FlexibleArgumentParser.__module__)
    log.disabled = True  # its warnings and errors follow when vLLM reads the same
    try:
        found = json.loads(parser.parse_args(list(arguments)).kv_transfer_config)
    except (Exception, SystemExit):  # noqa: BLE001 - the same follows
        return {}
    finally:
        log.disabled = False
    return found if isinstance(found, dict) else {}


def _options(wanted: str, connector: object, options: object) -> Iterator[dict[str, Any]]:
    """Options of the wanted connector, or of each that is a child of a MultiConnector."""
    given = options if options is not None else {}
    if not isinstance(given, dict):
        return
    if connector == wanted:
        yield given
    elif connector == _MULTI:
        for child in given.get("connectors", []):
            if isinstance(child, dict):
                yield from _options(wanted, child.get("kv_connector"), child.get(_EXTRA))
