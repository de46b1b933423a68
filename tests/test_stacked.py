"""Several learners whose updates are one batched computation: each does what it would do alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from recording_lab import Watched
from torch import Tensor

from burnish.offline.actor_critic import ActorCritic
from burnish.offline.learner import Wrapping
from burnish.offline.replay import Replay
from burnish.offline.sac import SAC, SACConfig, soft_agent
from burnish.offline.sources import Mixture
from burnish.offline.stacked import Stacked, require_stackable
from burnish.offline.td3 import TD3, TD3Config, deterministic_agent
from burnish.policies.build import build_policy
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.core.tree import leaves
from burnish.policies.nets.critic import CriticConfig

SEEDS, ROWS, WORLDS, STEPS = (3, 4, 5), 30, 2, 2
SHAPES: dict[str, tuple[int, ...]] = {"state": (5,)}
FAR = 1e-6  # learners of other draws are further apart than this; equal ones differ by rounding, 1e-16 an operation


def spec(shapes: dict[str, tuple[int, ...]]) -> PolicySpec:
    """Chunks of two actions, so that rows that a truncation cut short have no weight."""
    return PolicySpec(ObsSpec(shapes), ActionSpec((-1.0,) * 3, (1.0,) * 3), horizon=STEPS, execute=STEPS)


def sac(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES, device: str = "cpu", **settings: Any) -> SAC:
    """All that has a draw or a norm: a random pair of three members, clipped gradients, a late actor."""
    agent = soft_agent(hidden=[8], layer_norm=True)
    some: dict[str, Any] = {"subset": 2, "max_grad_norm": 0.1, "actor_every": 2, **settings}
    config = SACConfig(agent=agent, critic=CriticConfig(hidden=[8], members=3), **some)
    return SAC(build_policy(agent, spec(shapes), seed=seed), config, normalize=True, seed=seed, device=device)


def td3(seed: int) -> TD3:
    agent = deterministic_agent(hidden=[8])
    critic = CriticConfig(hidden=[8], members=3, bins=7, layer_norm=False, average=True)
    config = TD3Config(agent=agent, critic=critic, subset=2, actor_mean=True, max_grad_norm=0.1)
    return TD3(build_policy(agent, spec(SHAPES), seed=seed), config, seed=seed)


def replay(seed: int, device: str = "cpu") -> Replay:
    draw, made = torch.Generator().manual_seed(seed), Replay(ROWS * WORLDS, WORLDS, seed=seed, device=device)

    def seen() -> dict[str, Tensor]:
        return {key: torch.randn(WORLDS, *shape, generator=draw) for key, shape in SHAPES.items()}

    for _ in range(ROWS):
        ended, cut = torch.rand(2, WORLDS, generator=draw) < 0.3
        columns = {
            "action": torch.rand(WORLDS, STEPS, 3, generator=draw) * 2 - 1,
            "reward": torch.randn(WORLDS, generator=draw),
            "discount": 0.9 * (~(ended & ~cut)).to(torch.get_default_dtype()),
            "ended": ended,
            "terminated": ended & ~cut,
            "steps": torch.where(ended & cut, 1, STEPS),
        }
        made.add(seen(), columns, seen())
    return made


def source(seed: int, **settings: Any) -> Mixture:
    prior = replay(100 + seed) if settings else None
    return Mixture(replay(seed), prior, batch=16, n_step=2, **settings)


def updated(learner: ActorCritic, source: Mixture, count: int) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for _ in range(count):
        metrics = learner.update(source)
    return metrics


def numbers(state: dict[str, Any]) -> Tensor:
    """Everything in it, in one row."""

    def flat(x: Any) -> list[Tensor]:
        if isinstance(x, dict):
            return [y for key in x for y in flat(x[key])]
        if isinstance(x, list | tuple):
            return [y for each in x for y in flat(each)]
        return [torch.as_tensor(x, dtype=torch.float64).cpu().flatten()] if isinstance(x, Tensor | float | int) else []

    return torch.cat(flat(state))


def distance(a: ActorCritic, b: ActorCritic) -> float:
    return float((numbers(a.state_dict()) - numbers(b.state_dict())).abs().max())


CASES: dict[str, Any] = {
    "sac": (sac, {}),
    "td3": (td3, {}),
    "half of each batch is recorded": (sac, {"share": 0.5}),
    "recordings are part of the union": (td3, {"share": None}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_learner_is_what_it_would_be_alone(name: str, float64: None):
    """From the second update on, so that they begin with moments of Adam; 19 together are more than one read."""
    make, settings = CASES[name]
    alone, together = ([make(seed) for seed in SEEDS] for _ in range(2))
    theirs, ours = ([source(seed, **settings) for seed in SEEDS] for _ in range(2))
    for learners, sources in ((alone, theirs), (together, ours)):
        for learner, each in zip(learners, sources, strict=True):
            learner.observe(replay(7).latest()["obs"])
            updated(learner, each, 1)
    stacked = Stacked(together)
    expected = [updated(learner, each, 19) for learner, each in zip(alone, theirs, strict=True)]
    batch, metrics = stacked.learn(ours, 19)
    assert batch["reward"].shape == (3, 16)
    for place, (mine, its) in enumerate(zip(together, alone, strict=True)):
        assert distance(mine, its) < 1e-12 and metrics.keys() == expected[place].keys()
        assert all(float(x[place]) == pytest.approx(float(expected[place][key])) for key, x in metrics.items())
        assert mine.updates == 20 and torch.equal(mine.noise.get_state(), its.noise.get_state())
    assert distance(alone[0], alone[1]) > FAR


def test_a_neighbour_with_other_draws_changes_nothing_and_its_own_draws_everything(float64: None):
    alone, together = ([sac(seed) for seed in SEEDS] for _ in range(2))
    together[1].noise.manual_seed(77)
    for learner, seed in zip(alone, SEEDS, strict=True):
        updated(learner, source(seed), 4)
    Stacked(together).learn([source(seed) for seed in SEEDS], 4)
    far = [distance(mine, its) for mine, its in zip(together, alone, strict=True)]
    assert max(far[0], far[2]) < 1e-12 and far[1] > FAR


def test_a_saved_learner_goes_on_alone(float64: None):
    alone, together = sac(4), [sac(seed) for seed in SEEDS]
    updated(alone, its := source(4), 4)
    Stacked(together).learn([source(3), ours := source(4), source(5)], 4)
    fresh = sac(9)
    fresh.load_state_dict(copy.deepcopy(together[1].state_dict()))
    updated(alone, its, 2)
    updated(fresh, ours, 2)
    assert distance(fresh, alone) < 1e-12


def test_what_is_observed_reaches_the_stack(float64: None):
    alone, together = ([sac(seed) for seed in SEEDS] for _ in range(2))
    stacked = Stacked(together)
    for learner in (alone[1], together[1]):
        learner.observe({"state": 5 + 3 * replay(8).latest()["obs"]["state"]})
    for learner, seed in zip(alone, SEEDS, strict=True):
        updated(learner, source(seed), 2)
    stacked.learn([source(seed) for seed in SEEDS], 2)
    assert max(distance(mine, its) for mine, its in zip(together, alone, strict=True)) < 1e-12


def recorded(together: list[SAC], device: str = "cpu") -> Stacked:
    """After seven times three updates, of which every other begins with a step of the actor."""
    stacked = Stacked(together)
    sources = [Mixture(replay(seed, device), batch=16) for seed in SEEDS]
    for _ in range(14):
        before = stacked.joint.updates
        stacked.learn(sources, 3)
        assert stacked.joint.updates == before + 3 == together[0].updates
    return stacked


def test_several_updates_are_one_recording(monkeypatch, float64: None):
    class Replayed(Watched):
        """As a graph, it runs no Python."""

        def __call__(self, *arguments: Any) -> Any:
            joint = self.fn.__self__.joint
            before = joint.updates
            found = super().__call__(*arguments)
            if self.calls > 4:
                joint.updates = before
            return found

    monkeypatch.setattr("burnish.policies.core.execute._Graphed", Replayed)
    alone, together = ([sac(seed, execution=Execution.cudagraph) for seed in SEEDS] for _ in range(2))
    made = recorded(together)._made.values()
    assert [x.calls for x in made] == [7, 7], "the actor's turn comes once or twice in three"
    for learner, seed in zip(alone, SEEDS, strict=True):
        learner._step_critic, learner._step_actor = learner._critic_step, learner._actor_step
        updated(learner, Mixture(replay(seed), batch=16), 42)
    assert max(distance(mine, its) for mine, its in zip(together, alone, strict=True)) < 1e-12


@pytest.mark.gpu
def test_recorded_several_updates_are_those_line_by_line(monkeypatch):
    def ends() -> list[Tensor]:
        together = [sac(seed, device="cuda", execution=Execution.cudagraph) for seed in SEEDS]
        recorded(together, "cuda")
        return [numbers(each.state_dict()) for each in together]

    found = ends()
    monkeypatch.setattr("burnish.policies.core.execute._Graphed", lambda fn, generators, device: fn)
    assert all(torch.equal(x, y) for x, y in zip(found, ends(), strict=True))
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("settings", [{}, {"share": 0.25}, {"share": 0}, {"share": None}], ids=str)
def test_several_batches_are_those_that_are_drawn_in_turn(settings: dict[str, Any]):
    one, at_once = source(3, **settings), source(3, **settings)
    for each in (one, at_once):  # some are never drawn, and so drawn anew
        assert isinstance(each.online, Replay)
        each.online.cut()
        each.online.leave_out(torch.tensor([True, False]))
    in_turn, read = [one.sample() for _ in range(5)], at_once.several(5)
    for time, batch in enumerate(in_turn):
        assert batch.keys() == read.keys()
        assert all(torch.equal(x, y[time]) for x, y in zip(leaves(batch), leaves(read), strict=True))
    assert not torch.equal(in_turn[0]["reward"], in_turn[1]["reward"])
    assert torch.equal(one.online.generator.get_state(), at_once.online.generator.get_state())


def test_recorded_decisions_are_forgotten_where_weights_move(monkeypatch):
    """By whoever holds the actor: the loop has that of a learner around the one that is stacked."""
    kept: list[Any] = []

    class Recording:
        """As a graph, it keeps the memory of the weights that it was made with."""

        def __init__(self, fn: Any, *given: Any) -> None:
            self.fn = fn

        def __call__(self, *arguments: Any) -> Any:
            kept.append(self)
            return self.fn(*arguments)

    monkeypatch.setattr("burnish.policies.core.execute._Graphed", Recording)
    learners = [sac(seed, execution=Execution.cudagraph) for seed in SEEDS[:2]]
    around, draw = Wrapping(learners[0]), torch.Generator()
    obs = {key: torch.zeros(WORLDS, *shape) for key, shape in SHAPES.items()}
    for _ in range(2):
        around.actor.act(obs, warm=False, generator=draw)
    Stacked(learners)
    around.actor.act(obs, warm=False, generator=draw)
    first, again, after = kept
    assert first is again is not after


def test_compiled_seeds_and_pictures_are_refused():
    require_stackable(sac(0))
    with pytest.raises(BurnishError, match="execution=compile is not known to batched seeds; use execution=eager"):
        require_stackable(sac(0, execution=Execution.compile))
    with pytest.raises(BurnishError, match=r"looks at image\.front, and the batched seeds are for small networks"):
        require_stackable(sac(0, SHAPES | {"image.front": (3, 12, 12)}))
