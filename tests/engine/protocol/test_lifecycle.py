"""The life of a flow, rule by rule; `test_saving` has what is about snapshots, `test_fates` any fate."""

from __future__ import annotations

import pytest
from tests.engine.protocol.lifecycle_play import Play, placement, word

from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.lifecycle.machine import (
    FAILURE_GRACE_US,
    HURRIED_LEAVE_TIMEOUT_US,
    LEAVE_TIMEOUT_US,
    LifecycleError,
    StaleWorkerError,
)
from railgun.engine.protocol.lifecycle.snapshot_rounds import SnapshotRounds
from railgun.engine.protocol.lifecycle.snapshots import FIRST_BACK_OFF_US
from railgun.engine.protocol.lifecycle.worker_processes import SECOND_US
from railgun.engine.protocol.rescale import messages as m

# ---------------------------------------------------------------- rule 8: before the start


def test_before_the_start_nothing_is_launched_and_the_size_can_be_changed() -> None:
    play = Play()
    play.expect(play.scale(3))
    play.expect(play.life.tick(0))
    assert play.shown == "starting"
    play.expect(play.life.start(0), "launch 0#1", "launch 1#2", "launch 2#3")
    assert play.life.wanted is None


def test_a_flow_that_is_stopped_or_aborted_before_the_start_launches_nobody() -> None:
    play = Play()
    play.expect(play.life.stop(0), "told stopping", "told finished")
    assert play.life.gone
    play.expect(play.life.start(0))
    play = Play()
    play.expect(play.life.abort("no", 0), "told failed")
    play.expect(play.life.start(0))
    assert play.life.gone


# ---------------------------------------------------------------- rule 1: generations


def test_all_workers_start_together_in_a_generation() -> None:
    play = Play()
    play.expect(play.life.start(0), "launch 0#1", "launch 1#2")
    play.expect(play.up(1, 2))
    play.expect(
        play.up(0, 1),
        "→0 start 1 on 0,1 among 0,1 calling -",
        "→1 start 1 on 0,1 among 0,1 calling 0",
    )
    play.expect(play.report(0, o.Ready(1)))
    play.expect(play.report(1, o.Ready(1)), "→0 begin 1", "→1 begin 1", "told running")
    assert play.shown == "running"


def test_a_lost_worker_ends_the_generation_and_the_next_one_starts() -> None:
    play = Play().running()
    play.expect(play.down(1, 2), "told restarting", "launch 1#3")
    assert play.shown == "starting"
    assert "worker 1 is lost: killed" in play.heard[-1].text
    assert "from its sources" in play.heard[-1].text
    play.expect(
        play.up(1, 3),
        "→0 start 3 on 0,1 among 0,1 calling -",
        "→1 start 3 on 0,1 among 0,1 calling 0",
    )
    play.ready()


def test_what_is_of_an_older_generation_is_dropped() -> None:
    play = Play().running()
    play.any(play.down(1, 2)).any(play.up(1, 3))
    for stale in (o.Ready(1), o.Ended(1), o.Joined(1), o.Failed(1, "no", final=True)):
        play.expect(play.report(0, stale))
    assert play.life.state == "starting"
    play.ready()


def test_a_worker_lost_while_the_flow_starts_is_launched_again() -> None:
    play = Play()
    play.any(play.life.start(0)).any(play.up(0, 1))
    play.expect(play.down(1, 2, "no room"), "told restarting", "launch 1#3")
    assert "trying again" in play.heard[-1].text


# ---------------------------------------------------------------- rule 2: incarnations


def test_a_process_that_is_not_the_latest_of_its_worker_is_turned_away() -> None:
    play = Play()
    play.any(play.life.start(0))
    play.any(play.down(0, 1))
    with pytest.raises(StaleWorkerError):
        play.up(0, 1)
    play.any(play.up(0, 3))


def test_a_second_attempt_of_the_same_incarnation_is_turned_away() -> None:
    play = Play()
    play.any(play.life.start(0)).any(play.up(0, 1))
    with pytest.raises(StaleWorkerError):
        play.up(0, 1)


def test_a_worker_nobody_launched_is_turned_away() -> None:
    play = Play().running()
    with pytest.raises(StaleWorkerError):
        play.up(7, 1)
    play.expect(play.down(7, 1))
    play.expect(play.report(7, o.Ready(1)))


def test_the_end_of_an_older_incarnation_is_no_loss() -> None:
    play = Play().running()
    play.any(play.down(1, 2)).any(play.up(1, 3)).ready()
    play.expect(play.down(1, 2, "its process ended"))
    assert play.life.state == "running"


