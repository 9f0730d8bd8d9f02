"""Messages between an engine and a node, as msgpack arrays that are checked when decoded.

Each half of an engine, its scheduler and each of its workers, has a session with the node: two
connections, one for calls, one for bytes and what the node tells by itself; a scheduler needs only
the first. The first frame of a connection is a :class:`Hello`, its answer a :class:`Welcome`.
Frames carry the number of a call; an answer has that of its call, what nobody asked for has 0. A
call that fails is answered by a frame with the flag ``ERROR``. Whoever gets a message that does not
belong there refuses the connection.

Slots, epochs and positions are little-endian int64, eight bytes each; keys are 32 bytes each, one
behind the other. All arrays of a message belong together, entry by entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeAlias
from uuid import UUID, uuid5

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from vllm_ssdkv.config.engine import LEAST_NODE_DEADLINE_S

KEY_BYTES: Final = 32
MAX_ENTRIES: Final = 1 << 16
"""Slots or keys in one message, at most; longer lists go in several."""

MAX_RANKS: Final = 64
"""Workers of one engine: each costs the node threads, files and a part of the DRAM tier."""


TAKEN: Final = -1
"""Slot of a key in :class:`Claimed`: stored already, or being stored by somebody."""

NO_ROOM: Final = -2
"""Slot of a key in :class:`Claimed`: no slot is to be had."""

NOT_ADMITTED: Final = -3
"""Slot of a key in :class:`Claimed`: not seen often enough (option ``admission`` of the node)."""

OVER_BUDGET: Final = -4
"""Slot of a key in :class:`Claimed`: a daily write budget is used up."""

PAUSED: Final = -5
"""Slot of a key in :class:`Claimed`: writes to the drives are paused."""

Role: TypeAlias = Literal["scheduler", "worker", "status", "volume"]
Part: TypeAlias = Literal["calls", "bytes", "attend"]

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Number: TypeAlias = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
_PRINTABLE: Final = r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"
"""Texts go into logs and onto terminals: no control characters, no line breaks."""

Name: TypeAlias = Annotated[str, Meta(max_length=256, pattern=_PRINTABLE)]
Reason: TypeAlias = Annotated[str, Meta(max_length=4096, pattern=_PRINTABLE)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e9)]
Digest: TypeAlias = Annotated[bytes, Meta(max_length=64)]
Numbers: TypeAlias = Annotated[bytes, Meta(max_length=8 * MAX_ENTRIES)]
Keys: TypeAlias = Annotated[bytes, Meta(max_length=KEY_BYTES * MAX_ENTRIES)]
Fields: TypeAlias = Annotated[dict[Name, Reason | Number], Meta(max_length=256)]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of all messages.

    Example:
        encode(Lookup(pack_keys(keys)))
    """


# ---- the beginning and the end of a session ----


class StoreSpec(Message, frozen=True):
    """Store that an engine wants to use, as all of its halves say it alike.

    Attributes:
        fingerprint: Fields of the store's fingerprint.
        layers: Pages of an opaque slot, each of which is one layer or a stretch of them.
        payload_bytes: Bytes of a page that are used.
        ranks: Workers of the engine; each has data files of its own.
        block_tokens: Tokens of a slot.
        model: Name of the model, for people.
        name: Tells stores of models with KV of one shape apart.
        slots: Slots of volumes that engines in mode ``page`` share; 0: the store is the node's.
        layout: Digest of how these lie in the volumes.
    """

    fingerprint: Fields
    layers: Annotated[int, Meta(ge=1, le=1 << 16)]
    payload_bytes: Annotated[int, Meta(ge=1, lt=1 << 31)]
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    model: Name
    name: Name
    slots: Annotated[int, Meta(ge=0, lt=(1 << 31) - 1)] = 0
    layout: Digest = b""


class Hello(Message, frozen=True):
    """First frame of each connection, from the engine.

    Attributes:
        oldest: Version of the protocol, the oldest that the sender speaks.
        newest: The newest.
        role: Half of an engine, or somebody who asks how the node is.
        part: Purpose of the connection.
        run: Name of the engine's run: the same for all of its halves, and for nobody else.
        rank: Of a worker.
        store: What the session is about. None: of a status session.
        session: Name of the session that the connection joins, from the first one's welcome;
            empty: it begins one, and is for calls.
    """

    oldest: Annotated[int, Meta(ge=1, lt=1 << 16)]
    newest: Annotated[int, Meta(ge=1, lt=1 << 16)]
    role: Role
    part: Part
    run: Name
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0
    store: StoreSpec | None = None
    session: Digest = b""


