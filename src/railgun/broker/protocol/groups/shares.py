"""Distribution of messages over the members of a group, by free credit.

The member with the most free credit is the least busy. It gets messages until it has as much free credit left as the
next member, then both get messages, and so on: the free credit of those members that get any is levelled. So no member
is rebalanced when another comes or goes, and slow members get fewer messages without further rules.
"""

from __future__ import annotations

from collections.abc import Sequence


def shares(free: Sequence[int], messages: int) -> list[int]:
    """Return how many of `messages` each member gets. `free`: their free credit, in descending order.

    >>> shares([10, 10, 4], 10), shares([10, 10, 4], 15), shares([3, 1], 100), shares([5, 5], 1)
    ([5, 5, 0], [7, 7, 1], [3, 1], [1, 0])
    """
    rest = min(messages, sum(free))
    if not rest:
        return [0] * len(free)
    top = 0  # how many members have more free credit than the level
    above = 0  # the sum of their free credit
    level = 0  # the free credit that each of them keeps
    for top, credit in enumerate(free, 1):
        above += credit
        below = free[top] if top < len(free) else 0
        if above - top * below >= rest:
            level = -(-(above - rest) // top)  # rounded up
            break
    counts = [max(0, credit - level) for credit in free[:top]]
    counts += [0] * (len(free) - top)
    for at in range(rest - sum(counts)):  # fewer than `top`: left over by rounding
        counts[at] += 1
    return counts
