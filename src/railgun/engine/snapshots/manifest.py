"""Read and write manifests, which list the files of a snapshot. A snapshot is committed when its manifest exists.

Rules:

1. A manifest lists *all* files that together are the state, oldest first: those of a full snapshot and of the
   increments since. For a key the row of the last file that has one is valid.
2. A manifest is a JSON file that people and programs can read: `{"checksum": ..., "manifest": {...}}`. The checksum
   covers the content (as JSON, sorted, without spaces), so any change is noticed.
3. Format 1 will always be readable. Later formats keep the envelope, so an older Railgun can report that it is older.
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
    """Path, relative to the directory of the flow."""
    snapshot: int
    """Number of the snapshot that it was written for."""
    stage: str
    step: str
    worker: int
    rows: int
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class SinkPart:
    """Output that a sink has prepared, to be made visible when the snapshot is committed."""

    step: str
    token: Any
    """Data that the sink needs to commit the output, as JSON."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step that has state, or a sink."""

    name: str
    kind: str
    version: int
    layout: Mapping[str, Any] | None = None
    """The layout on which the positions of a source depend (`Source.layout`), as JSON. None in older snapshots."""


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
    """Whether the flow had finished: then this is its last snapshot."""
    began: float
    committed: float
    parts: tuple[Part, ...]
    sinks: tuple[SinkPart, ...]
    steps: tuple[StepInfo, ...]
    phases: dict[str, float] = field(default_factory=dict)
    """Duration of each phase of the snapshot (seconds)."""
    streams: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By step: the ID of the last message of each stream that connectors have sent."""
    frontiers: Mapping[str, int] = field(default_factory=dict)
    """By step: the watermark (µs) at the cut. Snapshots of older Railguns have none."""
    reached: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By step: the watermark (µs) of each stream of connectors. Snapshots of older Railguns have none."""

    @property
    def size(self) -> int:
        """Return the bytes of all its files."""
        return sum(part.size for part in self.parts)

    @property
    def rows(self) -> int:
        """Return the number of rows of all its files; a key may have several."""
        return sum(part.rows for part in self.parts)

    def to_json(self) -> bytes:
        """Return the content of the manifest file. Raises `SnapshotError` if the token of a sink is not JSON.

        >>> manifest = Manifest(1, "demo", 7, 2, 4, True, False, 1.5, 2.5, (), (SinkPart("out", [1]),), ())
        >>> Manifest.from_json(manifest.to_json(), "7.json") == manifest
        True
        """
        for sink in self.sinks:
            _check_token(self.snapshot, sink)
        content = asdict(self)
        return seal("manifest", content)

    @staticmethod
    def from_json(data: bytes, name: str) -> Manifest:
        """Return the manifest in a file's content. Raises `DamagedError` and `FormatError`, which name the file."""
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
                parts=tuple(_from_dict(Part, part) for part in content["parts"]),
                sinks=tuple(_from_dict(SinkPart, sink) for sink in content["sinks"]),
                steps=tuple(_from_dict(StepInfo, step) for step in content["steps"]),
                phases=dict(content["phases"]),
                streams=_by_stream(content.get("streams", {})),
                frontiers={s: int(at) for s, at in content.get("frontiers", {}).items()},
                reached=_by_stream(content.get("reached", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(name, f"it is no manifest ({type(error).__name__}: {error})") from error


def checksum(data: bytes) -> str:
    """Return the checksum that identifies a file's content.

    >>> checksum(b"")[:20]
    'sha256:e3b0c44298fc1'
    """
    return "sha256:" + hashlib.sha256(data).hexdigest()


def seal(kind: str, content: Mapping[str, Any]) -> bytes:
    """Return `content` as a JSON file under the name `kind`, with a checksum."""
    sealed = {"checksum": checksum(_canonical(content)), kind: content}
    return json.dumps(sealed, indent=1, allow_nan=False).encode() + b"\n"


def unseal(kind: str, data: bytes, name: str) -> dict[str, Any]:
    """Return the content of a file that `seal` made. Raises `DamagedError` if it was changed."""
    try:
        sealed = json.loads(data)
        content, stored_checksum = sealed[kind], sealed["checksum"]
        intact = isinstance(content, dict) and stored_checksum == checksum(_canonical(content))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(name, f"it cannot be read ({type(error).__name__}: {error})") from error
    if not intact:
        raise damaged(name, "its checksum does not fit its content")
    return dict(content)


def damaged(name: str, what: str) -> DamagedError:
    """Return the error for a file that is not what was written."""
    return DamagedError(
        f"{name} is damaged: {what}. Bring it back from a copy, or load an older snapshot."
    )


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _from_dict(kind: Any, values: dict[str, Any]) -> Any:
    """Return a dataclass of this module, made of `values`.

    Fields of later versions are ignored, and fields with a default may be missing.
    """
    fields = kind.__dataclass_fields__
    return kind(
        **{
            name: values[name]
            for name in fields
            if name in values or fields[name].default is MISSING
        }
    )


def _by_stream(steps: Any) -> dict[str, dict[str, int]]:
    return {
        step: {name: int(number) for name, number in streams.items()}
        for step, streams in steps.items()
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
