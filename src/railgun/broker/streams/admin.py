"""The calls that manage a node and its streams: one table, for the wire, for HTTP and for its documentation.

Rules:

1. A call has a name, arguments with their kinds, a sentence, and a function. Clients call it by its name (`Admin`), or
   by a method and a path of HTTP: `{name}` and `{group}` are in the path, the other arguments in the query of GET and
   DELETE, or in the JSON object of the body.
2. Arguments are checked before the function is called: an argument that is missing, unknown or of another kind is
   refused with `BAD_REQUEST`, and named. So an error inside of a function is never taken for a bad request.
3. Errors of the disk are `NO_SPACE` or `STORAGE`. Unexpected errors are `INTERNAL`, and logged; the session goes on.
4. No call blocks the node: work that waits for a disk is awaited.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal

from railgun.broker.errors import BadRequestError, storage_error
from railgun.broker.settings import STAGING
from railgun.broker.streams.node import Node, refuse_hidden
from railgun.broker.streams.persistent import Persistent
from railgun.errors import RailgunError, said, shortened

_LOG: Final = logging.getLogger(__name__)
_INTEGER_LIMIT: Final = 1 << 62  # beyond every offset


class NoClusterError(RailgunError):
    """A call about the cluster was sent to a node that belongs to none."""

    code: ClassVar[str] = "NO_CLUSTER"


class InternalError(RailgunError):
    """A call has failed because of a bug of Railgun."""

    code: ClassVar[str] = "INTERNAL"


# ---------------------------------------------------------------- kinds of arguments


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of argument: in words, as a JSON Schema, as a check, and as a parser of text from a query."""

    words: str
    schema: Mapping[str, Any]
    fits: Callable[[Any], bool]
    typed: Callable[[str], Any] = str


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _INTEGER_LIMIT


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _typed_whole(text: str) -> Any:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else text


def _is_sequence(key: Any) -> bool:
    number = _typed_whole(key)
    return _whole(number) and str(number) == key


def _typed_number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _one_of(*choices: str) -> Kind:
    words = " or ".join(map(repr, choices))
    return Kind(words, {"type": "string", "enum": list(choices)}, lambda v: v in choices)


_INTEGER: Final = {"type": "integer", "minimum": 0}
TEXT: Final = Kind("text", {"type": "string"}, lambda v: isinstance(v, str) and _is_unicode(v))
WHOLE: Final = Kind(
    f"a whole number from 0 to {_INTEGER_LIMIT - 1}", _INTEGER, _whole, _typed_whole
)
FLAG: Final = Kind(
    "true or false",
    {"type": "boolean"},
    lambda value: isinstance(value, bool),
    lambda text: {"true": True, "false": False}.get(text, text),
)
SECONDS: Final = Kind(
    "a number of seconds, up to 600",
    {"type": "number", "minimum": 0, "maximum": 600},
    lambda value: type(value) in (int, float) and 0 <= value <= 600,
    _typed_number,
)
OBJECT: Final = Kind("an object", {"type": "object"}, lambda value: isinstance(value, dict))
OFFSETS: Final = Kind(
    "a list of offsets",
    {"type": "array", "items": _INTEGER},
    lambda value: isinstance(value, list) and all(map(_whole, value)),
)
SEQUENCES: Final = replace(OFFSETS, words="a list of sequences")
PLACE: Final = Kind(
    "'start', 'end' or an offset",
    {"oneOf": [{"type": "string", "enum": ["start", "end"]}, _INTEGER]},
    lambda value: _whole(value) or (isinstance(value, str) and value in ("start", "end")),
    _typed_whole,
)
MODE: Final = _one_of("warn", "overwrite", "strict")
LIFETIME: Final = Kind(
    "a number of seconds, up to 366 days",
    {"type": "number", "minimum": 0, "maximum": 366 * 86_400},
    lambda value: type(value) in (int, float) and 0 <= value <= 366 * 86_400,
    _typed_number,
)
PRODUCER_NAME: Final = Kind(
    "text of 1 to 200 letters",
    {"type": "string", "minLength": 1, "maxLength": 200},
    lambda value: isinstance(value, str) and 0 < len(value) <= 200 and _is_unicode(value),
)
COUNTS: Final = Kind(
    "an object of sequences, each written once and without zeros before it, and numbers of messages",
    {"type": "object", "additionalProperties": _INTEGER},
    lambda value: (
        isinstance(value, dict)
        and all(_is_sequence(key) and _whole(count) for key, count in value.items())
    ),
)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a call. An optional argument may be left out, or be null."""

    name: str
    kind: Kind
    what: str
    optional: bool = True


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Call:
    """A call: its name, a sentence about it, its method and path of HTTP, its arguments, and its function."""

    name: str
    what: str
    method: Literal["GET", "PUT", "POST", "DELETE"]
    path: str
    arguments: tuple[Argument, ...]
    function: Callable[..., Awaitable[Any]]

    def checked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a request; raise `BadRequestError` if they are not valid."""
        declared = {argument.name: argument for argument in self.arguments}
        for name in values:
            if name not in declared:
                names = ", ".join(declared) or "none"
                raise BadRequestError(
                    f"{self.name} has no argument {shortened(name)}; there are {names}"
                )
        checked: dict[str, Any] = {}
        for name, argument in declared.items():
            value = values.get(name)
            if value is None and argument.optional:
                continue
            if value is None:
                raise BadRequestError(f"{self.name} needs the argument {name!r}: {argument.what}")
            if not argument.kind.fits(value):
                raise BadRequestError(f"{name} is {argument.kind.words}, not {shortened(value)}")
            checked[name] = value
        return checked


