"""The manifest of an open store, put back when somebody deletes, replaces or damages it.

The scheduler's process is the only one that changes a manifest once the store is open, so what it
saved or read last is what counts: neither an older file nor another store's takes its place. Where
the state directory is gone, or another one is in its place, nothing is written: the next start
finds the copies on the devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from vllm_ssdkv.base.durable_file import read_regular, replace_file
from vllm_ssdkv.base.errors import FormatError, StoreError
from vllm_ssdkv.base.file_access import why_refused
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest, locked

logger = logging.getLogger(__name__)


class ManifestKeeper:
    """Knows the manifest of one open store. Callers of :meth:`current` and :meth:`saved` hold the
    lock on the state directory; :meth:`look` takes it."""

    def __init__(
        self, state: Path, manifest: Manifest, is_there: Callable[[], bool], counters: Counters
    ):
        """Args:
        state: The state directory.
        manifest: As it was just saved there.
        is_there: Checks whether it is the directory that was opened.
        counters: For ``state_files_restored``.
        """
        self._state = state
        self._is_there = is_there
        self._counters = counters
        self._gone = False
        self.saved(manifest)

    def saved(self, manifest: Manifest) -> None:
        """It was saved like this."""
        self._text, self._revision = manifest.text, manifest.revision
        self._store = manifest.store

    def current(self) -> Manifest:
        """The manifest that counts; it and the copy beside it are put back if need be. Blocks.

        Raises:
            StoreError: it has to be put back and cannot be.
        """
        for name in (NAME, COPY):
            path = self._state / name
            text = _content(path)
            if text == self._text:
                continue
            newer = self._newer(text, path) if name == NAME else None
            if newer is not None:
                self._text, self._revision = text, newer.revision
                continue
            self._restore(path, missing=not text)
        return self._known()

    def _known(self) -> Manifest:
        return Manifest.decode(self._text, self._state / NAME)

    def _newer(self, text: bytes, path: Path) -> Manifest | None:
        """The manifest in this text, if it is of this store and not older than what is known."""
        try:
            found = Manifest.decode(text, path)
        except FormatError:
            return None
        mine = found.store == self._store and found.revision >= self._revision
        return found if mine else None

    def _restore(self, path: Path, *, missing: bool) -> None:
        what = "is missing or empty" if missing else "was replaced or damaged"
        try:
            replace_file(path, self._text)
        except OSError as error:
            raise StoreError(
                f"{path} {what}, and cannot be written again: {why_refused(path, error)}"
            ) from error
        logger.error("ssdkv: %s %s under a running engine: it is written again", path, what)
        self._counters.add("state_files_restored", file=path.name)

    def look(self) -> Manifest:
        """As :meth:`current`; where the state directory is not there, which is said once, nothing
        is put back.

        Raises:
            StoreError: as :meth:`current`, or the directory cannot be locked.
            OSError: it cannot be read.
        """
        if self._is_there():
            with locked(self._state):
                if self._is_there():
                    return self.current()
        if not self._gone:
            self._gone = True
            logger.error(
                "ssdkv: the state directory %s is gone, or is another one: nothing is written "
                "there; the next start takes the copy of store.json on a device, and finds blocks "
                "by the headers of their slots",
                self._state,
            )
        return self._known()


def _content(path: Path) -> bytes:
    """Content of a file; empty where it is not there, or no file."""
    try:
        return read_regular(path)
    except OSError:
        return b""
