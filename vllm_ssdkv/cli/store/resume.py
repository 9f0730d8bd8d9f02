"""``ssdkv resume``: takes a suspended store back."""

from __future__ import annotations

import dataclasses

import typer

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.store.maintenance.offline_store import find_store
from vllm_ssdkv.store.maintenance.resume import resume as resume_store


def resume(
    directories: arguments.Devices = None,
    state_dir: arguments.StateDir = None,
    as_json: arguments.Json = False,
) -> None:
    """Resume a store that was suspended because a verified hit differed.

    The next engine finds the blocks stored up to the last good verified hit. Do this once you know
    why the hit differed and that the store is right, for example after you restored a setting.
    Exits with 1 while an engine runs on it.
    """
    try:
        found = resume_store(find_store(directories or [], state_dir))
    except (SSDKVError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        arguments.print_json(dataclasses.asdict(found))
    elif found.reason:
        typer.echo(f"store {found.store} is in use again; it was suspended because {found.reason}")
    else:
        typer.echo(f"store {found.store} was not suspended")
