"""Producers of a stream: epochs, sequences, staging and commits, rule by rule."""

from __future__ import annotations

import json

import pytest

from railgun.broker.protocol.producers import registry as rules
from railgun.broker.protocol.producers.producer import (
    BusyError,
    FencedError,
    GapError,
    Intent,
    LabelForgottenError,
    LostOutputError,
    NoProducerError,
    SequenceOverError,
)
from railgun.broker.protocol.producers.registry import Producers
from railgun.errors import ProtocolError


def begun(epoch: int = 1) -> Producers:
    """A stream with the producer "flow"."""
    made = Producers()
    made.begin("flow", epoch, now=0)
    return made


def staged(producers: Producers, count: int = 3, epoch: int = 1, offset: int = 0) -> int:
    """Stage so many messages for a new sequence, which is returned."""
    sequence, _ = producers.open("flow", epoch, now=0)
    number = producers.by_name["flow"].number
    assert producers.staged(number, epoch, sequence, 0, count, 10 * count, offset)
    return sequence


def commit(producers: Producers, counts: dict[int, int], epoch: int = 1) -> Intent | None:
    return producers.commit("flow", epoch, counts, end=100, now=0)


def committed(producers: Producers, counts: dict[int, int], epoch: int = 1) -> None:
    intent = commit(producers, counts, epoch)
    assert intent is not None
    producers.committed("flow", intent.number)


def again(producers: Producers) -> Producers:
    """The same producers after a restart, by their notes."""
    notes = {name: json.loads(json.dumps(one.note())) for name, one in producers.by_name.items()}
    return Producers.load(notes)


def test_an_older_epoch_is_refused_for_ever() -> None:
    producers = begun(epoch=2)
    sequence = staged(producers, epoch=2)
    for later in (producers, again(producers)):
        number = later.by_name["flow"].number
        with pytest.raises(FencedError, match="epoch 2: epoch 1 is over"):
            later.begin("flow", 1, now=0)
        with pytest.raises(FencedError):
            later.open("flow", 1, now=0)
        with pytest.raises(FencedError):
            later.staged(number, 1, sequence, 3, 1, 10, 3)
        with pytest.raises(FencedError):
            commit(later, {sequence: 3})


def test_an_epoch_has_to_begin() -> None:
    producers = begun()
    for name, epoch in (("flow", 2), ("other", 1)):
        with pytest.raises(NoProducerError, match="begin it first"):
            producers.open(name, epoch, now=0)
    with pytest.raises(NoProducerError):
        producers.staged(99, 1, 1, 0, 1, 1, 0)


def test_the_next_epoch_commits_what_was_staged_before() -> None:
    producers = begun()
    sequence = staged(producers)
    producers.begin("flow", 2, now=0, keep=[sequence])
    assert commit(producers, {sequence: 3}, epoch=2) == Intent(1, (sequence,), 100)


def test_the_next_epoch_drops_what_it_does_not_keep() -> None:
    producers = begun()
    kept, dropped = staged(producers), staged(producers, offset=3)
    producers.begin("flow", 2, now=0, keep=[kept])
    for later in (producers, again(producers)):
        later.found(1, dropped, 3, 30, 3)
        with pytest.raises(LostOutputError, match=f"sequence {dropped} is neither staged"):
            commit(later, {dropped: 3}, epoch=2)


def test_who_takes_part_in_an_epoch_drops_nothing() -> None:
    producers = begun()
    sequence = staged(producers)
    producers.begin("flow", 1, now=0)
    producers.begin("flow", 1, now=0, keep=[])  # it is of this very epoch
    assert commit(producers, {sequence: 3}) is not None


def test_no_sequence_is_given_twice() -> None:
    producers = begun()
    given = {producers.open("flow", 1, now=0)[0] for _ in range(2 * rules.RESERVED)}
    assert len(given) == 2 * rules.RESERVED
    assert again(producers).open("flow", 1, now=0)[0] not in given


def test_a_sequence_is_told_when_the_note_covers_it() -> None:
    producers = begun()
    for _ in range(3 * rules.RESERVED):
        reserved = producers.by_name["flow"].reserved
        sequence, has_to_note = producers.open("flow", 1, now=0)
        assert has_to_note or sequence < reserved
        assert sequence < producers.by_name["flow"].reserved