def test_a_worker_that_leaves_is_not_accepted_any_more() -> None:
    play = Play()
    play.any(play.life.start(0))
    play.any(play.life.abort("enough", 0))
    with pytest.raises(StaleWorkerError):
        play.up(0, 1)


# ---------------------------------------------------------------- rule 3: launch first


def test_a_rescale_begins_when_its_new_workers_are_there() -> None:
    play = Play().running()
    play.expect(play.scale(4), "launch 2#3", "launch 3#4")
    assert play.shown == "rescaling"
    play.expect(play.up(3, 4))
    play.expect(
        play.up(2, 3),
        "told rescaling",
        "→2 start 1 on 0,1 among 0,1,2,3 calling 0,1",
        "→3 start 1 on 0,1 among 0,1,2,3 calling 0,1,2",
        "→0 join 1/0",
        "→1 join 1/0",
    )
    for worker in (0, 1):
        play.expect(play.report(worker, o.Joined(1)))
    play.expect(play.report(2, o.Ready(1)))
    play.expect(
        play.report(3, o.Ready(1)),
        *("→2 begin 1", "→3 begin 1"),
        *(f"→{worker} rescale 1/0" for worker in range(4)),
    )
    play.complete()
    assert play.kinds()[-1] == "rescaled"
    assert play.life.placement == placement(4)
    assert play.shown == "running"


def test_of_requests_that_wait_the_last_one_wins() -> None:
    play = Play().running()
    play.any(play.scale(4))
    play.expect(play.scale(3), "cancel 3#4")
    play.expect(play.down(3, 4, "cancelled"))
    play.any(play.up(2, 3))
    coordinator = play.life.coordinator
    assert coordinator is not None
    assert coordinator.target == placement(3)
    play.expect(play.scale(1))
    play.expect(play.scale(2))
    assert play.life.wanted == placement(2)


def test_a_worker_that_is_leaving_is_waited_for_before_it_is_launched_again() -> None:
    play = Play().running()
    play.any(play.scale(1)).complete()
    play.expect(play.report(0, o.Report(1, 0, m.Left(1))), "→1 stop", "told rescaled")
    play.expect(play.scale(2))
    play.expect(play.down(1, 2, "its process ended"), "launch 1#3")


def test_the_size_it_has_already_is_no_work() -> None:
    play = Play().running()
    play.expect(play.scale(2), "told rescaling", "told rescaled")
    assert play.shown == "running"
    assert play.life.coordinator is not None
    assert play.life.coordinator.target is None


# ---------------------------------------------------------------- rule 4: rescales and the end


def test_a_flow_ends_when_all_workers_have_ended() -> None:
    play = Play().running()
    play.expect(play.report(0, o.Ended(1)))
    play.expect(play.report(1, o.Ended(1)), "told finished", "→0 stop", "→1 stop")
    assert play.life.over
    assert not play.life.gone
    play.expect(play.down(0, 1, "its process ended"))
    play.expect(play.down(1, 2, "its process ended"))
    assert play.life.gone


def test_a_flow_does_not_end_during_a_rescale() -> None:
    play = Play().running()
    play.any(play.scale(1))
    for worker in (0, 1):
        play.expect(play.report(worker, o.Ended(1)))
    play.complete()
    play.expect(
        play.report(0, o.Report(1, 0, m.Left(1))),
        *("→1 stop", "told rescaled", "told finished", "→0 stop"),
    )


def test_a_stop_waits_for_the_rescale_under_way_and_drops_the_one_that_waits() -> None:
    play = Play().running()
    play.any(play.scale(1)).any(play.scale(5))
    play.expect(play.stop(), "told stopping")
    assert play.life.wanted is None
    play.complete()
    play.expect(
        play.report(0, o.Report(1, 0, m.Left(1))), "→1 stop", "told rescaled", "→0 stopsources 1"
    )
    play.expect(play.report(0, o.Ended(1)), "told finished", "→0 stop")


def test_a_flow_that_stops_or_has_ended_cannot_be_rescaled() -> None:
    play = Play().running()
    play.any(play.stop())
    with pytest.raises(LifecycleError, match="stopping"):
        play.scale(3)
    play.any(play.life.abort("enough", 0))
    with pytest.raises(LifecycleError, match=r"the flow is failed \(.+\): it cannot be rescaled"):
        play.scale(3)


# ---------------------------------------------------------------- rule 5: failures


