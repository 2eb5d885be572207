"""What a node can be asked to do with its streams: one table, for the wire, for HTTP and for its documentation.

Rules:

1. A call has a name, arguments with their kinds, a sentence, and a function. Clients call it by its name (`Admin`), or
   by a method and a path of HTTP: `{name}` and `{group}` are in the path, the others in the query of GET and DELETE, or
   in the JSON object that is sent.
2. Arguments are checked before the function is called: what is missing, unknown or of another kind is `BAD_REQUEST`,
   and named. So what goes wrong inside of a function is never taken for a bad request.
3. What a disk says is `NO_SPACE` or `STORAGE`. What nobody has thought of is `INTERNAL`, and logged; the session goes
   on.
4. No call holds up the node: what waits for a disk is awaited.
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
_MOST: Final = 1 << 62  # beyond every offset


class NoClusterError(RailgunError):
    """A node that is alone was asked for something of a cluster."""

    code: ClassVar[str] = "NO_CLUSTER"


class InternalError(RailgunError):
    """An error of Railgun."""

    code: ClassVar[str] = "INTERNAL"


# ---------------------------------------------------------------- kinds of arguments


@dataclass(frozen=True, slots=True)
class Kind:
    """What an argument may be: in words, for a program (JSON Schema), and as it stands in a query."""

    words: str
    schema: Mapping[str, Any]
    fits: Callable[[Any], bool]
    typed: Callable[[str], Any] = str


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


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
WHOLE: Final = Kind(f"a whole number from 0 to {_MOST - 1}", _INTEGER, _whole, _typed_whole)
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
    """One argument. An optional one may be left out, or be null."""

    name: str
    kind: Kind
    what: str
    optional: bool = True


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Call:
    """One thing a node can be asked for."""

    name: str
    what: str
    method: Literal["GET", "PUT", "POST", "DELETE"]
    path: str
    arguments: tuple[Argument, ...]
    function: Callable[..., Awaitable[Any]]

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, if they are what they are to be."""
        known = {argument.name: argument for argument in self.arguments}
        for name in given:
            if name not in known:
                there = ", ".join(known) or "none"
                raise BadRequestError(
                    f"{self.name} has no argument {shortened(name)}; there are {there}"
                )
        found: dict[str, Any] = {}
        for name, argument in known.items():
            value = given.get(name)
            if value is None and argument.optional:
                continue
            if value is None:
                raise BadRequestError(f"{self.name} needs the argument {name!r}: {argument.what}")
            if not argument.kind.fits(value):
                raise BadRequestError(f"{name} is {argument.kind.words}, not {shortened(value)}")
            found[name] = value
        return found


async def _list(node: Node) -> Any:
    found = node.every() if node.cluster is None else await node.cluster.every()
    return [one for one in found if not one["name"].endswith(STAGING)]


async def _describe(node: Node, name: str) -> Any:
    told = node.describe(name)
    stream = node.streams.get(name)
    if node.cluster is not None and isinstance(stream, Persistent) and not stream.acting:
        why = "told by a copy of the stream: it may be older than what the master has"
        told |= {"trouble": told["trouble"] or why, "from_copy": why}
    return told


async def _groups(node: Node, name: str) -> Any:
    return node.groups(name)


async def _group(node: Node, name: str, group: str) -> Any:
    return node.group(name, group)


async def _finished(node: Node, name: str, group: str) -> Any:
    return node.finished(name, group)


async def _nodes(node: Node) -> Any:
    if node.cluster is not None:
        return await node.cluster.administer("nodes", {})
    known = [] if node.routing is None else node.routing.nodes()
    return [{"host": host, "port": port} for host, port in known]


def _of_cluster(name: str) -> Callable[..., Awaitable[Any]]:
    """A call that is about the cluster itself."""

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
_IDENTITY: Final = Argument("identity", TEXT, "Of the stream: one that was made anew is refused.")
_EPOCH: Final = Argument("epoch", WHOLE, "Its epoch.", optional=False)
_OF_PRODUCER: Final = _STREAM + "/producers/{producer}"