def test_whoever_opens_while_a_note_is_written_waits_for_it_too() -> None:
    producers = begun()
    assert [producers.open("flow", 1, now=0)[1] for _ in range(3)] == [True] * 3
    flow = producers.by_name["flow"]
    reserved = flow.reserved
    producers.noted(99, reserved)  # of another one
    assert producers.open("flow", 1, now=0)[1]
    producers.noted(flow.number, reserved)
    assert not producers.open("flow", 1, now=0)[1]
    flow.next = reserved
    assert [producers.open("flow", 1, now=0)[1] for _ in range(2)] == [True] * 2
    producers.noted(flow.number, reserved)  # an older note is safe
    assert producers.open("flow", 1, now=0)[1]


def test_pieces_follow_one_another_and_may_come_again() -> None:
    producers = begun()
    sequence = staged(producers, count=3)
    assert not producers.staged(1, 1, sequence, 0, 3, 30, 3)
    assert producers.staged(1, 1, sequence, 3, 2, 20, 3)
    assert not producers.staged(1, 1, sequence, 3, 2, 20, 5)
    for at in (4, 6):
        with pytest.raises(GapError, match="cannot follow 5"):
            producers.staged(1, 1, sequence, at, 2, 20, 5)
    assert producers.staged_size == 50


def test_a_piece_that_could_not_be_written_is_taken_back() -> None:
    producers = begun()
    sequence = staged(producers, count=3)
    producers.staged(1, 1, sequence, 3, 2, 20, 3)
    producers.staged(1, 1, sequence, 5, 1, 10, 5)
    producers.not_staged(1, sequence, 3, 20)
    producers.not_staged(1, sequence, 5, 10)
    assert producers.staged(1, 1, sequence, 3, 2, 20, 3)
    assert commit(producers, {sequence: 5}) is not None


def test_a_sequence_of_another_epoch_takes_nothing() -> None:
    producers = begun()
    sequence = staged(producers)
    producers.begin("flow", 2, now=0)
    with pytest.raises(NoProducerError, match="was not given sequence"):
        producers.staged(1, 2, sequence, 3, 1, 10, 3)


def test_what_was_committed_takes_nothing_more() -> None:
    producers = begun()
    sequence = staged(producers)
    intent = commit(producers, {sequence: 3})
    with pytest.raises(SequenceOverError, match="was committed before"):
        producers.staged(1, 1, sequence, 3, 1, 10, 3)
    assert intent is not None
    producers.committed("flow", intent.number)
    with pytest.raises(SequenceOverError, match="was committed before"):
        producers.staged(1, 1, sequence, 3, 1, 10, 3)


def test_a_commit_is_done_once() -> None:
    producers = begun()
    one, two = staged(producers), staged(producers, offset=3)
    committed(producers, {one: 3})
    assert commit(producers, {one: 3}) is None
    intent = commit(producers, {one: 3, two: 3})
    assert intent is not None
    assert intent.sequences == (two,)
    producers.committed("flow", intent.number)
    assert commit(again(producers), {one: 3, two: 3}) is None


def test_one_commit_at_a_time() -> None:
    producers = begun()
    one, two = staged(producers), staged(producers, offset=3)
    commit(producers, {one: 3})
    with pytest.raises(BusyError):
        commit(producers, {two: 3})
    with pytest.raises(BusyError):
        producers.begin("flow", 2, now=0, keep=[])
    with pytest.raises(ProtocolError):
        producers.committed("flow", 7)


def test_a_commit_that_came_to_nothing_can_be_asked_for_again() -> None:
    producers = begun()
    sequence = staged(producers)
    intent = commit(producers, {sequence: 3})
    assert intent is not None
    later = again(producers)
    later.found(1, sequence, 3, 30, 0)
    later.abandoned("flow", intent.number)
    assert commit(later, {sequence: 3}) == Intent(intent.number, (sequence,), 100)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "but the commit names 0"),
        (2, "but the commit names 2"),
        (4, "but the commit names 4: the missing messages"),
    ],
)
def test_a_commit_of_another_number_of_messages_is_lost_output(count: int, text: str) -> None:
    producers = begun()
    sequence = staged(producers, count=3)
    with pytest.raises(LostOutputError, match=f"3 messages are staged .* {text}"):
        commit(producers, {sequence: count})