class Welcome(Message, frozen=True):
    """Answer to a hello.

    With that of the ``bytes`` connection of a worker on a Unix socket goes the descriptor of the
    arena, to be mapped for reading only; it cannot be mapped otherwise.

    Attributes:
        version: Of the protocol, from now on.
        session: Name of the session, for its second connection.
        node: Number of this start of the node: another one knows nothing of what was before.
        lease_s: A session that sends nothing for so long ends.
        beat_s: Send a heartbeat after so long without another frame; the node does so, too.
        num_slots: Slot numbers are below this.
        encrypted: Whether slots have the header of encrypted ones.
        name_key: Key under which block hashes are hidden in the store; empty: they are not.
        frames: Frames of a rank's DRAM.
        frame_bytes: Of each.
        arena_bytes: Length of the mapping in which they lie.
        in_flight: Bytes that a worker may have saved and not been told of, at most.
    """

    version: int
    session: Digest
    node: Digest
    lease_s: Seconds
    beat_s: Seconds
    num_slots: Count = 0
    encrypted: bool = False
    name_key: Digest = b""
    frames: Count = 0
    frame_bytes: Count = 0
    arena_bytes: Count = 0
    in_flight: Count = 0


class Done(Message, frozen=True):
    """Answer to a call that has no other."""


# ---- existence: calls of a scheduler ----


class Bind(Message, frozen=True):
    """Ask what weights the ranks of this run have told; answered by :class:`Bound` when all have,
    or refused after ``patience_s``."""

    patience_s: Seconds


class Bound(Message, frozen=True):
    """Digest of each rank's weights."""

    weights: Annotated[list[Digest], Meta(max_length=MAX_RANKS)]


class Lookup(Message, frozen=True):
    """Find the longest prefix of ``keys`` that is stored; answered by :class:`Slots`.

    Attributes:
        keys: Of a request's blocks.
        chain: Number of the request, if it computes what is missing as soon as nobody else does;
            0: the answer says nothing of others.
        take_over: The request computes what is missing in any case.
    """

    keys: Keys
    chain: Count = 0
    take_over: bool = False


class Slots(Message, frozen=True):
    """Slots of a prefix, and their epochs.

    ``expected``: so many of the blocks behind it are being computed by other requests, of any
    engine. 0: from now on the chain that has asked is taken to compute what is missing.
    """

    slots: Numbers
    epochs: Numbers
    expected: Count = 0


class Leave(Message, frozen=True):
    """The request with this number computes nothing more. No answer."""

    chain: Count


class Find(Message, frozen=True):
    """Find each of ``keys``, whatever is stored of the others; answered by :class:`Slots`, one for
    each key, -1 with epoch 0 where it is not stored."""

    keys: Keys


class GoOn(Message, frozen=True):
    """The request with this number still computes what its chain holds. No answer."""

    chain: Count


class Last(Message, frozen=True):
    """Find the last n of ``first`` < n <= ``end`` for which key n - 1 is stored with each of
    ``tags`` exclusive-or'd into its last byte; answered by :class:`Position`. ``keys`` begin with
    that of number ``first``."""

    keys: Keys
    first: Count
    end: Count
    tags: Annotated[list[Annotated[int, Meta(ge=0, le=255)]], Meta(max_length=256)]


class Position(Message, frozen=True):
    """The n of :class:`Last`, or its ``first``."""

    position: Count


class Claim(Message, frozen=True):
    """Take a slot for each block that is neither stored nor claimed; answered by :class:`Claimed`.

    A claimed slot is pinned once for the session. It is found under its key when every rank of
    this run has saved it.

    Attributes:
        keys: Of blocks that a request has computed.
        first: Whether it is the first time that this request has computed them.
    """

    keys: Keys
    first: bool = True


class Claimed(Message, frozen=True):
    """Slot of each key, or why there is none, such as :data:`TAKEN`; epochs are 0 there."""

    slots: Numbers
    epochs: Numbers


class Grant(Message, frozen=True):
    """Take ``count`` slots for blocks to come, all or none; answered by :class:`Claimed`.

    A granted slot is pinned once for the session, and claimed: only this session writes it.
    """

    count: Annotated[int, Meta(ge=1, le=MAX_ENTRIES)]


class Publish(Message, frozen=True):
    """Have granted slots found under keys from now on: every rank has written them. No answer.

    One whose key has a slot already stays as it is, for this session alone.
    """

    slots: Numbers
    epochs: Numbers
    keys: Keys