_TABLE: Final = (
    Call("list", "All streams, with their groups.", "GET", "/streams", (), _list),
    Call("nodes", "The nodes of the cluster, as clients reach them.", "GET", "/nodes", (), _nodes),
    Call(
        "ensure", "Make a stream what it is asked to be, or tell how it differs.", "PUT", _STREAM,
        (
            _NAME,
            Argument("asked", OBJECT, "Its settings; those that are not given are as they are, or usual."),
            Argument("mode", MODE, "What to do with one that differs: tell, change it, or refuse."),
        ),
        Node.ensure,
    ),
    Call("describe", "What there is to know of a stream.", "GET", _STREAM, (_NAME,), _describe),
    Call(
        "delete", "Delete a stream with all that is in it; its consumers are told.", "DELETE", _STREAM,
        (_NAME, Argument("dead_letters", FLAG, "Its dead letters, too.")),
        Node.delete,
    ),
    Call(
        "purge", "Take messages out of a stream for good; offsets go on.", "POST", _STREAM + "/purge",
        (_NAME, Argument("before", WHOLE, "Only those before this offset; within a committed unit, it is cut.")),
        Node.purge,
    ),
    Call(
        "redrive", "Deliver dead letters again, each once, to the group that gave it up.", "POST",
        _STREAM + "/redrive",
        (
            _NAME,
            Argument("offsets", OFFSETS, "Only these letters, by their offset in the dead letters."),
            Argument("most", WHOLE, "At most so many."),
        ),
        Node.redrive,
    ),
    Call("groups", "The groups of a stream.", "GET", _STREAM + "/groups", (_NAME,), _groups),
    Call(
        "group", "What a group does, and why it gets nothing.", "GET", _OF_GROUP,
        (_NAME, _GROUP), _group,
    ),
    Call(
        "finished", "Which messages a group has finished with.", "GET", _OF_GROUP + "/finished",
        (_NAME, _GROUP), _finished,
    ),
    Call(
        "reset_group", "Let a group without members begin anew somewhere.", "POST",
        _OF_GROUP + "/reset",
        (_NAME, _GROUP, Argument("to", PLACE, "Where it begins.", optional=False)),
        Node.reset_group,
    ),
    Call(
        "delete_group", "Forget a group without members, and its position.", "DELETE", _OF_GROUP,
        (_NAME, _GROUP), Node.delete_group,
    ),
    Call(
        "producers", "The producers of a stream, and what they have staged.", "GET",
        _STREAM + "/producers", (_NAME,), Node.producers,
    ),
    Call(
        "begin_producer", "Begin an epoch of a producer; those with a lower one are refused from then on.", "POST",
        _OF_PRODUCER + "/begin",
        (
            _NAME, _PRODUCER,
            Argument("epoch", WHOLE, "Its epoch, by its number."),
            Argument("session", PRODUCER_NAME, "Or who begins: a new one gets the next epoch, and nothing is kept."),
            Argument("keep", SEQUENCES, "Drop what earlier epochs have staged, but for these sequences."),
            Argument("lifetime", LIFETIME, "Forget it when it is not used for so long; never, if that is not given."),
        ),
        Node.begin_producer,
    ),
    Call(
        "open_sequence", "Give a producer a sequence to stage messages for.", "POST",
        _OF_PRODUCER + "/open",
        (
            _NAME, _PRODUCER, _EPOCH,
            Argument("label", WHOLE, "Which it will be committed under: refused if that was done."),
            _IDENTITY,
        ),
        Node.open_sequence,
    ),
    Call(
        "commit_sequences", "Let what a producer has staged be part of a stream, all of it, once.", "POST",
        _OF_PRODUCER + "/commit",
        (
            _NAME, _PRODUCER, _EPOCH,
            Argument("counts", COUNTS, "The sequences, each with its number of messages.", optional=False),
            Argument("order", SEQUENCES, "The same sequences, as they follow one another; ascending, if not given."),
            Argument("label", WHOLE, "A number for this commit: one that was committed before is not done again."),
            Argument("label_since", WHOLE, "Labels from this one on count as committed, too."),
            _IDENTITY,
        ),
        Node.commit_sequences,
    ),
    Call(
        "drop_sequences", "Drop what a producer has staged for some sequences.", "POST",
        _OF_PRODUCER + "/drop",
        (
            _NAME, _PRODUCER, _EPOCH,
            Argument("sequences", SEQUENCES, "The sequences.", optional=False),
            _IDENTITY,
        ),
        Node.drop_sequences,
    ),
    Call(
        "forget_producer", "Forget a producer, with what it has staged.", "DELETE", _OF_PRODUCER,
        (_NAME, _PRODUCER), Node.forget_producer,
    ),
    Call(
        "cluster", "How the cluster is: nodes, regions, alarms; from all nodes that answer.", "GET",
        "/cluster", (), _of_cluster("cluster"),
    ),
    Call(
        "remove_node", "Let a node leave the cluster, step by step.", "DELETE", "/nodes/{node}",
        (_NODE, Argument("wait", SECONDS, "Answer when it is gone, but not later than that.")),
        _of_cluster("remove_node"),
    ),
    Call(
        "keep_node", "Let a node stay that was to leave.", "POST", "/nodes/{node}/keep",
        (_NODE,), _of_cluster("keep_node"),
    ),
    Call(
        "transfer", "Let a node be the master of a region, or lead the cluster.", "POST",
        "/cluster/transfer",
        (_NODE, Argument("region", TEXT, "The region; without one, the node is to lead.")),
        _of_cluster("transfer"),
    ),
    Call(
        "cluster_settings", "Change settings of the cluster; what they are now.", "POST",
        "/cluster/settings",
        (Argument("change", OBJECT, "Those that change."),), _of_cluster("cluster_settings"),
    ),
    Call(
        "join", "Tell a node that belongs to no cluster yet where one is.", "POST", "/cluster/join",
        (
            Argument("address", TEXT, "HOST:PORT for nodes (cluster_port) of a member.", optional=False),
            Argument("wait", SECONDS, "Answer when it is a member, but not later than that."),
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
"""Calls that only the master of the stream can do."""
OF_COPY: Final = frozenset({"describe"})
"""Of these, what any copy can tell if no master can be reached."""


# ---------------------------------------------------------------- calling


def arguments_of(text: str | bytes) -> dict[str, Any]:
    """The arguments of a call, as they travel: a JSON object, or nothing.

    >>> arguments_of('{"name": "orders"}'), arguments_of("")
    ({'name': 'orders'}, {})
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the arguments are not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadRequestError("the arguments are to be a JSON object")
    return found


async def call(node: Node, name: str, given: Mapping[str, Any]) -> Any:
    """Do what was asked for; what is told of it. Every error is a `RailgunError` with a code."""
    asked = CALLS.get(name)
    if asked is None:
        raise BadRequestError(f"there is no call {shortened(name)}; there are {', '.join(CALLS)}")
    arguments = asked.checked(given)
    refuse_hidden(str(arguments.get("name", "")))
    try:
        return await asked.function(node, **arguments)
    except RailgunError:
        raise
    except OSError as error:
        raise storage_error(error, f"{name} has failed") from error
    except Exception as error:
        _LOG.exception("the call %s has failed in a way nobody has thought of", name)
        raise InternalError(
            f"{name} has failed: {type(error).__name__}: {said(error)}. This is an error of Railgun."
        ) from error
