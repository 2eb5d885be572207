"""Snapshots in the life of a flow, rule by rule: those of `saving`, and those of `lifecycle` that are about them."""

from __future__ import annotations

import pytest
from tests.engine.protocol.lifecycle_play import Play, placement, word
from verification.rewriting import rewritten

from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.lifecycle.machine import (
    FAILURE_GRACE_US,
    LEAVE_TIMEOUT_US,
    Lifecycle,
    LifecycleError,
)
from railgun.engine.protocol.lifecycle.snapshot_rounds import (
    LAST_SNAPSHOT_TRIES,
    Phase,
    SnapshotRounds,
)
from railgun.engine.protocol.lifecycle.snapshots import FIRST_BACK_OFF_US, MAX_BACK_OFF_US
from railgun.engine.protocol.lifecycle.worker_processes import SECOND_US
from railgun.engine.protocol.rescale import messages as m

EVERY = 10 * SECOND_US
UNDER_WAY: tuple[Phase, ...] = ("recording", "saving", "writing")


def saver(workers: int = 2, *, committed: int | None = None, **more: int) -> Play:
    """A flow that takes snapshots, running."""
    saving = SnapshotRounds(EVERY, committed or 0, committed)
    return Play(workers, saving=saving, **more).running()


def starts(orders: list[o.Order]) -> list[o.Start]:
    found = [order.order for order in orders if isinstance(order, o.To)]
    return [order for order in found if isinstance(order, o.Start)]


def again(play: Play) -> list[o.Start]:
    """The next generation is told to start: how."""
    orders = play.after(MAX_BACK_OFF_US)
    for worker, member in list(play.life.members.items()):
        if play.life.expects(worker, member.incarnation):
            orders += play.up(worker, member.incarnation)
    play.any(orders)
    return starts(orders)


def leaves(play: Play) -> Play:
    """The last worker is about to leave: all but the last word of it has been heard."""
    size = len(play.life.placement.workers)
    return play.any(play.scale(size - 1)).complete()


def left(play: Play, gone: int = 1) -> list[o.Order]:
    orders = []
    for worker in range(gone):
        orders += play.moved(worker, m.Left(gone))
    return orders


# ---------------------------------------------------------------- how one comes about


def test_a_snapshot_comes_about_in_its_phases() -> None:
    play = saver()
    play.expect(play.after(EVERY - 1))
    play.expect(play.after(1), "record 1 full: it was time")
    play.expect(play.recorded(1), "→0 take 1/1 full", "→1 take 1/1 full")
    play.expect(play.report(0, play.saved()))
    play.expect(play.report(1, play.saved()), "write 1")
    play.expect(play.written(1), "told snapshot", "→0 settled 1/1 well", "→1 settled 1/1 well")
    assert play.life.saving.committed == 1
    assert play.life.saving.phase == "none"


def test_they_come_at_an_even_pace_however_long_one_takes() -> None:
    play = saver()
    play.any(play.after(EVERY)).any(play.after(3 * SECOND_US)).at("none")
    play.expect(play.after(EVERY - 3 * SECOND_US - 1))
    play.expect(play.after(1), "record 2 changes: it was time")