def test_a_failure_that_would_come_again_stops_the_flow() -> None:
    play = Play().running()
    play.expect(
        play.report(1, o.Failed(1, "no such city", final=True, step="map")),
        *("told failed", "→0 stop", "→1 stop"),
    )
    assert play.life.cause == "worker 1: no such city"
    assert play.life.failed_step == "map"


def test_other_failures_restart_it_after_a_moment_in_which_the_cause_may_show() -> None:
    play = Play().running()
    play.expect(play.report(0, o.Failed(1, "the link to worker 1 is lost", final=False)))
    play.expect(play.after(FAILURE_GRACE_US - 1))
    play.expect(
        play.after(1),
        "told restarting",
        "→0 start 3 on 0,1 among 0,1 calling -",
        "→1 start 3 on 0,1 among 0,1 calling 0",
    )


def test_the_cause_that_shows_is_told_and_counts_once() -> None:
    play = Play().running()
    play.any(play.report(0, o.Failed(1, "the link to worker 1 is lost", final=False)))
    play.any(play.down(1, 2, "exit code -9"))
    assert "exit code -9" in play.heard[-1].text
    play.any(play.up(1, 3)).ready()
    play.expect(play.after(FAILURE_GRACE_US))
    assert play.life.failed_times == 1


def test_too_many_failures_within_the_window_fail_the_flow_with_the_last_cause() -> None:
    play = Play(workers=1, restarts=2)
    play.running()
    for count in (1, 2):
        play.any(play.down(0, count, f"cause {count}")).any(play.after(FIRST_BACK_OFF_US))
        play.any(play.up(0, count + 1)).ready()
    play.expect(play.down(0, 3, "cause 3"), "told failed")
    assert "cause 3" in play.life.cause
    assert "failure 3" in play.life.cause
    assert play.life.gone


def test_all_workers_that_are_lost_of_a_generation_are_one_failure_and_one_restart() -> None:
    play = Play(workers=8, restarts=1).running()
    play.expect(play.down(0, 1), "told restarting", "launch 0#9")
    for worker in range(1, 8):
        play.expect(play.down(worker, worker + 1), "told trouble", f"launch {worker}#{worker + 9}")
        assert play.heard[-1].text.startswith(f"worker {worker} is lost too: killed")
    assert play.life.failed_times == len(play.life.failures) == 1
    play.come_up().ready()
    # The next loss is a failure of its own.
    play.expect(
        play.down(3, 12), "told failed", *(f"→{worker} stop" for worker in (0, 1, 2, 4, 5, 6, 7))
    )


def test_workers_of_a_generation_that_never_began_are_one_failure_too() -> None:
    play = Play(workers=3, restarts=2)
    play.any(play.life.start(0)).any(play.up(0, 1))
    for worker in (2, 1, 0):
        play.any(play.down(worker, worker + 1, "no room"))
    assert play.life.failed_times == 1
    # Those launched in their place are another attempt.
    play.any(play.down(0, 6, "no room"))
    assert play.life.failed_times == 2


def test_a_worker_that_hangs_in_two_generations_is_lost_once() -> None:
    play = Play(workers=3).running()
    play.any(play.down(0, 1)).any(play.up(0, 4))
    play.any(play.report(0, o.Ready(3)))
    # Worker 1 has been told to start, and has never answered.
    play.expect(play.down(1, 2, "no sign of life"), "told trouble", "launch 1#5")
    play.expect(
        play.up(1, 5),
        "→0 start 5 on 0,1,2 among 0,1,2 calling -",
        "→1 start 5 on 0,1,2 among 0,1,2 calling 0",
        "→2 start 5 on 0,1,2 among 0,1,2 calling 0,1",
    )
    play.expect(play.report(0, o.Ready(3)))  # of the start before
    play.ready()
    assert play.life.failed_times == 1


def test_a_worker_that_was_ready_for_the_next_generation_is_lost_of_that_one() -> None:
    play = Play(workers=3).running()
    play.any(play.down(0, 1)).any(play.up(0, 4))
    play.any(play.report(1, o.Ready(3)))
    play.expect(play.down(1, 2), "told restarting")
    assert play.life.failed_times == 2
    play.expect(play.down(2, 3), "told trouble")
    play.expect(play.after(FIRST_BACK_OFF_US - 1))
    play.expect(play.after(1), "launch 1#5", "launch 2#6")


def test_failures_that_are_long_ago_do_not_count() -> None:
    play = Play(workers=1, restarts=1)
    play.running()
    for count in range(1, 6):
        play.any(play.down(0, count)).any(play.up(0, count + 1)).ready()
        play.any(play.after(301 * SECOND_US))
    assert play.life.failed_times == 5


