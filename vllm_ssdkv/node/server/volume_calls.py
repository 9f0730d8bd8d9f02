"""Calls about volumes: of the workers that have them, and of people who look at a node."""

from __future__ import annotations

from collections.abc import Callable

from vllm_ssdkv.base.errors import NodeRefusedError, ProtocolError, SSDKVError
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.protocol.messages import (
    AskDrives,
    AskVolumes,
    Done,
    Drives,
    Message,
    OpenVolumes,
    RemoveVolume,
    Volumes,
    VolumesOpened,
)
from vllm_ssdkv.node.server.session import Session
from vllm_ssdkv.node.server.volume_link import window_of
from vllm_ssdkv.node.server.volumes import VolumeShelf


class VolumeCalls:
    """Carries out calls. Used by the thread of the session's ``calls`` connection."""

    def __init__(
        self,
        session: Session,
        shelf: VolumeShelf,
        config: NodeConfig,
        in_use: Callable[[], list[bytes]],
        claims_since: Callable[[str], int | None],
    ):
        """``in_use``: names of the volumes that sessions have open; ``claims_since``: epoch of the
        slots that a run may have in shared ones, None where its scheduler is not there."""
        self._session, self._shelf, self._config, self._in_use = session, shelf, config, in_use
        self._claims_since = claims_since

    def call(self, message: Message) -> Message:
        """Carry out one call.

        Raises:
            ProtocolError: the message does not belong here.
            NodeRefusedError: it cannot be carried out; the session goes on.
        """
        try:
            return self._answer(message)
        except ProtocolError:
            raise
        except SSDKVError as error:
            raise NodeRefusedError(str(error)) from error

    def _answer(self, message: Message) -> Message:
        of_worker = self._session.role == "volume"
        if isinstance(message, AskVolumes):
            return Volumes(self._shelf.volumes(message.names, self._in_use()))
        if isinstance(message, AskDrives) and of_worker:
            return Drives(self._shelf.drives(message.model))
        if isinstance(message, OpenVolumes) and of_worker:
            return self._open(message)
        if isinstance(message, RemoveVolume) and not of_worker:
            self._shelf.remove(message.name)
            return Done()
        raise ProtocolError(
            "order", f"a {type(message).__name__} came among the calls of a {self._session.role}"
        )

    def _open(self, message: OpenVolumes) -> Message:
        session = self._session
        if session.volumes is not None:
            raise ProtocolError("order", "a session opens its volumes once")
        since = self._claims_since(session.run) if message.shared else 0
        if since is None and message.again:
            raise NodeRefusedError(
                "the scheduler of these workers is gone, and others may have its slots"
            )
        volumes = self._shelf.open(
            message.names,
            message.nbytes,
            message.model,
            message.deadline_s,
            shared=message.shared,
        )
        session.have(volumes, [name for name in message.names if name is not None])
        return VolumesOpened(window_of(self._config), since or 0)
