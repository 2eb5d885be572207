"""Golden transcripts: whole scenarios as text, recorded once and compared ever since.

To record anew after a wanted change: RAILGUN_REWRITE=1 ./run test tests/verification/test_transcripts.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from verification.rescale.transcript import TranscriptError, replay

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript_is_as_recorded(path: Path) -> None:
    recorded = path.read_text()
    now = replay(recorded) + "\n"
    if os.environ.get("RAILGUN_REWRITE"):
        path.write_text(now)
    else:
        assert now == recorded
    assert "violation" not in now


def test_the_important_scenarios_are_there() -> None:
    names = {path.stem for path in TRANSCRIPTS}
    assert {
        "scale_up",
        "scale_down",
        "swap",
        "new_key",
        "hold",
        "snapshot",
        "fence",
        "frontier",
    } <= names


def test_a_line_that_makes_no_sense_is_named() -> None:
    with pytest.raises(TranscriptError, match="0 dances"):
        replay("> cluster 0 owners k1=0\n> 0 dances")