async def _list(node: Node) -> Any:
    streams = node.describe_all() if node.cluster is None else await node.cluster.describe_all()
    return [stream for stream in streams if not stream["name"].endswith(STAGING)]


async def _describe(node: Node, name: str) -> Any:
    description = node.describe(name)
    stream = node.streams.get(name)
    if node.cluster is not None and isinstance(stream, Persistent) and not stream.acting:
        why = "reported by a copy of the stream: it may be older than what the master has"
        description |= {"trouble": description["trouble"] or why, "from_copy": why}
    return description


async def _groups(node: Node, name: str) -> Any:
    return node.groups(name)


async def _group(node: Node, name: str, group: str) -> Any:
    return node.group(name, group)


async def _finished(node: Node, name: str, group: str) -> Any:
    return node.finished(name, group)


async def _nodes(node: Node) -> Any:
    if node.cluster is not None:
        return await node.cluster.administer("nodes", {})
    addresses = [] if node.routing is None else node.routing.nodes()
    return [{"host": host, "port": port} for host, port in addresses]


def _of_cluster(name: str) -> Callable[..., Awaitable[Any]]:
    """Return the function of a call about the cluster itself."""

    async def function(node: Node, /, **arguments: Any) -> Any:
        if node.cluster is None:
            raise NoClusterError(
                "this node is alone: give its file a section [cluster] with secret_file, and discovery or "
                "bootstrap_expect, and start it again (docs/operations.md)"
            )
        return await node.cluster.administer(name, arguments)

    return function


_NAME: Final = Argument("name", TEXT, "The stream.", optional=False)
_GROUP: Final = Argument("group", TEXT, "The group.", optional=False)
_NODE: Final = Argument("node", TEXT, "The node: its name, or its id.", optional=False)
_STREAM: Final = "/streams/{name}"
_OF_GROUP: Final = _STREAM + "/groups/{group}"
_PRODUCER: Final = Argument("producer", PRODUCER_NAME, "The producer.", optional=False)
_IDENTITY: Final = Argument(
    "identity",
    TEXT,
    "Identity of the stream; the call is refused if the stream was deleted and made anew.",
)
_EPOCH: Final = Argument("epoch", WHOLE, "The epoch of the producer.", optional=False)
_OF_PRODUCER: Final = _STREAM + "/producers/{producer}"

