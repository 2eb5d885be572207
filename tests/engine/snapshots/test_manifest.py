"""Manifests come back as they were, and any change of them is noticed."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from railgun.engine.snapshots.errors import DamagedError, FormatError, SnapshotError
from railgun.engine.snapshots.manifest import Manifest, Part, SinkPart, StepInfo, seal

FIXTURES = Path(__file__).parent / "data"

MANIFEST = Manifest(
    format=1,
    flow="demo té",
    snapshot=12,
    generation=3,
    workers=4,
    full=False,
    finished=True,
    began=1_700_000_000.123456,
    committed=1_700_000_001.5,
    parts=(
        Part("data/000000000011/a/b/worker-0-g3.parquet", 11, "a", "b", 0, 10, 1000, "sha256:1"),
        Part("data/000000000012/a/b/worker-1-g3.parquet", 12, "a", "b", 1, 2, 300, "sha256:2"),
    ),
    sinks=(SinkPart("out", {"files": ["x", 1, None, 2.5]}), SinkPart("out", None)),
    steps=(StepInfo("b", "reduce", 2), StepInfo("out", "sink", 1)),
    phases={"align": 0.25, "write": 1e-9},
)


def test_a_manifest_comes_back_as_it_was() -> None:
    data = MANIFEST.to_json()
    assert Manifest.from_json(data, "m") == MANIFEST
    assert (MANIFEST.rows, MANIFEST.size) == (12, 1300)
    assert json.loads(data)["manifest"]["flow"] == "demo té", "for people and programs"


def test_every_byte_that_counts_is_checked() -> None:
    data = MANIFEST.to_json()
    chance = random.Random(1)
    for _ in range(500):
        at, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
        changed = bytearray(data)
        changed[at] ^= bit
        try:
            read = Manifest.from_json(bytes(changed), "manifests/12.json")
        except DamagedError as error:
            told = str(error)
        else:
            assert read == MANIFEST, "a space, or a letter of an escape"
            continue
        assert told.startswith("manifests/12.json is damaged: ")
        assert "load an older snapshot" in told


@pytest.mark.parametrize("size", [0, 1, 50, 500, len(MANIFEST.to_json()) - 3])
def test_a_manifest_cut_off_is_refused(size: int) -> None:
    with pytest.raises(DamagedError, match=r"^x\.json is damaged"):
        Manifest.from_json(MANIFEST.to_json()[:size], "x.json")


@pytest.mark.parametrize(
    "data", [b"[]", b"null", b"{}", b'{"manifest": 1, "checksum": 2}', b"\xff"]
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedError, match=r"^x\.json is damaged"):
        Manifest.from_json(data, "x.json")


def test_a_manifest_without_a_field_is_refused_and_one_with_more_is_read() -> None:
    content = dataclasses.asdict(MANIFEST)
    for name in content.keys() - {
        "streams",
        "frontiers",
        "reached",
    }:  # which manifests of before have not
        less = {field: value for field, value in content.items() if field != name}
        with pytest.raises((DamagedError, FormatError), match=r"^x\.json "):
            Manifest.from_json(seal("manifest", less), "x.json")
    more: dict[str, Any] = content | {"later": 1}
    assert Manifest.from_json(seal("manifest", more), "x.json") == MANIFEST


def test_a_later_format_is_told_from_damage() -> None:
    later = dataclasses.asdict(MANIFEST) | {"format": 2}
    with pytest.raises(FormatError, match=r"x\.json has format 2, this Railgun reads up to 1"):
        Manifest.from_json(seal("manifest", later), "x.json")


@pytest.mark.parametrize("token", [b"x", (1, 2), {1: 2}, float("nan"), object()])
def test_a_token_that_json_would_change_is_refused(token: Any) -> None:
    bad = dataclasses.replace(MANIFEST, sinks=(SinkPart("out", token),))
    with pytest.raises(SnapshotError, match=r"the token of sink 'out' is no JSON"):
        bad.to_json()


def test_format_1_is_read_for_ever() -> None:
    """The file was written once, and must never be written again: people have such files."""
    data = (FIXTURES / "snapshot-manifest-1.json").read_bytes()
    assert Manifest.from_json(data, "fixture") == MANIFEST
