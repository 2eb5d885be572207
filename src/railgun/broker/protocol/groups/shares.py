"""How messages are spread over members: by free credit.

Whoever has the most free credit is the least busy, and gets messages until it has as much left as the next one, and so
on: the free credit of those that get any is levelled. So nobody is rebalanced when a member comes or goes, and members
that are slow get less by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence


def shares(free: Sequence[int], messages: int) -> list[int]:
    """How many of `messages` each gets that has so much free credit; `free` must fall.

    >>> shares([10, 10, 4], 10), shares([10, 10, 4], 15), shares([3, 1], 100), shares([5, 5], 1)
    ([5, 5, 0], [7, 7, 1], [3, 1], [1, 0])
    """
    rest = min(messages, sum(free))
    if not rest:
        return [0] * len(free)
    top = 0  # how many are above the level
    above = 0  # their free credit
    level = 0
    for top, credit in enumerate(free, 1):
        above += credit
        below = free[top] if top < len(free) else 0
        if above - top * below >= rest:
            level = -(-(above - rest) // top)  # what each keeps, rounded up
            break
    given = [max(0, credit - level) for credit in free[:top]]
    given += [0] * (len(free) - top)
    for at in range(rest - sum(given)):  # fewer than `top`: what rounding left
        given[at] += 1
    return given
