"""Copies of a stream, rule by rule: a test for each rule at the top of `standing`, `replica` and `master`."""

from __future__ import annotations

import pytest

from railgun.core.errors import ProtocolError
from railgun.core.replication.standing import LOST, Copy, Standing, agree

# ---------------------------------------------------------------- how a copy stands


def test_copies_agree_up_to_the_last_epoch_both_have() -> None:
    one = Standing(3, 0, 9, ((1, 4), (3, 9)))
    assert agree(one, Standing(3, 0, 7, ((1, 4), (3, 7)))) == 7
    assert agree(one, Standing(2, 0, 8, ((1, 6), (2, 8)))) == 4
    assert agree(one, Standing(2, 0, 8, ((2, 8),))) == 0


def test_a_copy_agrees_in_what_it_does_not_keep_any_more() -> None:
    assert agree(Standing(3, 0, 9, ((3, 9),)), Standing(2, 5, 5)) == 5


def test_nobody_knows_what_a_copy_has_below_the_first_message_of_the_other() -> None:
    """Something of an old epoch may lie there that was never safe."""
    one, other = Standing(3, 4, 9, ((3, 9),)), Standing(1, 0, 6, ((1, 6),))
    assert agree(one, other) < one.first


def test_the_higher_label_is_better_and_of_equals_the_longer_copy() -> None:
    assert Standing(2, 0, 1).rank > Standing(1, 0, 9).rank
    assert Standing(2, 0, 2).rank > Standing(2, 0, 1).rank
    assert Standing(0, 0, 0).rank > Standing(LOST, 0, 9).rank


def test_what_is_safe_is_never_cut_off() -> None:
    copy = Copy.of(Standing(1, 0, 9, ((1, 9),)), safe=5)
    with pytest.raises(ProtocolError, match="5 is safe"):
        copy.cut(4)
    with pytest.raises(ProtocolError, match="5 is safe"):
        copy.anew(4)
    copy.cut(5)
    assert (copy.end, copy.runs) == (5, [(1, 5)])


def test_a_copy_that_is_cut_where_it_begins_has_no_runs() -> None:
    copy = Copy.of(Standing(1, 0, 9, ((1, 9),)))
    copy.trim(4)
    copy.cut(4)
    assert copy.standing() == Standing(1, 4, 4)