def test_a_commit_of_nothing_is_done() -> None:
    producers = begun()
    empty, full = producers.open("flow", 1, now=0)[0], staged(producers)
    assert commit(producers, {empty: 0}) is None
    committed(producers, {empty: 0, full: 3})
    assert producers.base_of("flow", [full]) == 0
    with pytest.raises(LostOutputError):
        commit(producers, {producers.open("flow", 1, now=0)[0]: 1})


def test_a_producer_that_begins_anew_is_given_other_sequences() -> None:
    producers = begun()
    old, gone = staged(producers), staged(producers, offset=3)
    committed(producers, {old: 3})
    for later in (producers, again(producers)):
        later.forget("flow")
        later = Producers.load({}, json.loads(json.dumps(later.stream_note())))
        later.begin("flow", 1, now=0)
        new = staged(later)
        committed(later, {new: 3})
        assert new > gone
        for sequence in (old, gone):
            with pytest.raises(LostOutputError, match="was forgotten after sequence"):
                commit(later, {sequence: 3})
            with pytest.raises(NoProducerError, match="was forgotten after sequence"):
                later.drop("flow", 1, [sequence], now=0)
        assert commit(again(later), {new: 3}) is None


def test_sequences_of_other_producers_are_below_those_of_the_next_one() -> None:
    producers = begun()
    for _ in range(3 * rules.RESERVED):
        sequence, _ = producers.open("flow", 1, now=0)
    producers.begin("other", 1, now=0)
    assert producers.open("other", 1, now=0)[0] > sequence


def test_notes_of_an_older_version_do_not_say_which_sequences_the_stream_has_given() -> None:
    producers = begun()
    sequences = [staged(producers, offset=3 * n) for n in range(2)]
    committed(producers, {sequences[0]: 3})
    note = producers.by_name["flow"].note()
    for name in ("first", "finished"):
        del note[name]
    later = Producers.load({"flow": note}, {"last": 7})
    later.found(1, sequences[1], 3, 30, 0)
    assert commit(later, {sequences[0]: 3}) is None
    assert commit(later, {sequences[1]: 3}) is not None
    made = later.begin("client", 0, now=0)
    assert (made.number, made.first) == (8, 7 * rules.UNNOTED_SEQUENCES)


def test_what_is_dropped_by_its_sequence_never_comes_back() -> None:
    producers = begun()
    done, gone, kept = (staged(producers, offset=3 * n) for n in range(3))
    committed(producers, {done: 3})
    producers.drop("flow", 1, [gone, done], now=0)
    for later in (producers, again(producers)):
        later.found(1, gone, 3, 30, 3)
        assert gone not in later.by_name["flow"].staged
        with pytest.raises(SequenceOverError, match="was dropped before"):
            later.staged(1, 1, gone, 0, 3, 30, 9)
        with pytest.raises(LostOutputError, match="was dropped"):
            commit(later, {gone: 3})
        assert commit(later, {done: 3}) is None
    with pytest.raises(NoProducerError, match="was not given"):
        producers.drop("flow", 1, [kept + rules.RESERVED * 2], now=0)
    committed(producers, {kept: 3})
    assert producers.by_name["flow"].finished == [(1, 4)]


def test_a_copy_takes_the_place_of_what_was_staged_before() -> None:
    producers = begun()
    sequence, other = staged(producers, offset=0), staged(producers, offset=3)
    producers.moved(1, sequence, 6)
    assert producers.first_staged() == (3, "flow")
    producers.moved(1, other, 9)
    assert producers.staged_from(end=12) == 6
    later = again(producers)
    for at, anew in ((0, False), (6, True), (8, False)):
        later.found(1, sequence, 2 if at == 6 else 1, 10, at, anew=anew)
    assert later.by_name["flow"].staged[sequence].count == 3
    assert later.staged_from(end=12) == 6
    later.moved(1, 99, 12)


def test_what_is_needed_of_the_staging_log() -> None:
    producers = begun()
    one, two = staged(producers, offset=10), staged(producers, offset=13)
    assert producers.staged_from(end=16) == 10
    committed(producers, {one: 3})
    assert producers.staged_from(end=16) == 13
    committed(producers, {two: 3})
    assert producers.staged_from(end=16) == 16


