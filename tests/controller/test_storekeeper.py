"""What a job asks of its store, besides snapshots."""

from __future__ import annotations

from pathlib import Path

from tests.controller.tallies import tallies

from railgun.controller.storekeeper import GENERATIONS, Snapshots, Storekeeper


def test_a_job_that_starts_again_very_often_uses_no_generation_that_the_next_may_use(
    tmp_path: Path,
) -> None:
    def keeper() -> Storekeeper:
        made = Storekeeper(
            tallies(tmp_path / "out").plan(), Snapshots(str(tmp_path / "s")), "tallies"
        )
        made.submit = lambda work: work()
        return made

    first = keeper()
    last = first.generation + 1
    for _ in range(2 * GENERATIONS):
        last += 2  # as a restart does
        first.new_generation(last)
    first.close()
    second = keeper()
    assert second.generation + 1 > last
    second.close()
