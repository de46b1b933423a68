"""A world small enough to be solved exactly, with data that shows only a part of it.

A corridor of four states and, behind it, a prize of 10. In each state the action, one number, falls into one of three
regions of [-1, 1]; which outer region goes *on* and which *leaves* (with 2, for good) alternates from state to state,
so no action is right everywhere and the mean of both is the middle region, which ends with nothing and which the data
never shows. Going on slips with a small chance and stays. Episodes begin anywhere and are cut off after ``LIMIT``
ticks: none goes all the way, and whoever takes a cut for an end thinks that going on is worth nothing but at the prize.

    state      0        1        2        3
    low      leave     on      leave     on  -> prize
    middle    trap    trap     trap     trap
    high      on      leave     on      leave
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.data.episodes import Episode, Episodes

STATES, REGIONS = 4, 3
GAMMA, SLIP, EXIT, PRIZE = 0.9, 0.1, 2.0, 10.0
LIMIT = 1
ON, LEAVE, TRAP = 0, 1, 2
# What a region (low, middle, high) does in each state.
EFFECT = torch.tensor([[LEAVE, TRAP, ON], [ON, TRAP, LEAVE]]).repeat(STATES // 2, 1)

SPEC = PolicySpec(ObsSpec({"state": (STATES,)}), ActionSpec((-1.0,), (1.0,)), horizon=1, execute=1)
WORLD = EnvSpec(SPEC.obs, SPEC.action, 10.0, "test", LIMIT)


def region(action: Tensor) -> Tensor:
    """0, 1, 2 for the lower, middle and upper third of [-1, 1]."""
    return ((action + 1) * 1.5).floor().clamp(0, REGIONS - 1).long()


def recorded(seed: int = 0, episodes: int = 600, good: float = 0.5) -> Episodes:
    """A behaviour that goes on with chance ``good`` and leaves otherwise, anywhere in the region that does so."""
    draw = torch.Generator().manual_seed(seed)

    def chance() -> float:
        return float(torch.rand((), generator=draw))

    made = []
    for number in range(episodes):
        states, actions, rewards, terminated = [int(chance() * STATES)], [], [], False
        while len(actions) < LIMIT and not terminated:
            now = states[-1]
            wanted = ON if chance() < good else LEAVE
            low = -1.0 if int(EFFECT[now, 0]) == wanted else 1 / 3
            actions.append([low + 0.05 + (2 / 3 - 0.1) * chance()])
            reward = 0.0
            if wanted == LEAVE:
                reward, terminated = EXIT, True
            elif chance() >= SLIP:
                terminated = now == STATES - 1
                reward = PRIZE if terminated else 0.0
                now = min(now + 1, STATES - 1)
            states.append(now)
            rewards.append(reward)
        state = torch.nn.functional.one_hot(torch.tensor(states), STATES).float()
        made.append(
            Episode(
                {"state": state},
                torch.tensor(actions),
                torch.tensor(rewards),
                terminated,
                not terminated,
                False,
                number,
            )
        )
    return Episodes(made, WORLD)


def returns(choice: Tensor) -> Tensor:
    """(STATES,): the exact value of a policy that takes each region with the chances ``choice`` (STATES, REGIONS)."""
    share = torch.stack([(choice * (effect == EFFECT)).sum(1) for effect in (ON, LEAVE)]).double()
    on, leave = share[0], share[1]
    step = torch.diag(SLIP * on) + torch.diag((1 - SLIP) * on[:-1], 1)
    reward = EXIT * leave
    reward[-1] += (1 - SLIP) * PRIZE * on[-1]
    return torch.linalg.solve(torch.eye(STATES, dtype=torch.float64) - GAMMA * step, reward)


def best() -> Tensor:
    """(STATES,): dynamic programming over what the data shows: going on, or leaving."""
    value = torch.zeros(STATES, dtype=torch.float64)
    for _ in range(1000):
        further = torch.cat([GAMMA * value[1:], torch.tensor([PRIZE], dtype=torch.float64)])
        value = torch.maximum(SLIP * GAMMA * value + (1 - SLIP) * further, torch.tensor(EXIT, dtype=torch.float64))
    return value


def observe(count: int = 1) -> dict[str, Tensor]:
    """Every state, ``count`` times each."""
    return {"state": torch.eye(STATES).repeat_interleave(count, 0)}


@torch.no_grad()
def score(policy: Any, *, greedy: bool = False, draws: int = 256) -> float:
    """The mean return over start states, as a share of ``best``; the regions of many draws, the values exact."""
    generator = torch.Generator().manual_seed(1)
    action = policy.act(observe(draws), greedy=greedy, generator=generator)[:, 0, 0]
    taken = torch.nn.functional.one_hot(region(action), REGIONS).view(STATES, draws, REGIONS)
    return float(returns(taken.double().mean(1)).mean() / best().mean())