def test_a_failure_while_workers_join_starts_anew_at_the_size_that_was_wanted() -> None:
    play = Play().running()
    play.any(play.scale(3)).any(play.up(2, 3))
    play.expect(play.down(2, 3), "told not-rescaled", "told restarting", "launch 2#4")
    assert "worker 2 is lost" in play.heard[-2].text
    assert "starts again, on 3 workers" in play.heard[-2].text
    play.any(play.up(2, 4)).ready()
    assert play.life.placement == placement(3)


def test_a_failure_while_workers_leave_starts_anew_without_them() -> None:
    play = Play(workers=3).running()
    play.any(play.scale(2))
    play.expect(
        play.down(0, 1),
        *("told not-rescaled", "→2 stop", "told restarting", "launch 0#4"),
    )
    play.any(play.up(0, 4)).ready()
    assert play.life.placement == placement(2)
    play.expect(play.down(2, 3, "its process ended"))


def test_a_request_that_waited_is_kept_through_a_failure() -> None:
    play = Play().running()
    play.any(play.scale(3))
    play.expect(play.down(0, 1), "cancel 2#3", "told restarting", "launch 0#4")
    play.any(play.down(2, 3, "cancelled")).any(play.up(0, 4))
    assert play.life.wanted == placement(3)
    play.ready()
    assert 2 in play.life.members


# ---------------------------------------------------------------- rule 6: lost before they join


def test_a_new_worker_that_is_lost_does_not_touch_the_flow() -> None:
    play = Play().running()
    play.any(play.scale(3))
    play.expect(play.down(2, 3, "no module numpy"), "launch 2#4")
    assert play.life.failed_times == 0
    assert play.life.generation == 1


def test_a_new_worker_that_cannot_load_the_flow_ends_the_rescale_and_not_the_flow() -> None:
    play = Play().running()
    play.expect(play.scale(4), "launch 2#3", "launch 3#4")
    play.any(play.up(3, 4))
    play.expect(
        play.life.cannot_load(2, "no module", play.now),
        "told not-rescaled",
        "cancel 2#3",
        "→3 stop",
    )
    assert play.shown == "running"


def test_a_first_worker_that_cannot_load_the_flow_fails_it() -> None:
    play = Play()
    play.any(play.life.start(0))
    play.any(play.life.cannot_load(1, "no module", play.now))
    assert play.life.state == "failed"
    assert play.life.cause == "worker 1: no module"


def test_a_rescale_whose_workers_are_lost_again_and_again_is_given_up() -> None:
    play = Play(restarts=1).running()
    play.any(play.scale(4)).any(play.up(3, 4))
    play.any(play.down(2, 3))
    play.expect(play.down(2, 5, "no room"), "told not-rescaled", "→3 stop")
    assert "no room" in play.heard[-1].text
    assert play.shown == "running"
    play.any(play.down(3, 4))
    play.expect(play.scale(3), "launch 2#6")
    # The flow itself has its full measure of failures left.
    play.any(play.down(0, 1))
    assert play.life.state == "starting"


def test_a_rescale_whose_workers_are_all_lost_at_once_is_tried_again() -> None:
    play = Play(workers=1, restarts=1).running()
    play.any(play.scale(4))
    for worker in (1, 2, 3):
        play.expect(play.down(worker, worker + 1, "no room"), f"launch {worker}#{worker + 4}")
    play.expect(play.down(2, 6, "no room"), "told not-rescaled", "cancel 1#5", "cancel 3#7")


# ---------------------------------------------------------------- rule 7: a stop


def test_a_stop_lets_the_sources_end() -> None:
    play = Play().running()
    play.expect(play.stop(), "told stopping", "→0 stopsources 1", "→1 stopsources 1")
    play.expect(play.stop())
    play.expect(play.report(0, o.Ended(1)))
    play.expect(play.report(1, o.Ended(1)), "told finished", "→0 stop", "→1 stop")


def test_a_worker_lost_while_the_flow_stops_is_a_failure() -> None:
    play = Play().running()
    play.any(play.stop())
    play.expect(play.down(1, 2), "told failed", "→0 stop")
    assert "has not written all" in play.life.cause


def test_a_flow_stopped_before_it_began_has_finished() -> None:
    play = Play()
    play.any(play.life.start(0)).any(play.up(0, 1))
    play.expect(play.stop(), "told stopping", "told finished", "→0 stop", "cancel 1#2")