def test_after_one_that_took_long_the_flow_rests() -> None:
    play = saver()
    play.any(play.after(EVERY)).any(play.after(5 * EVERY)).at("none")
    play.expect(play.after(EVERY // 2 - 1))
    play.expect(play.after(1), "record 2 changes: it was time")


def test_one_can_be_asked_for() -> None:
    play = saver()
    play.expect(play.snapshot(), "record 1 full: asked for")


@pytest.mark.parametrize("phase", UNDER_WAY)
def test_when_one_is_asked_for_during_another_a_further_one_follows(phase: Phase) -> None:
    play = saver().at(phase)
    play.expect(play.snapshot()).expect(play.snapshot())
    if phase == "recording":
        play.any(play.recorded(1))
    if phase != "writing":
        play.save()
    orders = play.written(1)
    assert word(orders[-1]) == "record 2 changes: asked for"
    play.any(orders).any(play.recorded(2)).save()
    play.any(play.written(2))
    assert play.life.saving.phase == "none"
    assert play.life.saving.number == 2


def test_one_that_is_asked_for_while_the_flow_starts_is_taken_when_it_runs() -> None:
    play = Play(1, saving=SnapshotRounds(EVERY))
    play.any(play.life.start(0)).expect(play.snapshot())
    play.any(play.up(0, 1))
    play.expect(
        play.report(0, o.Ready(1)), "→0 begin 1", "told running", "record 1 full: asked for"
    )


def test_a_flow_without_a_store_or_at_its_end_says_so() -> None:
    play = Play().running()
    with pytest.raises(LifecycleError, match="no snapshots"):
        play.snapshot()
    play = saver()
    play.any(play.life.abort("enough", 0))
    with pytest.raises(LifecycleError, match="failed"):
        play.snapshot()


def test_without_a_store_nothing_is_saved_and_nobody_owes() -> None:
    play = Play().running()
    play.expect(play.after(100 * EVERY))
    leaves(play)
    play.expect(left(play), "→1 stop", "told rescaled")


# ---------------------------------------------------------------- rule 1: what cannot be saved


def test_a_snapshot_that_cannot_be_recorded_is_given_up_and_nobody_hears_of_it() -> None:
    play = saver().at("recording")
    play.expect(play.recorded(1, "read-only"), "give up 1: read-only", "told snapshot-failed")
    play.expect(play.after(EVERY - 1))
    play.expect(play.after(1), "record 2 full: it was time")
    assert play.shown == "running"


def test_what_a_worker_cannot_save_makes_the_snapshot_fail_when_all_have_answered() -> None:
    play = saver().at("saving")
    play.expect(play.report(0, play.saved(error="no room")))
    play.expect(
        play.report(1, play.saved()),
        *("give up 1: worker 0: no room", "told snapshot-failed"),
        *("→0 settled 1/1 not", "→1 settled 1/1 not"),
    )
    assert play.life.generation == 1
    play.expect(play.after(EVERY), "record 2 full: it was time")
    play.at("none")
    assert play.life.saving.committed == 2


def test_a_manifest_that_cannot_be_written_makes_it_fail() -> None:
    play = saver().at("writing")
    play.expect(
        play.written(1, "no room"),
        *("give up 1: no room", "told snapshot-failed"),
        *("→0 settled 1/1 not", "→1 settled 1/1 not"),
    )
    assert play.life.saving.committed is None
    play.expect(play.snapshot(), "record 2 full: asked for")


def test_the_first_trouble_is_told_and_that_of_the_one_before_is_forgotten() -> None:
    play = saver().at("saving")
    play.any(play.report(0, play.saved(error="no room")))
    play.any(play.report(1, play.saved(error="no room here either")))
    assert "worker 0: no room" in play.heard[-1].text
    play.at("none")
    assert play.life.saving.committed == 2


# ---------------------------------------------------------------- rule 2: the manifest decides


@pytest.mark.parametrize("phase", ["recording", "saving"])
def test_a_worker_lost_during_a_snapshot_ends_it_and_the_last_one_counts(phase: Phase) -> None:
    play = saver(committed=5).at(phase)
    play.expect(
        play.down(1, 2),
        "give up 6: worker 1 is lost: killed",
        "told snapshot-failed",
        "told restarting",
        "launch 1#3",
    )
    assert "goes back to snapshot 5" in play.heard[-1].text
    assert [start.snapshot for start in again(play)] == [5, 5]
    play.expect(play.recorded(6))
    play.begin_again().expect(play.snapshot(), "record 7 changes: asked for")


def test_a_worker_lost_while_a_snapshot_waits_for_a_rescale_ends_both() -> None:
    play = saver()
    play.any(play.scale(1)).at("waiting")
    assert play.life.saving.phase == "waiting"
    play.expect(
        play.down(0, 1),
        *(
            "told not-rescaled",
            "give up 1: worker 0 is lost: killed",
            "told snapshot-failed",
            "→1 stop",
            "told restarting",
            "launch 0#3",
        ),
    )
    play.begin_again().expect(play.snapshot(), "record 2 full: asked for")
    play.expect(play.recorded(2), f"→0 take {play.life.generation}/2 full")


def test_a_worker_lost_while_one_is_whole_ends_it() -> None:
    play = leaves(saver(3))
    play.any(left(play, 2)).at("whole")
    assert play.life.saving.phase == "whole"
    play.expect(
        play.down(0, 1),
        "give up 1: worker 0 is lost: killed",
        "told snapshot-failed",
        "told restarting",
        "launch 0#4",
    )


@pytest.mark.parametrize(("error", "counts"), [("", 6), ("no room", 5)])
def test_while_it_is_written_the_next_generation_waits_for_the_outcome(
    error: str, counts: int
) -> None:
    play = saver(committed=5).at("writing")
    play.expect(play.down(1, 2), "told restarting")
    play.expect(play.after(MAX_BACK_OFF_US))
    orders = play.written(6, error)
    assert [word(order) for order in orders if isinstance(order, o.To)] == []
    play.any(orders)
    begun = again(play)
    assert [start.snapshot for start in begun] == [counts, counts]
    assert play.life.saving.number == 6


def test_a_worker_lost_while_the_last_one_is_published_starts_it_again_from_there() -> None:
    play = saver()
    play.any(play.stop()).at("publishing", last=True)
    play.any(play.report(0, o.Published(1, 1)))
    play.expect(play.down(1, 2), "told restarting", "launch 1#3")
    assert [(start.snapshot, start.recover) for start in again(play)] == [(1, True), (1, False)]
    play.begin_again()
    assert play.state == "stopping"
    play.at("publishing", last=True)
    for worker in (0, 1):
        play.any(play.report(worker, o.Published(play.life.generation, 2)))
    assert play.state == "finished"


def check_an_older_publication() -> None:
    """The output of snapshot 1 becomes visible when snapshot 2, the last one, is committed already."""
    play = saver().at("none")
    play.any(play.stop()).at("publishing", last=True)
    last = play.life.saving.number
    assert last == 2
    for worker in (0, 1):
        play.any(play.report(worker, o.Published(1, last - 1)))
    assert play.state == "stopping", "what belongs to the last snapshot is not visible"
    assert play.life.saving.unpublished == {0, 1}
    for worker in (0, 1):
        play.any(play.report(worker, o.Published(1, last)))
    assert play.state == "finished"


def test_that_an_older_snapshot_is_published_says_nothing_of_the_newest() -> None:
    check_an_older_publication()


@pytest.mark.parametrize("instead", ["if True:", "if snapshot <= (self.saving.committed or 0):"])
def test_a_machine_that_counts_older_publications_is_found(
    monkeypatch: pytest.MonkeyPatch, instead: str
) -> None:
    rule = "if snapshot == self.saving.committed:"
    monkeypatch.setattr(*rewritten(Lifecycle, "reported", (rule, instead)))
    with pytest.raises(AssertionError, match="not visible"):
        check_an_older_publication()


def test_a_link_lost_during_a_snapshot_ends_it_after_a_moment() -> None:
    play = saver(1).at("saving")
    play.any(play.report(0, o.Failed(1, "a link is lost", final=False)))
    assert word(play.after(FAILURE_GRACE_US)[0]) == "give up 1: worker 0: a link is lost"


# ---------------------------------------------------------------- how a generation begins


def test_one_worker_of_a_generation_recovers_and_who_joins_loads_nothing() -> None:
    play = Play(saving=SnapshotRounds(EVERY, 7, 7))
    play.any(play.life.start(0)).any(play.up(0, 1))
    play.expect(
        play.up(1, 2),
        "→0 start 1 on 0,1 among 0,1 calling - from 7 recovering",
        "→1 start 1 on 0,1 among 0,1 calling 0 from 7",
    )
    play.ready().any(play.scale(3))
    assert word(play.up(2, 3)[1]) == "→2 start 1 on 0,1 among 0,1,2 calling 0,1"


def test_what_older_generations_prepared_is_dealt_with_though_there_is_no_snapshot() -> None:
    play = saver()
    play.any(play.down(0, 1))
    assert [(start.snapshot, start.recover) for start in again(play)] == [
        *((None, True), (None, False))
    ]


def test_generations_and_numbers_go_on_from_those_of_an_earlier_run() -> None:
    play = saver(committed=7)
    play.any(play.after(EVERY)).any(play.recorded(8, "no room"))
    play.expect(play.after(EVERY), "record 9 changes: it was time")


# ---------------------------------------------------------------- snapshots and rescales


def test_a_snapshot_waits_while_workers_join_and_until_all_have_heard_of_the_move() -> None:
    play = saver(1)
    play.any(play.scale(2)).any(play.up(1, 2))
    assert play.life.coordinator is not None
    assert play.life.coordinator.phase == "joining"
    play.expect(play.snapshot(), "record 1 full: asked for").expect(play.recorded(1))
    assert play.life.saving.phase == "waiting"
    play.any(play.report(0, o.Joined(1)))
    play.expect(play.report(1, o.Ready(1)), "→1 begin 1", "→0 rescale 1/0", "→1 rescale 1/0")
    play.expect(play.moved(0, m.Started(1)))
    play.expect(play.moved(1, m.Started(1)), "→0 take 1/1 full", "→1 take 1/1 full")
    # While keys move, it is saved, and the move ends after it.
    play.any(play.moved(0, m.Completed(1))).any(play.moved(1, m.Completed(1)))
    play.expect(play.report(0, play.saved()))
    play.expect(play.report(1, play.saved()), "told rescaled", "write 1")


def test_a_rescale_asked_for_during_a_snapshot_begins_when_all_have_saved() -> None:
    play = saver().at("saving")
    play.expect(play.scale(3), "launch 2#3")
    play.expect(play.up(2, 3))
    assert play.shown == "rescaling"
    play.any(play.report(0, play.saved()))
    orders = play.report(1, play.saved())
    assert {word(order) for order in orders} >= {"write 1", "told rescaling", "→0 join 1/0"}


def test_a_new_worker_lost_while_the_rescale_waits_for_a_snapshot_is_launched_again() -> None:
    play = saver().at("saving")
    play.any(play.scale(3)).any(play.up(2, 3))
    play.expect(play.down(2, 3), "launch 2#4")
    play.save()
    orders = play.up(2, 4)
    assert word(orders[0]) == "told rescaling"


def test_a_rescale_that_waits_for_a_snapshot_is_kept_through_a_failure() -> None:
    play = saver().at("saving")
    play.any(play.scale(3)).any(play.up(2, 3)).any(play.down(0, 1))
    assert play.life.wanted == placement(3)
    play.any(play.down(2, 3, "its process ended")).begin_again()
    assert 2 in play.life.members


def test_a_rescale_begins_while_a_snapshot_is_recorded_and_goes_first() -> None:
    play = saver().at("recording")
    play.any(play.scale(1))
    play.expect(play.recorded(1))
    play.any(play.moved(0, m.Started(1)))
    play.expect(play.moved(1, m.Started(1)), "→0 take 1/1 full", "→1 take 1/1 full")


def test_a_snapshot_can_begin_while_workers_leave() -> None:
    play = leaves(saver())
    play.any(play.snapshot())
    play.expect(play.recorded(1), "→0 take 1/1 full", "→1 take 1/1 full")
    play.expect(left(play))
    play.save(0, 1)
    assert play.life.saving.phase == "writing"


def test_snapshots_between_two_stages_of_a_rescale() -> None:
    play = saver(2, stages=2)
    play.any(play.scale(1)).any(play.snapshot()).any(play.recorded(1))
    for report in (m.Started(1), m.Completed(1)):
        for worker in (0, 1):
            play.any(play.moved(worker, report))
    play.any(play.report(0, play.saved()))
    play.expect(play.report(1, play.saved()), "→0 rescale 1/1", "→1 rescale 1/1", "write 1")


# ---------------------------------------------------------------- rule 3: who leaves


def test_who_leaves_hands_over_and_no_manifest_is_written_before() -> None:
    play = leaves(saver())
    play.expect(left(play), "→1 stop handing over", "told rescaled")
    play.any(play.snapshot())
    play.expect(play.recorded(1), "→0 take 1/1 full")
    play.expect(play.report(0, play.saved()))
    assert play.life.saving.phase == "whole"
    play.expect(play.after(SECOND_US))
    play.expect(play.report(1, o.Farewell(1)), "write 1")
    play.expect(play.down(1, 2, "its process ended"))


def test_who_has_a_part_in_a_snapshot_leaves_when_all_know_whether_it_counts() -> None:
    play = leaves(saver()).at("saving")
    play.any(left(play)).save(0)
    play.expect(play.report(1, play.saved()), "write 1")
    play.expect(
        play.written(1),
        *("told snapshot", "→0 settled 1/1 well", "→1 settled 1/1 well"),
        *("→1 stop handing over", "told rescaled"),
    )


@pytest.mark.parametrize("error", ["no room", ""])
def test_who_has_a_part_in_one_that_fails_leaves_then(error: str) -> None:
    play = leaves(saver()).at("saving")
    play.any(left(play)).save(0)
    orders = play.report(1, play.saved(error=error))
    orders = orders if error else play.written(1, "no room")
    assert [word(order) for order in orders][2:] == [
        *("→0 settled 1/1 not", "→1 settled 1/1 not", "→1 stop handing over", "told rescaled")
    ]


def test_who_joins_is_not_kept_waiting() -> None:
    play = saver(1)
    play.any(play.scale(2)).any(play.up(1, 2)).any(play.report(0, o.Joined(1)))
    play.any(play.report(1, o.Ready(1))).complete()
    play.at("writing")
    assert play.life.placement == placement(2)


def test_a_farewell_that_is_lost_starts_the_flow_again() -> None:
    play = leaves(saver())
    play.any(left(play))
    orders = play.down(1, 2)
    assert word(orders[0]) == "told restarting"
    assert "what was to be saved of it is lost" in play.any(orders).heard[-1].text
    assert [start.members for start in starts(orders)] == [(0,)]


def test_a_farewell_that_cannot_be_saved_starts_it_again() -> None:
    play = leaves(saver())
    play.any(left(play)).at("whole")
    orders = play.report(1, o.Farewell(1, error="no room"))
    assert word(orders[0]).startswith("give up 1: worker 1 leaves, and cannot save")
    assert len(starts(orders)) == 1
    play.expect(play.down(1, 2, "its process ended"))


def test_who_does_not_hand_over_in_time_is_lost() -> None:
    play = leaves(saver())
    play.any(left(play))
    play.expect(play.after(LEAVE_TIMEOUT_US), "record 1 full: it was time", "cancel 1#2")
    assert word(play.down(1, 2)[0]).startswith("give up 1: worker 1 left")


def test_nobody_owes_who_is_let_go_at_the_end_or_with_a_generation() -> None:
    play = saver(3)
    play.any(play.scale(2))
    assert word(play.down(0, 1)[1]) == "→2 stop"
    play = saver(1)
    play.expect(play.life.abort("enough", 0), "told failed", "→0 stop")
    play.expect(play.down(0, 1))


def test_a_farewell_of_one_who_does_not_leave_settles_nothing() -> None:
    play = saver()
    play.expect(play.report(1, o.Farewell(1, error="no room")))
    leaves(play)
    play.expect(left(play), "→1 stop handing over", "told rescaled")


# ---------------------------------------------------------------- rule 4: full, or what changed


def test_one_with_nothing_to_build_upon_is_full_and_then_it_is_what_changed() -> None:
    play = saver(1)
    play.expect(play.snapshot(), "record 1 full: asked for").any(play.recorded(1))
    play.any(play.report(0, play.saved(rows=100, keys=100))).any(play.written(1))
    for number, rows in ((2, 60), (3, 40)):
        play.expect(play.snapshot(), f"record {number} changes: asked for")
        play.expect(play.recorded(number), f"→0 take 1/{number} changes")
        play.any(play.report(0, play.saved(rows=rows, keys=100))).any(play.written(number))
    # As many rows as there are keys; one more is too much.
    play.expect(play.snapshot(), "record 4 changes: asked for").any(play.recorded(4))
    play.any(play.report(0, play.saved(rows=1, keys=100))).any(play.written(4))
    play.expect(play.snapshot(), "record 5 full: asked for").any(play.recorded(5))
    play.any(play.report(0, play.saved(rows=100, keys=100))).any(play.written(5))
    play.expect(play.snapshot(), "record 6 changes: asked for")


def test_rows_of_one_that_failed_do_not_count() -> None:
    play = saver(1, committed=1)
    play.life.saving.keys = 10
    play.any(play.snapshot()).any(play.recorded(2))
    play.any(play.report(0, play.saved(rows=50, keys=10))).any(play.written(2, "no room"))
    play.expect(play.snapshot(), "record 3 changes: asked for").any(play.recorded(3))
    play.any(play.report(0, play.saved(rows=10, keys=10))).any(play.written(3))
    assert (play.life.saving.rows, play.life.saving.keys) == (10, 10)


def test_nothing_builds_upon_one_of_another_store() -> None:
    play = Play(1, saving=SnapshotRounds(EVERY, 3, 40, foreign=True)).running()
    play.expect(play.snapshot(), "record 4 full: asked for").any(play.recorded(4, "no room"))
    play.expect(play.snapshot(), "record 5 full: asked for")
    play.at("none").expect(play.snapshot(), "record 6 changes: asked for")


# ---------------------------------------------------------------- rule 5: the last one, and the end


def test_a_stop_is_a_last_snapshot_and_over_when_all_is_visible() -> None:
    play = saver()
    play.expect(play.stop(), "told stopping", "record 1 full: the last one")
    play.any(play.recorded(1)).save(0)
    play.expect(play.report(1, play.saved()), "write 1")
    play.any(play.written(1))
    play.expect(play.report(1, o.Published(1, 1)))
    play.expect(play.report(0, o.Published(1, 1)), "told finished", "→0 stop", "→1 stop")
    assert play.life.saving.phase == "none"


def test_a_stop_that_drains_ends_sources_and_saves_the_end() -> None:
    play = saver()
    play.expect(play.stop(drain=True), "told stopping", "→0 stopsources 1", "→1 stopsources 1")
    play.expect(play.after(EVERY))
    play.expect(play.report(0, o.Ended(1)))
    play.expect(play.report(1, o.Ended(1)), "record 1 full: the last one")
    play.any(play.recorded(1)).save(0)
    play.expect(play.report(1, play.saved()), "write 1 finished")


def test_the_end_of_all_sources_is_saved_and_over_when_all_is_visible() -> None:
    play = saver(1)
    play.expect(play.report(0, o.Ended(1)), "record 1 full: the last one").any(play.recorded(1))
    play.expect(play.report(0, play.saved()), "write 1 finished")
    play.expect(play.written(1), "told snapshot", "→0 settled 1/1 well")
    assert play.state == "running"
    play.expect(play.report(0, o.Published(1, 1)), "told finished", "→0 stop")


def test_a_flow_that_has_ended_takes_its_last_one_however_often_others_are_due() -> None:
    play = Play(1, saving=SnapshotRounds(0)).running()
    for number in (1, 2):
        play.any(play.recorded(number)).save().any(play.written(number))
    assert play.life.saving.number == 3
    play.any(play.report(0, o.Ended(1))).any(play.recorded(3)).save()
    orders = play.written(3)
    assert word(orders[-1]) == "record 4 changes: the last one"


@pytest.mark.parametrize("phase", UNDER_WAY)
def test_a_stop_during_a_snapshot_takes_another_after_it(phase: Phase) -> None:
    play = saver(1).at(phase)
    play.expect(play.stop(), "told stopping")
    if phase == "recording":
        play.any(play.recorded(1))
    if phase != "writing":
        play.save()
    assert word(play.written(1)[-1]) == "record 2 changes: the last one"


def test_a_stop_during_a_rescale_waits_for_it() -> None:
    play = leaves(saver())
    play.expect(play.stop(), "told stopping")
    play.expect(left(play), "→1 stop handing over", "told rescaled", "record 1 full: the last one")
    play.any(play.recorded(1)).save()
    play.expect(play.report(1, o.Farewell(1)), "write 1")


def test_a_stop_before_the_flow_began_is_its_end() -> None:
    play = Play(1, saving=SnapshotRounds(EVERY, 7, 7))
    play.any(play.life.start(0))
    play.expect(play.stop(), "told stopping", "told finished", "cancel 0#1")
    assert "from snapshot 7" in play.heard[-1].text


def test_a_stop_while_it_starts_again_is_its_end_if_all_is_visible() -> None:
    play = saver(1).at("none")
    play.any(play.report(0, o.Published(1, 1))).any(play.down(0, 1))
    play.any(play.stop())
    assert play.state == "finished"


def test_a_stop_during_the_time_before_a_restart_is_its_end() -> None:
    play = saver(1)
    for incarnation in (1, 2):
        play.any(play.down(0, incarnation)).come_up()
    assert not play.life.members
    play.expect(play.stop(), "told stopping", "told finished")
    assert play.life.gone


def test_a_stop_while_it_starts_again_waits_until_what_was_committed_is_visible() -> None:
    play = saver(1).at("none")
    play.any(play.down(0, 1)).expect(play.stop(), "told stopping")
    assert play.state == "stopping"
    with pytest.raises(LifecycleError, match="stopping"):
        play.scale(2)
    play.begin_again().at("none", last=True)
    play.any(play.report(0, o.Published(play.life.generation, 2)))
    assert play.state == "finished"


@pytest.mark.parametrize("error", ["", "no room"])
def test_a_stop_while_it_waits_for_the_store_waits_too(error: str) -> None:
    play = saver(1).at("writing")
    play.any(play.down(0, 1)).expect(play.stop(), "told stopping")
    play.any(play.written(1, error)).begin_again().at("none", last=True)
    play.any(play.report(0, o.Published(play.life.generation, 2)))
    assert play.state == "finished"


def test_a_drain_asked_for_while_it_starts_again_is_kept() -> None:
    play = saver(1)
    play.any(play.down(0, 1)).any(play.stop(drain=True))
    play.any(play.up(0, 2))
    ready = play.report(0, o.Ready(play.life.generation))
    assert word(ready[-1]).startswith("→0 stopsources")


def test_a_worker_lost_while_the_flow_stops_starts_it_again_to_stop() -> None:
    play = saver(1)
    play.any(play.stop()).at("saving", last=True)
    play.any(play.down(0, 1)).begin_again()
    assert play.state == "stopping"
    assert play.life.saving.last
    with pytest.raises(LifecycleError, match="stopping"):
        play.scale(2)


def test_a_flow_that_stops_and_starts_again_meanwhile_cannot_be_rescaled() -> None:
    play = saver(1)
    play.any(play.stop(drain=True)).any(play.down(0, 1))
    assert play.state == "starting"
    with pytest.raises(LifecycleError, match="stopping"):
        play.scale(2)


def test_a_last_one_that_fails_is_tried_again_a_little_later() -> None:
    play = saver(1)
    play.any(play.stop()).any(play.recorded(1, "no room"))
    play.expect(play.after(FIRST_BACK_OFF_US - 1))
    play.expect(play.after(1), "record 2 full: the last one")
    play.at("none", last=True).any(play.report(0, o.Published(1, 2)))
    assert play.state == "finished"


def test_a_last_one_that_fails_too_often_fails_the_flow() -> None:
    play = saver(1)
    play.any(play.report(0, o.Ended(1)))
    for number in range(1, LAST_SNAPSHOT_TRIES + 1):
        assert not play.life.over
        play.at("writing", last=True).any(play.written(number, "no room")).any(
            play.after(FIRST_BACK_OFF_US)
        )
    assert play.state == "failed"
    assert play.life.cause == "the last snapshot cannot be saved: no room"


def test_a_stop_during_the_last_one_of_a_natural_end_changes_nothing() -> None:
    play = saver(1)
    play.any(play.report(0, o.Ended(1))).expect(play.stop(), "told stopping")
    play.at("none", last=True).any(play.report(0, o.Published(1, 1)))
    assert play.state == "finished"


# ---------------------------------------------------------------- what comes too late, or twice


def test_who_has_saved_twice_has_saved_once() -> None:
    play = saver(3).at("saving")
    play.any(play.report(0, play.saved(rows=5))).expect(play.report(0, play.saved(rows=5)))
    play.save(1, 2)
    assert play.life.saving.saved_rows == 5
    play.expect(play.report(0, play.saved(rows=5, error="no room")))
    assert play.life.saving.phase == "writing"


def test_what_is_of_another_snapshot_or_generation_is_dropped() -> None:
    play = saver(1).at("none").at("saving")
    for stale in (play.saved(1), play.saved(3), o.Saved(0, 2), o.Published(1, 2), o.Farewell(0)):
        play.expect(play.report(0, stale))
    play.expect(play.recorded(1)).expect(play.recorded(2, "late")).expect(play.written(1, "late"))
    play.expect(play.written(2))
    assert play.life.saving.phase == "saving"
    assert play.life.saving.committed == 1


def test_what_one_saved_that_left_is_dropped() -> None:
    play = leaves(saver())
    play.any(left(play)).at("saving")
    play.expect(play.report(1, play.saved(rows=3)))
    assert play.life.saving.saved_rows == 0


@pytest.mark.parametrize("phase", ["none", "recording", "waiting", "saving", "whole", "writing"])
def test_an_abort_ends_it_at_once_in_any_phase(phase: Phase) -> None:
    play = saver(3)
    if phase == "waiting":
        play.any(play.scale(1))
    if phase == "whole":
        leaves(play).any(left(play, 2))
    if phase != "none":
        play.at(phase)
    assert play.life.saving.phase == phase
    orders = play.life.abort("enough", play.now)
    given_up = [word(order) for order in orders if isinstance(order, o.GiveUp)]
    assert given_up == ["give up 1: enough"] * (phase not in ("none", "writing"))
    for worker, member in list(play.life.members.items()):
        play.expect(play.down(worker, member.incarnation))
    assert play.life.gone
    # What the store says later is of no consequence to anybody.
    play.expect(play.recorded(1))
    play.expect(play.written(1), *["told snapshot"] * (phase == "writing"))
    assert play.life.saving.committed == (1 if phase == "writing" else None)
    assert play.state == "failed"
    play.expect(play.after(100 * EVERY))


def test_a_manifest_that_fails_after_the_end_does_not_change_the_cause() -> None:
    play = saver(1)
    play.any(play.stop())
    for number in range(1, LAST_SNAPSHOT_TRIES):
        play.any(play.recorded(number, "no room")).any(play.after(FIRST_BACK_OFF_US))
    play.at("writing", last=True).any(play.life.abort("enough", play.now))
    play.expect(
        play.written(LAST_SNAPSHOT_TRIES, "no room"),
        f"give up {LAST_SNAPSHOT_TRIES}: no room",
        "told snapshot-failed",
    )
    assert play.life.cause == "enough"


def test_an_abort_while_the_last_one_is_published() -> None:
    play = saver(1)
    play.any(play.stop()).at("publishing", last=True)
    play.expect(play.life.abort("enough", 0), "told failed", "→0 stop")
    play.expect(play.report(0, o.Published(1, 1)))
    assert play.state == "failed"


# ---------------------------------------------------------------- a little later each time


def test_each_restart_comes_later_than_the_one_before_up_to_a_limit() -> None:
    play = saver(1, restarts=10)
    waits = []
    for incarnation in range(1, 10):
        orders = play.down(0, incarnation)
        began = play.now
        while not any(isinstance(order, o.Launch) for order in orders):
            orders = play.after(FIRST_BACK_OFF_US)
        waits.append((play.now - began) // FIRST_BACK_OFF_US)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 32, 32]
    assert MAX_BACK_OFF_US == 32 * FIRST_BACK_OFF_US


def test_after_a_long_time_a_restart_comes_at_once_again() -> None:
    play = saver(1)
    for incarnation in (1, 2, 3):
        play.any(play.down(0, incarnation)).begin_again()
    play.any(play.after(301 * SECOND_US))
    play.expect(
        play.down(0, 4),
        *(
            "give up 1: worker 0 is lost: killed",
            "told snapshot-failed",
            "told restarting",
            "launch 0#5",
        ),
    )
    assert len(play.life.failures) == 1
