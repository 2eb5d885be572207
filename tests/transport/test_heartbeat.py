"""When a connection is given up: after silence that was asked about, never because this process was busy itself."""

from __future__ import annotations

import pytest

from railgun.transport.heartbeat import KEEP_ALIVE_S, Beat, Heartbeat

SILENCE_S = 2.0
INTERVAL_S = SILENCE_S / 5


def run(heartbeat: Heartbeat, start_s: float, ticks: int, answers: bool) -> list[Beat]:
    """Tick on time; the other end answers each ping at once, or never."""
    beats = []
    for n in range(1, ticks + 1):
        now_s = start_s + n * INTERVAL_S
        beats.append(heartbeat.tick(now_s))
        if answers and beats[-1] is Beat.PING:
            heartbeat.heard_s = now_s + INTERVAL_S / 10
    return beats


def test_an_idle_connection_whose_pings_are_answered_lives() -> None:
    beats = run(Heartbeat(SILENCE_S, 0.0), 0.0, 1000, answers=True)
    assert Beat.DEAD not in beats
    assert beats.count(Beat.PING) <= 501  # one for every second tick


@pytest.mark.parametrize("before", [0, 1, 7])
def test_a_frozen_node_is_given_up_after_the_silence_or_one_interval_more(before: int) -> None:
    heartbeat = Heartbeat(SILENCE_S, 0.0)
    run(heartbeat, 0.0, before, answers=True)
    start_s = before * INTERVAL_S
    beats = run(heartbeat, start_s, 7, answers=False)
    assert beats.index(Beat.DEAD) + 1 in (5, 6)


def test_a_busy_connection_is_pinged_rarely_but_is_pinged() -> None:
    heartbeat, pinged, now_s = Heartbeat(SILENCE_S, 0.0), 0, 0.0
    while now_s < 10 * KEEP_ALIVE_S:
        now_s += INTERVAL_S
        heartbeat.heard_s = now_s - 0.01
        pinged += heartbeat.tick(now_s) is Beat.PING
    assert 7 <= pinged <= 10


def test_a_process_that_was_stopped_itself_gives_nobody_up() -> None:
    heartbeat, now_s = Heartbeat(SILENCE_S, 0.0), 0.0
    for _ in range(20):  # each tick comes 30 s late: the answers lie in the socket, unread
        now_s += 30.0
        assert heartbeat.tick(now_s) is not Beat.DEAD


def test_silence_before_a_stall_counts_again_after_it() -> None:
    heartbeat = Heartbeat(SILENCE_S, 0.0)
    assert run(heartbeat, 0.0, 4, answers=False) == [Beat.PING] * 4
    assert heartbeat.tick(60.0) is Beat.PING  # late: says nothing about the other end
    assert heartbeat.tick(60.0 + INTERVAL_S) is Beat.DEAD


def test_an_answer_in_the_last_moment_saves_the_connection() -> None:
    heartbeat = Heartbeat(SILENCE_S, 0.0)
    run(heartbeat, 0.0, 4, answers=False)
    heartbeat.heard_s = 4.5 * INTERVAL_S
    assert heartbeat.tick(5 * INTERVAL_S) is Beat.NOTHING
    assert run(heartbeat, 5 * INTERVAL_S, 4, answers=False) == [Beat.PING] * 4


def test_more_ticks_than_needed_do_no_harm() -> None:
    heartbeat = Heartbeat(SILENCE_S, 0.0)
    beats = [heartbeat.tick(n * INTERVAL_S / 10) for n in range(1, 51)]
    assert 45 <= beats.index(Beat.DEAD) + 1 <= 50
    assert beats.count(Beat.PING) == 4


def test_a_shorter_silence_counts_as_soon_as_it_is_set() -> None:
    heartbeat = Heartbeat(20.0, 0.0)
    assert heartbeat.tick(1.0) is Beat.NOTHING
    heartbeat.silence_s = SILENCE_S
    beats = run(heartbeat, 1.0, 6, answers=False)
    assert Beat.DEAD in beats