def test_a_flow_stopped_while_it_starts_again_has_failed() -> None:
    play = Play().running()
    play.any(play.down(1, 2))
    play.any(play.stop())
    assert play.life.state == "failed"
    assert "not all written" in play.life.cause


# ---------------------------------------------------------------- rule 8: who is to leave


def test_who_does_not_leave_is_ended_by_force() -> None:
    play = Play(workers=1).running()
    play.any(play.report(0, o.Ended(1)))
    play.expect(play.after(LEAVE_TIMEOUT_US - 1))
    play.expect(play.after(1), "cancel 0#1")
    play.expect(play.after(LEAVE_TIMEOUT_US))


def test_after_an_abort_there_is_less_patience() -> None:
    play = Play(workers=1).running()
    play.expect(play.life.abort("enough", 0), "told failed", "→0 stop")
    play.expect(play.after(HURRIED_LEAVE_TIMEOUT_US), "cancel 0#1")


# ---------------------------------------------------------------- rule 10: who cannot let go


def test_a_flow_that_finished_fails_if_a_sink_cannot_be_closed_and_a_lost_link_is_no_wonder() -> (
    None
):
    play = Play(workers=2).running()
    play.any(play.report(0, o.Ended(1))).any(play.report(1, o.Ended(1)))
    play.expect(play.report(0, o.Failed(1, "the link to worker 1 is lost", final=False)))
    assert play.state == "finished"
    play.expect(play.report(0, o.Failed(1, "no disk", final=False, step="out")), "told failed")
    assert play.shown == "failed"
    assert play.life.cause == "everything is written, but worker 0, on its way out: no disk"
    assert play.life.failed_step == "out"
    play.expect(play.report(1, o.Failed(1, "no disk", final=True, step="out")), "told trouble")
    assert "worker 0" in play.life.cause


@pytest.mark.parametrize(("final", "told"), [(True, "told failed"), (False, "told trouble")])
def test_a_worker_that_leaves_and_cannot_close_fails_a_flow_unless_that_may_pass(
    final: bool, told: str
) -> None:
    play = Play().running()
    play.any(play.scale(1))
    play.complete()
    play.any(play.report(0, o.Report(1, 0, m.Left(1))))
    orders = play.report(1, o.Failed(1, "no disk", final=final, step="out"))
    assert told in [word(order) for order in orders]
    assert play.life.over == final


def test_whoever_is_ended_as_it_loads_the_flow_was_to_end() -> None:
    play = Play()
    play.any(play.life.start(0)).any(play.up(1, 2))
    play.expect(play.stop(), "told stopping", "told finished", "cancel 0#1", "→1 stop")
    play.expect(play.life.lost_leaving(0, "it was unpickling the flow", 0))
    play.expect(play.life.lost_leaving(1, "it was in step 'out', function open", 0), "told trouble")
    play.expect(play.report(1, o.Failed(0, "no disk", final=True, step="out")), "told trouble")
    assert play.state == "finished"


def test_who_is_to_join_and_is_ended_as_it_loads_the_flow_is_not_told_of() -> None:
    play = Play(workers=1).running()
    play.expect(play.scale(2), "launch 1#2")
    play.expect(play.report(0, o.Ended(1)), "told finished", "→0 stop", "cancel 1#2")
    play.expect(play.life.lost_leaving(1, "it was unpickling the flow", 0))
    assert play.state == "finished"
    play.expect(play.life.lost_leaving(0, "it was in step 'out', function close", 0), "told failed")


def test_who_has_not_begun_since_a_restart_has_written_nothing_since() -> None:
    play = Play(saving=SnapshotRounds(SECOND_US)).running()
    play.any(play.down(1, 2)).any(play.up(1, 3)).any(play.stop())
    assert play.state == "finished"
    play.expect(
        play.life.lost_leaving(0, "it was in step 'out', function close", 0), "told trouble"
    )
    assert play.state == "finished"


def test_a_stop_says_what_it_does() -> None:
    play = Play(saving=SnapshotRounds(SECOND_US))
    play.any(play.life.start(0)).any(play.stop())
    assert play.life.how == "it has not begun"
    assert play.heard[0].text == "stopping: it has not begun"
    play = Play(saving=SnapshotRounds(SECOND_US)).running()
    play.any(play.stop())
    assert play.life.how == "a last snapshot"
    play = Play(saving=SnapshotRounds(SECOND_US)).running()
    play.any(play.down(1, 2)).any(play.stop())
    assert play.life.how == "it has not begun again"
    play = Play().running()
    play.any(play.stop())
    assert play.life.how == "sources end, what is under way is finished"