class Touch(Message, frozen=True):
    """Mark chains, head first, as just used. No answer."""

    keys: Keys


class Pin(Message, frozen=True):
    """Keep from eviction those slots that still have these epochs. No answer."""

    slots: Numbers
    epochs: Numbers


class Unpin(Message, frozen=True):
    """Undo one pin of each entry that this session has pinned or claimed, head first. No answer.

    A claimed slot that was not saved by every rank is given up.
    """

    slots: Numbers
    epochs: Numbers


class Drop(Message, frozen=True):
    """Never find these slots again, if they still have these epochs. No answer."""

    slots: Numbers
    epochs: Numbers
    cause: Name


class ForgetAll(Message, frozen=True):
    """Show this session nothing any more that has a slot now; answered by :class:`Done`.

    Other sessions go on. A block that this one claims anew takes the place of the older one.
    """


class AskGauges(Message, frozen=True):
    """Ask for the numbers of the store; answered by :class:`Gauges`."""


class Gauges(Message, frozen=True):
    """Gauges and counters of the store's index by name."""

    gauges: dict[Name, Number]
    counters: dict[Name, Number]


# ---- residency: a worker's session ----


class TellWeights(Message, frozen=True):
    """Digest of the weights that this rank of the run computes with; answered by :class:`Done`."""

    digest: Digest


class Region(Message, frozen=True):
    """Transfer region of this worker, Unix sockets only: with it goes the descriptor of a memfd of
    ``nbytes``, which is sealed against shrinking. On the ``bytes`` connection, once."""

    nbytes: Annotated[int, Meta(ge=4096, le=1 << 40)]


class Save(Message, frozen=True):
    """Store blocks in claimed slots. On the ``bytes`` connection.

    Answered by :class:`Taken`; later come :class:`Written` and :class:`WriteFailed`.

    Attributes:
        slots, epochs, keys: Of each block.
        places: Offset of each frame in the region; empty: they are the payload, in this order.
        bound: False: the keys are nobody's, and the blocks are not to be found.
    """

    slots: Numbers
    epochs: Numbers
    keys: Keys
    places: Numbers
    bound: bool = True


class Taken(Message, frozen=True):
    """The places of a save may be used again, and its blocks are in DRAM, but for those at
    positions ``lost``: these are not stored."""

    lost: Numbers


class Written(Message, frozen=True):
    """Blocks of this session that this rank has written to its devices. Nobody asked."""

    slots: Numbers
    epochs: Numbers


class WriteFailed(Message, frozen=True):
    """Blocks of this session that this rank could not write. Nobody asked."""

    slots: Numbers
    epochs: Numbers


class Discard(Message, frozen=True):
    """Saved blocks that nobody will need. On the ``bytes`` connection, no answer."""

    slots: Numbers
    epochs: Numbers


MAX_LOADS: Final = 4096
"""Loads of one worker that have not ended. A node ends the connection of one that asks for more."""

MAX_LOADING: Final = 1 << 18
"""Slots of these loads together: some 30 MB in the node."""


class Load(Message, frozen=True):
    """Bring a hit; on the ``bytes`` connection.

    :class:`Arrived` come for its blocks, then a :class:`LoadEnded`, all with the number of this
    call; or one :class:`Arrived` with the end in it. Slots that have other epochs or keys than
    these by now end it at once.

    Attributes:
        request_id: For the log.
        slots, epochs, keys: Of each block.
        blocks: The last ``len(blocks)`` slots are for the accelerator, under these numbers, which
            come back in :class:`Arrived`; 0: of that one nothing is needed.
        chain: The first so many slots are the tokens of the hit.
        behind: Blocks of the hit of which nothing is needed any more.
        compared: :class:`LoadEnded` brings a copy of the last slot.
    """

    request_id: Name
    slots: Numbers
    epochs: Numbers
    keys: Keys
    blocks: Numbers
    chain: Count
    behind: Count = 0
    compared: bool = False


class LoadEnded(Message, frozen=True):
    """End of a load. ``slots`` and ``epochs`` are those of which the bytes are wrong.

    ``copied``: the payload is a copy of the last slot's frame. The rest is as in
    :class:`vllm_ssdkv.store.read.load_job.LoadOutcome`.
    """

    complete: bool
    slots: Numbers
    epochs: Numbers
    tokens_from_dram: Count = 0
    tokens_from_ssd: Count = 0
    hit_tokens_from_dram: Count = 0
    hit_tokens_from_ssd: Count = 0
    queued_s: Seconds = 0.0
    dram_s: Seconds = 0.0
    ssd_s: Seconds = 0.0
    copied: bool = False


