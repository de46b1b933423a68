"""The shares of one budget, by successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943).

All entrants play a share, the better half of them another one, and so on until one is left: that is half of the budget.
The other half is the winner's, in ``LOOKS`` shares, because a policy that was better on the way is found only if it is
tried there. Shares are cut from what is left, so that an entrant that overran its share costs the later ones and not
the budget. Where shares would be shorter than what each costs besides, the caller asks for fewer.

**Departures.** Published halving gives each round the same; here the winner gets half, because curves that have only
begun say little about their ends, and what the losers have learnt is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

LOOKS = 5  # shares of the winner alone, at most


class Share(NamedTuple):
    """The next share of the budget."""

    entrant: str
    part: float  # of what is left of the budget
    coming: int  # shares that are left, this one among them
    alive: list[str]  # entrants that have not been beaten


def next_share(entrants: Sequence[str], scores: Mapping[str, Sequence[float]], winners: int = LOOKS) -> Share | None:
    """``scores`` has one number for each share that an entrant has played, the latest one last; ``entrants`` are those
    that have not failed, the preferred ones first; so many shares are the ``winners``. None: everything has been
    played."""
    if not entrants:
        return None
    rounds = survivors(len(entrants))
    left: list[float] = []  # weights of the shares to come, the next one first
    alive, coming = list(entrants), ""
    for number, count in enumerate(rounds):
        if number:
            # Python's sort is stable: of equals the preferred one stays.
            alive = sorted(alive, key=lambda name: -scores[name][number - 1])[:count]
        looks, weight = (winners, 1 / winners) if count == 1 else (1, 1 / sum(rounds[:-1]))
        due = [name for name in alive for _ in range(number + looks - max(number, len(scores.get(name, ()))))]
        coming = coming or (due[0] if due else "")
        left += [weight] * len(due)
        if due and count > 1:  # those who stay are not known yet, only how many
            left += [weight] * sum(n for n in rounds[number + 1 : -1]) + [1 / winners] * winners
            break
    return Share(coming, left[0] / sum(left), len(left), alive) if left else None


def unbeaten(count: int) -> float:
    """The part of the budget that each of so many plays before it can be beaten: one alone, all."""
    share = next_share([str(number) for number in range(count)], {})
    return share.part if share is not None and count > 1 else 1.0


def survivors(count: int) -> list[int]:
    """How many are left in each round: 5, 3, 2, 1."""
    found = [count]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found
