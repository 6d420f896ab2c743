"""The messages between host, zygote and agent: the layouts of helper/helper.h, as `struct` formats.

What comes from an agent is untrusted: replies have one fixed size, and anything else is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

VERSION = 1
MAX_LAYERS = 64
MAX_GROUPS = 32
MAX_MESSAGE = 65536
MAX_PAYLOAD = 8 << 20


class Control(IntEnum):
    """Host to zygote."""

    CREATE = 1
    DESTROY = 2
    FREEZE = 3
    SNAPSHOT = 4
    RELEASE = 5


class Event(IntEnum):
    """Zygote to host."""

    STARTED = 1
    FAILED = 2
    DEAD = 3
    DONE = 4
    UNMAPPED = 5


class Ask(IntEnum):
    """Host to agent."""

    EXEC = 1
    KILL = 2
    FILES = 3


class Reply(IntEnum):
    """Agent to host."""

    READY = 1
    EXIT = 2


class Flag(IntFlag):
    """How a command is started."""

    NULL_STDIN = 1
    TERMINAL = 2
    MEMORY_FILE = 4
    KILL_LEFTOVERS = 8


class Kill(IntEnum):
    """What a kill reaches."""

    MAIN = 0
    TREE = 1
    BELOW = 2
    LEFTOVERS = 3
    ALL = 4


class Files(IntEnum):
    """File operations."""

    READ = 1
    WRITE = 2
    LIST = 3
    PACK = 4
    UNPACK = 5
    CHANGES = 6
    SNAPSHOT = 7  # of agents in Python alone


_CONTROL = struct.Struct(f"=IIIIQQQIIIII{MAX_LAYERS}I4x")
_EVENT = struct.Struct("=IIiiQ40s")
_REQUEST = struct.Struct(f"=IIIIII{MAX_GROUPS}IIIIIQqQ")
_REPLY = struct.Struct("=IIiiQQQ40s")
ENTRY = struct.Struct("=IIIIIIqQ")
REPLY_SIZE, EVENT_SIZE, REQUEST_SIZE = _REPLY.size, _EVENT.size, _REQUEST.size

_NO_GROUPS = (0,) * MAX_GROUPS
_NO_LAYERS = (0,) * MAX_LAYERS


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """One message to a zygote, as whoever plays one reads it."""

    kind: Control
    id: int
    fresh_network: bool
    processes: int
    memory: int
    disk: int
    inodes: int
    cpu_percent: int
    open_files: int
    argument: int
    layer: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One message to an agent, as an agent in Python reads it; the payload is still NUL-ended strings."""

    kind: Ask
    id: int
    flags: int
    uid: int
    gid: int
    groups: tuple[int, ...]
    arguments: int
    variables: int
    operation: int
    mode: int
    limit: int
    mtime: int
    payload: int


@dataclass(frozen=True, slots=True)
class ZygoteEvent:
    """One event of the zygote; `id` is the sandbox, or the token of a request that is done."""

    kind: Event
    id: int
    error: int
    status: int
    oom_kills: int
    stage: str


@dataclass(frozen=True, slots=True)
class AgentReply:
    """One reply of an agent."""

    kind: Reply
    id: int
    status: int
    error: int
    cpu_us: int
    peak_rss_kib: int
    oom_kills: int
    stage: str


def control(
    kind: Control,
    id: int = 0,
    *,
    fresh_network: bool = False,
    processes: int = 0,
    memory: int = 0,
    disk: int = 0,
    inodes: int = 0,
    cpu_percent: int = 0,
    open_files: int = 0,
    argument: int = 0,
    layer: int = 0,
    layers: Sequence[int] = (),
) -> bytes:
    """A message to the zygote; see struct control."""
    padded = (*layers, *_NO_LAYERS[len(layers) :])
    return _CONTROL.pack(
        kind,
        id,
        fresh_network,
        processes,
        memory,
        disk,
        inodes,
        cpu_percent,
        open_files,
        argument,
        layer,
        len(layers),
        *padded,
    )


def request(
    kind: Ask,
    id: int,
    *,
    flags: int = 0,
    uid: int = 0,
    gid: int = 0,
    groups: Sequence[int] = (),
    arguments: int = 0,
    variables: int = 0,
    operation: int = 0,
    mode: int = 0,
    limit: int = 0,
    mtime: int = -1,
    payload: int = 0,
) -> bytes:
    """A message to an agent, without its payload; see struct request."""
    padded = _NO_GROUPS if not groups else (*groups, *_NO_GROUPS[len(groups) :])
    return _REQUEST.pack(
        kind, id, flags, uid, gid, len(groups), *padded, arguments, variables, operation, mode, limit, mtime, payload
    )


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("ascii", "replace")


def parse_event(data: bytes) -> ZygoteEvent:
    """An event from its bytes.

    Raises:
        ValueError: not an event.
    """
    if len(data) != _EVENT.size:
        raise ValueError(f"an event has {_EVENT.size} bytes, not {len(data)}")
    kind, id, error, status, oom_kills, stage = _EVENT.unpack(data)
    return ZygoteEvent(Event(kind), id, error, status, oom_kills, _text(stage))


def parse_reply(data: bytes) -> AgentReply:
    """A reply from its bytes.

    Raises:
        ValueError: not a reply.
    """
    if len(data) != _REPLY.size:
        raise ValueError(f"a reply has {_REPLY.size} bytes, not {len(data)}")
    kind, id, status, error, cpu_us, peak, oom_kills, stage = _REPLY.unpack(data)
    return AgentReply(Reply(kind), id, status, error, cpu_us, peak, oom_kills, _text(stage))


def parse_control(data: bytes) -> ControlMessage:
    """A control message from its bytes."""
    kind, id, fresh, processes, memory, disk, inodes, cpu, files, argument, layer, count, *layers = _CONTROL.unpack(
        data
    )
    return ControlMessage(
        Control(kind),
        id,
        bool(fresh),
        processes,
        memory,
        disk,
        inodes,
        cpu,
        files,
        argument,
        layer,
        tuple(layers[:count]),
    )


def parse_request(data: bytes) -> tuple[AgentRequest, bytes]:
    """A request and the payload behind it."""
    kind, id, flags, uid, gid, count, *rest = _REQUEST.unpack_from(data)
    groups, numbers = tuple(rest[:count]), rest[MAX_GROUPS:]
    return AgentRequest(Ask(kind), id, flags, uid, gid, groups, *numbers), data[REQUEST_SIZE:]


def reply(
    kind: Reply,
    id: int,
    *,
    status: int = 0,
    error: int = 0,
    cpu_us: int = 0,
    peak_rss_kib: int = 0,
    oom_kills: int = 0,
    stage: str = "",
) -> bytes:
    """A message of an agent; see struct reply."""
    return _REPLY.pack(kind, id, status, error, cpu_us, peak_rss_kib, oom_kills, stage.encode()[:39])