class Arrived(Message, frozen=True):
    """Blocks of a load are in DRAM.

    Attributes:
        part: Number of this message among those of its load, from 0.
        blocks: As the load named them.
        places: Offset of each frame in the arena, where it stays until :class:`Copied`; empty: they
            are the payload, in this order, and nothing is to be answered.
        ended: These are all blocks of the load, and it ends with their copy; None: more follows.
    """

    part: Count
    blocks: Numbers
    places: Numbers
    ended: LoadEnded | None = None


class Copied(Message, frozen=True):
    """The frames of an :class:`Arrived` may go, also where its load is over. On the ``bytes``
    connection, with the number of the load."""

    part: Count


# ---- how the node is ----


class AskStatus(Message, frozen=True):
    """Ask how the node is; answered by :class:`Status`. Of a status session."""


class StoreStatus(Message, frozen=True):
    """One store of a node."""

    model: Name
    path: Reason
    ranks: Count
    block_tokens: Count
    slots: Count
    ready: Count
    pinned: Count
    frames: Count
    frames_used: Count
    frame_bytes: Count


class SessionStatus(Message, frozen=True):
    """One session with a node."""

    peer: Name
    role: Role
    run: Name
    rank: Count
    model: Name
    age_s: Seconds
    pins: Count
    claims: Count


class Status(Message, frozen=True):
    """Stores of a node, and its sessions."""

    version: Name
    protocol: Count
    uptime_s: Seconds
    draining: bool
    stores: Annotated[list[StoreStatus], Meta(max_length=MAX_ENTRIES)]
    sessions: Annotated[list[SessionStatus], Meta(max_length=MAX_ENTRIES)]


# ---- volumes: calls and bytes of a session with the role ``volume`` ----