_TABLE: Final = (
    Call("list", "List all streams, with their groups.", "GET", "/streams", (), _list),
    Call("nodes", "List the nodes of the cluster, as clients reach them.", "GET", "/nodes", (), _nodes),
    Call(
        "ensure", "Make a stream, change its settings, or tell how they differ.", "PUT", _STREAM,
        (
            _NAME,
            Argument("asked", OBJECT, "Settings of the stream; others are unchanged, or default if it is new."),
            Argument("mode", MODE, "If settings differ: warn (tell; default), overwrite, or strict (refuse)."),
        ),
        Node.ensure,
    ),
    Call("describe", "Describe a stream: settings, offsets, size, groups.", "GET", _STREAM, (_NAME,), _describe),
    Call(
        "delete", "Delete a stream and all its messages; its consumers get an error.", "DELETE", _STREAM,
        (_NAME, Argument("dead_letters", FLAG, "Delete its dead letters, too.")),
        Node.delete,
    ),
    Call(
        "purge", "Remove messages of a stream for good; offsets go on.", "POST", _STREAM + "/purge",
        (_NAME, Argument("before", WHOLE, "Remove only messages before this offset; a committed unit is cut.")),
        Node.purge,
    ),
    Call(
        "redrive", "Deliver dead letters again, each once, to the group that gave them up.", "POST",
        _STREAM + "/redrive",
        (
            _NAME,
            Argument("offsets", OFFSETS, "Redrive only the letters at these offsets of the dead letters."),
            Argument("most", WHOLE, "Redrive at most this many letters."),
        ),
        Node.redrive,
    ),
    Call("groups", "List the groups of a stream.", "GET", _STREAM + "/groups", (_NAME,), _groups),
    Call(
        "group", "Describe a group: its state, its lag, and why it gets no messages.", "GET", _OF_GROUP,
        (_NAME, _GROUP), _group,
    ),
    Call(
        "finished", "Tell which messages a group has finished with.", "GET", _OF_GROUP + "/finished",
        (_NAME, _GROUP), _finished,
    ),
    Call(
        "reset_group", "Move the position of a group without members.", "POST",
        _OF_GROUP + "/reset",
        (_NAME, _GROUP, Argument("to", PLACE, "The new position: 'start', 'end' or an offset.", optional=False)),
        Node.reset_group,
    ),
    Call(
        "delete_group", "Delete a group without members, and its position.", "DELETE", _OF_GROUP,
        (_NAME, _GROUP), Node.delete_group,
    ),
    Call(
        "producers", "List the producers of a stream, and what they have staged.", "GET",
        _STREAM + "/producers", (_NAME,), Node.producers,
    ),
    Call(
        "begin_producer", "Begin an epoch of a producer; calls with a lower epoch are refused from then on.", "POST",
        _OF_PRODUCER + "/begin",
        (
            _NAME, _PRODUCER,
            Argument("epoch", WHOLE, "Number of the epoch."),
            Argument("session", PRODUCER_NAME, "Instead of epoch: a new session gets the next epoch, keeps nothing."),
            Argument("keep", SEQUENCES, "Drop what earlier epochs have staged, except these sequences."),
            Argument("lifetime", LIFETIME, "Forget the producer if it is unused for this long (default: never)."),
        ),
        Node.begin_producer,
    ),
    Call(
        "open_sequence", "Give a producer a sequence to stage messages for.", "POST",
        _OF_PRODUCER + "/open",
        (
            _NAME, _PRODUCER, _EPOCH,
            Argument("label", WHOLE, "Label of the later commit; the call is refused if that label was committed."),
            _IDENTITY,
        ),
        Node.open_sequence,
    ),
    Call(
        "commit_sequences", "Add staged messages of a producer to the stream: all of them, once.", "POST",
        _OF_PRODUCER + "/commit",
        (
            _NAME, _PRODUCER, _EPOCH,
            Argument("counts", COUNTS, "The sequences to commit, each with its number of messages.", optional=False),
            Argument("order", SEQUENCES, "The order of the sequences in the stream; ascending, if not given."),
            Argument("label", WHOLE, "Label of this commit: a label that was committed before is not committed again."),
            Argument("label_since", WHOLE, "Labels from this one up to label count as committed, too."),
            _IDENTITY,
        ),
        Node.commit_sequences,
    ),
    Call(
        "drop_sequences", "Drop staged messages of a producer.", "POST",
        _OF_PRODUCER + "/drop",
        (
            _NAME, _PRODUCER, _EPOCH,
            Argument("sequences", SEQUENCES, "The sequences to drop.", optional=False),
            _IDENTITY,
        ),
        Node.drop_sequences,
    ),
    Call(
        "forget_producer", "Forget a producer, and drop what it has staged.", "DELETE", _OF_PRODUCER,
        (_NAME, _PRODUCER), Node.forget_producer,
    ),
    Call(
        "cluster", "Describe the cluster: nodes, regions and alarms, as reported by all nodes that answer.", "GET",
        "/cluster", (), _of_cluster("cluster"),
    ),
    Call(
        "remove_node", "Remove a node from the cluster, step by step.", "DELETE", "/nodes/{node}",
        (_NODE, Argument("wait", SECONDS, "Answer when the node has left, or after this time.")),
        _of_cluster("remove_node"),
    ),
    Call(
        "keep_node", "Cancel the removal of a node.", "POST", "/nodes/{node}/keep",
        (_NODE,), _of_cluster("keep_node"),
    ),
    Call(
        "transfer", "Make a node the master of a region, or the leader of the cluster.", "POST",
        "/cluster/transfer",
        (_NODE, Argument("region", TEXT, "The region; if not given, the node becomes the leader of the cluster.")),
        _of_cluster("transfer"),
    ),
    Call(
        "cluster_settings", "Change settings of the cluster, and return all of them.", "POST",
        "/cluster/settings",
        (Argument("change", OBJECT, "The settings to change, by name."),), _of_cluster("cluster_settings"),
    ),
    Call(
        "join", "Tell a node without a cluster the address of a member of one.", "POST", "/cluster/join",
        (
            Argument("address", TEXT, "HOST:PORT of a member, with its port for nodes (cluster_port).", optional=False),
            Argument("wait", SECONDS, "Answer when the node is a member, or after this time."),
        ),
        _of_cluster("join"),
    ),
)  # fmt: skip
CALLS: Final[Mapping[str, Call]] = {call.name: call for call in _TABLE}
OF_MASTER: Final = frozenset(
    {"describe", "purge", "redrive", "groups", "group", "finished", "reset_group", "delete_group"}
    | {"producers", "begin_producer", "open_sequence", "commit_sequences", "forget_producer"}
    | {"drop_sequences"}
)
"""Calls that only the master of a stream can serve."""
OF_COPY: Final = frozenset({"describe"})
"""Those calls that any copy of a stream can answer if no master can be reached."""


# ---------------------------------------------------------------- calling


def arguments_of(text: str | bytes) -> dict[str, Any]:
    """Return the arguments of a call from their JSON text; no text means no arguments.

    >>> arguments_of('{"name": "orders"}'), arguments_of("")
    ({'name': 'orders'}, {})
    """
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise BadRequestError("the arguments are to be a JSON object")
    return arguments


async def call(node: Node, name: str, values: Mapping[str, Any]) -> Any:
    """Run the call `name` with these arguments, and return its result.

    Raise nothing but a `RailgunError` with a code.
    """
    entry = CALLS.get(name)
    if entry is None:
        raise BadRequestError(f"there is no call {shortened(name)}; there are {', '.join(CALLS)}")
    arguments = entry.checked(values)
    refuse_hidden(str(arguments.get("name", "")))
    try:
        return await entry.function(node, **arguments)
    except RailgunError:
        raise
    except OSError as error:
        raise storage_error(error, f"{name} has failed") from error
    except Exception as error:
        _LOG.exception("the call %s has failed with an unexpected error", name)
        raise InternalError(
            f"{name} has failed: {type(error).__name__}: {said(error)}. This is an error of Railgun."
        ) from error