def test_committed_sequences_are_kept_as_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    producers = begun()
    sequences = [staged(producers, offset=3 * n) for n in range(6)]
    for sequence in (*sequences[3:], sequences[0], sequences[1]):
        committed(producers, {sequence: 3})
    flow = producers.by_name["flow"]
    assert flow.committed == [(1, 3), (4, 7)]
    monkeypatch.setattr(rules, "MAX_RANGES", 1)
    committed(producers, {sequences[2]: 3})
    assert flow.committed == [(1, 7)]


def test_what_was_forgotten_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_RANGES", 1)
    producers = begun()
    first, _, third = (staged(producers, offset=3 * n) for n in range(3))
    committed(producers, {first: 3})
    committed(producers, {third: 3})
    with pytest.raises(LostOutputError):
        commit(producers, {first: 3})


def test_only_producers_with_a_lifetime_expire() -> None:
    producers = begun()
    producers.begin("client", 0, now=0, lifetime=100)
    assert producers.expired(now=100) == []
    assert producers.expired(now=10_000) == ["client"]
    gone = producers.forget("client")
    assert gone is not None
    assert producers.begin("other", 0, now=0).number > gone.number


# ---------------------------------------------------------------- labels and sessions


def labelled(producers: Producers, counts: dict[int, int], labels: range) -> bool:
    """Commit under labels; False: that was done before."""
    intent = producers.commit("flow", 1, counts, end=100, now=0, labels=labels)
    if intent is not None:
        producers.committed("flow", intent.number)
    return intent is not None


def test_a_label_that_was_committed_is_done_whatever_is_staged_for_it() -> None:
    producers = begun()
    assert labelled(producers, {staged(producers): 3}, range(8))
    for later in (producers, again(producers)):
        for label in (0, 3, 7):
            repeated = staged(later)
            assert not labelled(later, {repeated: 3}, range(label, label + 1))
            assert repeated not in later.by_name["flow"].staged
        assert labelled(later, {staged(later): 3}, range(8, 9))
        assert later.by_name["flow"].labels == [(0, 9)]


def test_an_older_epoch_is_told_that_its_label_is_done_and_else_fenced() -> None:
    producers = begun(epoch=1)
    old = staged(producers)
    producers.begin("flow", 2, now=0, keep=[])
    new = staged(producers, epoch=2)
    with pytest.raises(FencedError):
        producers.commit("flow", 1, {old: 3}, end=100, now=0, labels=range(1))
    intent = producers.commit("flow", 2, {new: 3}, end=100, now=0, labels=range(1))
    assert intent is not None
    producers.committed("flow", intent.number)
    assert producers.commit("flow", 1, {old: 3}, end=100, now=0, labels=range(1)) is None


def test_a_label_counts_when_its_commit_is_done_and_not_before() -> None:
    producers = begun()
    sequence = staged(producers)
    intent = producers.commit("flow", 1, {sequence: 3}, end=100, now=0, labels=range(1))
    assert intent is not None
    done, undone = again(producers), again(producers)
    for later in (done, undone):
        later.found(1, sequence, 3, 30, 0)
    done.committed("flow", intent.number)
    undone.abandoned("flow", intent.number)
    assert not labelled(done, {staged(done): 3}, range(1))
    assert labelled(undone, {sequence: 3}, range(1))


def test_what_else_was_staged_for_a_label_is_dropped_with_its_commit() -> None:
    producers = begun()
    opened = [producers.open("flow", 1, now=0, label=label)[0] for label in (0, 0, 0, 1)]
    for n, sequence in enumerate(opened[:2] + opened[3:]):
        producers.staged(1, 1, sequence, 0, 3, 30, 3 * n)
    assert labelled(producers, {opened[0]: 3}, range(1))
    assert [*producers.by_name["flow"].staged] == [opened[3]]
    for sequence, at in ((opened[1], 3), (opened[2], 0)):  # of tasks that lost, and go on
        with pytest.raises(SequenceOverError, match="label 0 was committed before"):
            producers.staged(1, 1, sequence, at, 3, 30, 9)
    with pytest.raises(SequenceOverError, match="label 0 was committed before"):
        producers.open("flow", 1, now=0, label=0)


