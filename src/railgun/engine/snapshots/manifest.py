"""Manifests: what belongs to a snapshot. A snapshot is committed when its manifest is there, and not before.

Rules:

1. A manifest lists *all* files that together are the state, oldest first: a full snapshot's, and those of the
   increments since. For a key the row of the last file that has one counts.
2. It is one file of JSON for people and programs: `{"checksum": ..., "manifest": {...}}`. The checksum is over the
   content (as JSON, sorted, without spaces), so any change of it is noticed.
3. Format 1 is read for ever. Later formats keep the envelope, so that an older Railgun can say that it is older.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field
from typing import Any, Final

from railgun.engine.snapshots.errors import DamagedError, FormatError, SnapshotError

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One file of state: the rows of a step on a worker."""

    path: str
    """Relative to the directory of the flow."""
    snapshot: int
    """The one it was written for."""
    stage: str
    step: str
    worker: int
    rows: int
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class SinkPart:
    """What a sink has prepared, and makes visible when the snapshot is committed."""

    step: str
    token: Any
    """Whatever the sink needs to do so, as JSON."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step that has state, or a sink."""

    name: str
    kind: str
    version: int
    layout: Mapping[str, Any] | None = None
    """What the positions of a source depend on (`Source.layout`), as JSON. Snapshots of older versions have none."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed snapshot."""

    format: int
    flow: str
    snapshot: int
    generation: int
    workers: int
    full: bool
    finished: bool
    """Whether it is the last one of a flow that has come to its end."""
    began: float
    committed: float
    parts: tuple[Part, ...]
    sinks: tuple[SinkPart, ...]
    steps: tuple[StepInfo, ...]
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds that each phase of it took."""
    streams: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By step: the id of the last message of each stream that connectors have sent."""
    frontiers: Mapping[str, int] = field(default_factory=dict)
    """By step: how far time (µs) had come at the cut. Snapshots of older versions have none."""
    reached: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By step: how far time (µs) has come in each stream of connectors. Snapshots of older versions have none."""

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(part.size for part in self.parts)

    @property
    def rows(self) -> int:
        """Rows of all its files; a key may have several."""
        return sum(part.rows for part in self.parts)

    def to_json(self) -> bytes:
        """The file.

        >>> one = Manifest(1, "demo", 7, 2, 4, True, False, 1.5, 2.5, (), (SinkPart("out", [1]),), ())
        >>> Manifest.from_json(one.to_json(), "7.json") == one
        True
        """
        for sink in self.sinks:
            _check_token(self.snapshot, sink)
        content = asdict(self)
        return seal("manifest", content)

    @staticmethod
    def from_json(data: bytes, name: str) -> Manifest:
        """A manifest again; `DamagedError` names the file, if it is not what was written."""
        content = unseal("manifest", data, name)
        if content.get("format") != FORMAT:
            raise FormatError(
                f"{name} has format {content.get('format')}, this Railgun reads up to {FORMAT}: "
                "load it with the version that wrote it, or a newer one."
            )
        try:
            return Manifest(
                format=content["format"],
                flow=content["flow"],
                snapshot=content["snapshot"],
                generation=content["generation"],
                workers=content["workers"],
                full=content["full"],
                finished=content["finished"],
                began=content["began"],
                committed=content["committed"],
                parts=tuple(_made(Part, part) for part in content["parts"]),
                sinks=tuple(_made(SinkPart, sink) for sink in content["sinks"]),
                steps=tuple(_made(StepInfo, step) for step in content["steps"]),
                phases=dict(content["phases"]),
                streams=_by_stream(content.get("streams", {})),
                frontiers={s: int(at) for s, at in content.get("frontiers", {}).items()},
                reached=_by_stream(content.get("reached", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(name, f"it is no manifest ({type(error).__name__}: {error})") from error


def checksum(data: bytes) -> str:
    """What tells a file from any other.

    >>> checksum(b"")[:20]
    'sha256:e3b0c44298fc1'
    """
    return "sha256:" + hashlib.sha256(data).hexdigest()


def seal(kind: str, content: Mapping[str, Any]) -> bytes:
    """A file of JSON with a checksum over its content."""
    sealed = {"checksum": checksum(_canonical(content)), kind: content}
    return json.dumps(sealed, indent=1, allow_nan=False).encode() + b"\n"


def unseal(kind: str, data: bytes, name: str) -> dict[str, Any]:
    """The content of such a file, if it is what was written."""
    try:
        sealed = json.loads(data)
        content, told = sealed[kind], sealed["checksum"]
        whole = isinstance(content, dict) and told == checksum(_canonical(content))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(name, f"it cannot be read ({type(error).__name__}: {error})") from error
    if not whole:
        raise damaged(name, "its checksum does not fit its content")
    return dict(content)


def damaged(name: str, what: str) -> DamagedError:
    """A file is not what was written."""
    return DamagedError(
        f"{name} is damaged: {what}. Bring it back from a copy, or load an older snapshot."
    )


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _made(kind: Any, told: dict[str, Any]) -> Any:
    """Make one of our dataclasses; leave out fields of later versions, and fields with a default may be missing."""
    fields = kind.__dataclass_fields__
    return kind(
        **{name: told[name] for name in fields if name in told or fields[name].default is MISSING}
    )


def _by_stream(told: Any) -> dict[str, dict[str, int]]:
    return {
        step: {name: int(number) for name, number in streams.items()}
        for step, streams in told.items()
    }


def _check_token(snapshot: int, sink: SinkPart) -> None:
    try:
        same = json.loads(json.dumps(sink.token, allow_nan=False)) == sink.token
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise SnapshotError(
            f"snapshot {snapshot}: the token of sink {sink.step!r} is no JSON that reads as it was: {sink.token!r}. "
            "A token is made of dicts with text as keys, lists, text, numbers, True, False and None."
        )