VolumeName: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""UUID of a volume: that of the data file which the engine has in its stead."""

MAX_DRIVES: Final = 64


class AskDrives(Message, frozen=True):
    """Ask for the node's drives; answered by :class:`Drives`.

    Attributes:
        model: Name of the engine's model, which decides on its share of each drive.
    """

    model: Name


class Drive(Message, frozen=True):
    """One drive of a node.

    Attributes:
        name: UUID of the drive, which stays with it.
        path: Of the drive, for people.
        room: Bytes that an engine of the model may take there, all ranks together.
    """

    name: VolumeName
    path: Reason
    room: Count


class Drives(Message, frozen=True):
    """Drives of a node, in the order of its options: numbers of drives are places in this list."""

    drives: Annotated[list[Drive], Meta(max_length=MAX_DRIVES)]


class AskVolumes(Message, frozen=True):
    """Ask for volumes; answered by :class:`Volumes`. Of a volume session or a status session.

    Attributes:
        names: Of those that are asked for; empty: of all.
    """

    names: Annotated[list[VolumeName], Meta(max_length=MAX_ENTRIES)]


class VolumeStatus(Message, frozen=True):
    """One volume of a node.

    Attributes:
        name: Of the volume.
        drive: Path of its drive, for people.
        model: Name of the model of the engine that made it.
        nbytes: Bytes that it takes on the drive.
        open: Whether a session has it open.
        idle_s: Seconds since a session has closed it.
    """

    name: VolumeName
    drive: Reason
    model: Name
    nbytes: Count
    open: bool
    idle_s: Seconds


class Volumes(Message, frozen=True):
    """Volumes that there are, of those that were asked for."""

    volumes: Annotated[list[VolumeStatus], Meta(max_length=MAX_ENTRIES)]


class OpenVolumes(Message, frozen=True):
    """Open the volumes of one rank, once for each session; answered by :class:`VolumesOpened`.

    A volume that is not there is made. One session at a time has a volume, unless it is shared.

    Attributes:
        names: Of the volume on each drive of the node.
        nbytes: Bytes of each.
        model: Name of the engine's model.
        deadline_s: After which the engine ends a session that has not answered.
        shared: Whether sessions of other engines may have them at the same time.
        again: Whether the engine had them before, and may have writes of then to do.
    """

    names: Annotated[list[VolumeName | None], Meta(max_length=MAX_DRIVES)]
    nbytes: Annotated[list[Count], Meta(max_length=MAX_DRIVES)]
    model: Name
    deadline_s: Annotated[float, Meta(ge=LEAST_NODE_DEADLINE_S, le=1e9)]
    shared: bool = False
    again: bool = False


class VolumesOpened(Message, frozen=True):
    """Volumes are open.

    Attributes:
        window: Bytes that may be asked of each drive, or be on their way to it, at a time. A frame
            may have half of it.
        since: Shared slots of older epochs may be another engine's by now.
    """

    window: Count
    since: Count = 0


class MoveBytes(Message, frozen=True):
    """Read or write stretches of one volume; answered by :class:`Moved`, in any order.

    The payload of a write has the bytes of all stretches, one behind the other.

    Attributes:
        drive: Number of the drive.
        write: Direction.
        offsets: Offset in the volume of each stretch; multiples of 4096.
        lengths: Bytes of each; multiples of 4096.
    """

    drive: Annotated[int, Meta(ge=0, lt=MAX_DRIVES)]
    write: bool
    offsets: Numbers
    lengths: Numbers


class Moved(Message, frozen=True):
    """Stretches were read or written.

    The payload has the bytes that were read: as many of each stretch as its result says.

    Attributes:
        results: Bytes of each stretch that were moved, or a negative ``errno``.
    """

    results: Numbers


class RemoveVolume(Message, frozen=True):
    """Remove a volume that nobody has open; answered by :class:`Done`. Of a status session."""

    name: VolumeName


# ---- attention: the connection ``attend`` of a session with the role ``volume`` ----


MAX_ROWS: Final = 4096
"""Rows of one call, and rows that an engine tells of at a time."""


class AttendShape(Message, frozen=True):
    """First message of the connection: shape of slots and queries; answered by
    :class:`AttendRoom`.

    Attributes:
        layers: Layers of a slot.
        kv_heads: KV heads of this rank.
        groups: Pages of a KV head and layer.
        page_tokens: Tokens of a page.
        query_heads: Of this rank, a multiple of the KV heads.
        head_size: Channels of a head.
        dtype: Of queries, and of K and V.
        slots: Slot numbers are below this.
    """

    layers: Annotated[int, Meta(ge=1, le=1 << 16)]
    kv_heads: Annotated[int, Meta(ge=1, le=1 << 12)]
    groups: Annotated[int, Meta(ge=1, le=1 << 12)]
    page_tokens: Annotated[int, Meta(ge=1, le=1 << 12)]
    query_heads: Annotated[int, Meta(ge=1, le=1 << 12)]
    head_size: Annotated[int, Meta(ge=8, le=512, multiple_of=8)]
    dtype: Literal["float32", "float16", "bfloat16"]
    slots: Annotated[int, Meta(ge=1, le=1 << 40)]


class AttendRoom(Message, frozen=True):
    """Room of the node for what this worker tells; it ends a connection that tells more.

    Attributes:
        blocks: Blocks of which places were told; of a row, too.
        listed: Blocks of all rows together.
    """

    blocks: Count
    listed: Count


Places: TypeAlias = Annotated[bytes, Meta(max_length=8 << 20)]


class TellBlocks(Message, frozen=True):
    """Places of blocks in the volumes, and digests of their pages. No answer.

    Attributes:
        slots: Of each block.
        places: Of all pages of K and V, block after block: the number of the drive in the upper 16
            bits, the offset in its volume in the others; -1 for a page that is not here.
        digests: Of the same pages, by whoever wrote them.
    """

    slots: Numbers
    places: Places
    digests: Places


class TellRow(Message, frozen=True):
    """Blocks of a row's context here: the first ``keep`` that it had, and these behind. No answer.

    Attributes:
        row: Number of the row, which the engine chooses.
        keep: Blocks that stay.
        slots: Of the blocks that follow. A row has no block twice.
    """

    row: Annotated[int, Meta(ge=0, lt=MAX_ROWS)]
    keep: Count
    slots: Numbers


class Forget(Message, frozen=True):
    """These slots get other bytes, and these rows are no more. No answer."""

    slots: Numbers
    rows: Numbers


MAX_STATES: Final = 12 << 20
"""Bytes of queries in one call, and of states in its answer. They are in the bodies: whoever waits
for credit would have to receive meanwhile."""

States: TypeAlias = Annotated[bytes, Meta(max_length=MAX_STATES)]


class Attend(Message, frozen=True):
    """Attend to contexts; answered by :class:`Attended`.

    Attributes:
        layer: From 0.
        scale: Of the logits.
        rows: Rows that attend, each once.
        query: [T, Hq, D].
        counts: Queries of each row, in their order; empty: one each.
        selection: A bit for each page of the rows' blocks in this layer that is here: row, block,
            KV head, group; empty: all are attended to.
        masks: Of pages that were selected, in the same order, a bit for each token to attend to;
            empty: all.
        following: Layer that these rows will attend to next, to read ahead for; -1: none.
    """

    layer: Annotated[int, Meta(ge=0, lt=1 << 16)]
    scale: Annotated[float, Meta(ge=-1e6, le=1e6)]
    rows: Numbers
    query: States
    counts: Numbers = b""
    selection: Places = b""
    masks: Places = b""
    following: Annotated[int, Meta(ge=-1, lt=1 << 16)] = -1


class Attended(Message, frozen=True):
    """Partial states of all queries.

    Attributes:
        states: acc [T, Hq, D], m and l [T, Hq], fp32.
        slots, pages: Slot and number in it of pages that are wrong or unreadable here, and were not
            attended to; without a selection all pages of that KV head, block and layer.
        wait_s, attend_s: For which reads were waited for, and in which pages were attended to.
    """

    states: States
    slots: Numbers
    pages: Numbers
    wait_s: Seconds
    attend_s: Seconds


# ---- their names and numbers ----


def shared_volume(drive: bytes, fingerprint: bytes, rank: int) -> UUID:
    """Name of the volume that all engines of one fingerprint share on a drive, by its name."""
    return uuid5(UUID(bytes=drive), f"{fingerprint.hex()} {rank}")


KINDS: Final[dict[int, type[Message]]] = {
    16: Hello,
    17: Welcome,
    18: Done,
    20: Bind,
    21: Bound,
    22: Lookup,
    23: Slots,
    24: Last,
    25: Position,
    26: Claim,
    27: Claimed,
    28: Touch,
    29: Pin,
    30: Unpin,
    31: Drop,
    32: ForgetAll,
    33: AskGauges,
    34: Gauges,
    35: Leave,
    36: Find,
    37: GoOn,
    38: Grant,
    39: Publish,
    40: TellWeights,
    41: Region,
    42: Save,
    43: Taken,
    44: Written,
    45: WriteFailed,
    46: Discard,
    47: Load,
    48: Arrived,
    49: Copied,
    50: LoadEnded,
    60: AskStatus,
    61: Status,
    70: AskDrives,
    71: Drives,
    72: AskVolumes,
    73: Volumes,
    74: OpenVolumes,
    75: VolumesOpened,
    76: MoveBytes,
    77: Moved,
    78: RemoveVolume,
    80: AttendShape,
    81: TellBlocks,
    82: TellRow,
    83: Forget,
    84: Attend,
    85: Attended,
    86: AttendRoom,
}
"""Kind of a frame, and the type of its body. No number is given to another message later."""

_NUMBERS: Final = {cls: kind for kind, cls in KINDS.items()}
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()


def kind_of(message: Message) -> int:
    """Kind of the frame for this message."""
    return _NUMBERS[type(message)]


def encode(message: Message) -> bytes:
    """Body of the frame for this message."""
    return _ENCODER.encode(message)


def decode(kind: int, body: bytes | bytearray | memoryview) -> Message:
    """Message of a frame.

    Raises:
        ValueError: no message has this kind, or the body is not one of it.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ValueError(f"no message has kind {kind}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a {KINDS[kind].__name__}: {error}") from error


# ---- arrays ----


def pack(numbers: NDArray[np.int64] | Sequence[int]) -> bytes:
    """Numbers as a message has them."""
    return np.asarray(numbers, dtype="<i8").tobytes()


def unpack(data: bytes) -> NDArray[np.int64]:
    """Numbers of a message, int64, [n], read-only.

    Raises:
        ValueError: the length is no multiple of 8.
    """
    return np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Keys of 32 bytes as a message has them.

    Raises:
        ValueError: one has another length.
    """
    joined = b"".join(keys)
    if len(joined) != KEY_BYTES * len(keys) or any(len(key) != KEY_BYTES for key in keys):
        raise ValueError("a key has not 32 bytes")
    return joined


def unpack_keys(data: bytes) -> list[bytes]:
    """Keys of a message.

    Raises:
        ValueError: the length is no multiple of 32.
    """
    if len(data) % KEY_BYTES:
        raise ValueError(f"{len(data)} bytes are no keys of {KEY_BYTES}")
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