def test_a_late_piece_is_refused_also_when_later_labels_are_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producers = begun()
    loser, _ = producers.open("flow", 1, now=0, label=0)
    for label in range(3):
        assert labelled(producers, {staged(producers): 3}, range(label, label + 1))
        with pytest.raises(SequenceOverError, match="label 0 was committed before"):
            producers.staged(1, 1, loser, 0, 3, 30, 9)
    monkeypatch.setattr(rules, "MAX_OPENED", 2)
    opened = [producers.open("flow", 1, now=0, label=label)[0] for label in (3, 4, 5)]
    flow = producers.by_name["flow"]
    assert [*flow.opened] == opened[-2:]
    producers.begin("flow", 2, now=0, keep=[])
    assert not flow.opened


def test_sequences_are_committed_under_one_label_only() -> None:
    producers = begun()
    sequence = staged(producers)
    committed(producers, {sequence: 3})
    with pytest.raises(SequenceOverError, match="not under label 4"):
        labelled(producers, {sequence: 3}, range(5))


def test_labels_may_be_committed_with_nothing() -> None:
    producers = begun()
    assert producers.pass_over("flow", 1, range(5), now=0)
    assert not producers.pass_over("flow", 1, range(3), now=0)
    assert not labelled(again(producers), {99: 3}, range(5))
    with pytest.raises(FencedError):
        producers.pass_over("flow", 0, range(9), now=0)


def test_labels_in_any_order_are_remembered_as_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    producers = begun()
    for label in (7, 3, 5, 4):
        assert labelled(producers, {staged(producers): 3}, range(label, label + 1))
    assert producers.by_name["flow"].labels == [(3, 6), (7, 8)]
    monkeypatch.setattr(rules, "MAX_RANGES", 2)
    assert labelled(producers, {staged(producers): 3}, range(20, 21))
    later = again(producers)
    assert not labelled(later, {staged(later): 3}, range(7, 8))
    for label in (3, 6):  # written, and not: nobody knows any more
        with pytest.raises(LabelForgottenError, match="labels from 7 on are"):
            labelled(later, {staged(later): 3}, range(label, label + 1))


def test_a_session_has_an_epoch_of_its_own_and_drops_what_was_staged_before() -> None:
    producers = Producers()
    first = producers.begin_session("flow", "a", now=0)
    assert (first.epoch, first.session) == (1, "a")
    sequence = staged(producers)
    assert producers.begin_session("flow", "a", now=0).epoch == 1
    assert sequence in first.staged
    assert producers.begin_session("flow", "b", now=0).epoch == 2
    assert not first.staged
    for later in (producers, again(producers)):
        later.found(1, sequence, 3, 30, 0)
        assert not later.by_name["flow"].staged
        with pytest.raises(FencedError, match="'a' has a successor, 'b'"):
            later.begin_session("flow", "a", now=0)
        with pytest.raises(FencedError):
            later.open("flow", 1, now=0)
        assert later.begin_session("flow", "b", now=0).epoch == 2


def test_no_session_begins_while_a_commit_is_under_way() -> None:
    producers = Producers()
    producers.begin_session("flow", "a", now=0)
    commit(producers, {staged(producers): 3})
    with pytest.raises(BusyError):
        producers.begin_session("flow", "b", now=0)
    assert producers.by_name["flow"].epoch == 1


def test_a_number_above_those_of_sessions_begins_an_epoch() -> None:
    producers = Producers()
    producers.begin_session("flow", "a", now=0)
    producers.begin("flow", 5, now=0)
    with pytest.raises(FencedError):
        producers.begin_session("flow", "a", now=0)
    assert producers.begin_session("flow", "b", now=0).epoch == 6


def test_a_producer_with_labels_is_not_forgotten_and_loses_what_it_staged_long_ago() -> None:
    producers = Producers()
    producers.begin("flow", 1, now=0, lifetime=100)
    assert producers.expired(now=1_000) == ["flow"]
    assert labelled(producers, {staged(producers): 3}, range(1))
    old, new = (producers.open("flow", 1, now=0)[0] for _ in range(2))
    producers.staged(1, 1, old, 0, 3, 30, 0, now=850)
    producers.staged(1, 1, new, 0, 3, 30, 3, now=950)
    assert producers.expired(now=1_000) == []
    producers.drop_stale(now=1_000)
    assert [*producers.by_name["flow"].staged] == [new]
    assert again(producers).by_name["flow"].labels == [(0, 1)]
