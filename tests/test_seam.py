"""Every method through the real loops, on a world that ends in every way: what it stored is what happened.

The checker (`seam_check.py`) is written without the package, from the definitions alone, and compares outcomes, replay
and rollouts with the world's own log of control ticks. It is itself tested: each kind of damage must make it complain.
"""

from __future__ import annotations

import copy
import math
from functools import cache

import numpy as np
import pytest
import torch

from burnish.finetune.build import has, prepare
from burnish.finetune.loops import OffPolicy, OffPolicyConfig, OnPolicy
from burnish.finetune.method import Recorded
from burnish.finetune.methods import dsrl, residual_td3, rlpd
from burnish.finetune.rollout import Rollout
from burnish.finetune.table import OFFLINE
from burnish.offline.replay import Replay
from burnish.offline.returns import Discount, Per
from burnish.offline.sources import Mapped
from burnish.policies.controllers import ChunkController
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.types import Outcome
from offline_lab import build as build_offline
from seam import (
    EXECUTE,
    FITTED,
    HORIZON,
    METHODS,
    START,
    Remote,
    SeamWorld,
    Watched,
    checker,
    make_base,
    replay_rows,
    rollout_rows,
    seam_env,
    seam_spec,
    shrunk,
)

BASES = ("flow", "diffusion", "gaussian", "squashed", "callable", "remote")
ITERATIONS = {OnPolicy: 3, OffPolicy: 24}


class Lab:
    """One method at work on the seam world, with ears at its view and at the door of its learner."""

    def __init__(self, name, kind, *, worlds=2, history=1, image=False, goal=False, **options):
        self.world, self.history = SeamWorld(worlds, image=image, goal=goal), history
        env = seam_env(self.world, history)
        self.base = None if kind is None else make_base(kind, seam_spec(env, history))
        options |= {"history": history} if kind is None and history > 1 else {}  # else that of the base
        self.config = shrunk(METHODS[name].config(**{**FITTED.get(name, {}), **options}))
        # The probe asks everything twice, which the remote base forbids.
        self.loop = prepare(self.config, self.base, env, seed=3, probe=kind != "remote")
        self.view = self.loop.env = Watched(self.loop.env)
        if isinstance(self.loop, OffPolicy):
            self.loop.learner.columns = tuple({*self.loop.learner.columns, "executed"})
        self.batches, self._update = [], self.loop.learner.update
        self.loop.learner.update = self._listen

    def _listen(self, source):
        metrics = self._update(Mapped(source, self._keep))
        for key, value in metrics.items():
            # A KL or a variance of nothing may be NaN; a loss may not.
            assert "loss" not in key or math.isfinite(float(value)), f"{key} is {float(value)}"
        return metrics

    def _keep(self, batch):
        self.batches.append(copy.deepcopy(batch))
        return batch

    def run(self):
        for _ in range(ITERATIONS[type(self.loop)]):
            metrics = self.loop.iterate()
        return {**metrics, **self.loop.report()}

    @property
    def execute(self):
        """How many ticks a decision of the view takes."""
        return self.view.rows()["executed"].shape[2]

    @property
    def gamma(self):
        return self.config.discount.per_step(self.execute)

    def complaints(self):
        ear = checker(self.world, self.gamma, self.execute, self.history)
        ear.rows(self.view.rows())
        if isinstance(self.loop, OffPolicy):
            ear.rows(replay_rows(self.loop.replay))
        else:
            for batch in self.batches:
                rows, known, named = rollout_rows(batch)
                ear.rows(rows, known)
                ear.bootstrap(rows, named)
        return ear.complaints


@cache
def a_base(kind):
    return make_base(kind, seam_spec(seam_env(SeamWorld(1))))


def bases_of(name):
    """The kinds of base that a method takes, by what it says that it needs; None where it does without."""
    needs = METHODS[name].needs
    kinds = [kind for kind in BASES if has(a_base(kind), needs)]
    return [*kinds, None] if has(None, needs) else kinds


CASES = [(name, kind, {}) for name in METHODS for kind in bases_of(name)]
VARIANTS = {
    "alone": {"worlds": 1},
    "many": {"worlds": 7},
    "history": {"history": 2},
    "goal": {"goal": True},
    "pictures": {"image": True, "goal": True, "history": 2},
}
CASES += [(name, bases_of(name)[0], variant) for name in METHODS for variant in VARIANTS.values()]
# Groups of 2; and a rollout here is shorter than an episode of single ticks.
CASES = [(name, kind, x) for name, kind, x in CASES if name != "grpo" or (kind and x.get("worlds", 2) % 2 == 0)]
CASES += [
    ("dppo", "diffusion", {"discount": Discount(0.9, Per.chunk)}),
    ("dsrl", "flow", {"variant": dsrl.Variant.aliased}),
    ("dsrl", "flow", {"repeat": True}),
    ("residual_td3", "flow", {"algorithm": residual_td3.Algorithm.sac, "loop": OffPolicyConfig(n_step=3)}),
    ("rlpd", None, {"algorithm": rlpd.Algorithm.td3, "execute": EXECUTE}),
]


def named(case):
    name, kind, variant = case
    named = [key for key, value in VARIANTS.items() if value is variant]
    return f"{name}-{kind}-" + (named[0] if named else "+".join(variant) or "plain")


@pytest.mark.rotating(3)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_stored_is_what_happened(case):
    name, kind, variant = case
    lab = Lab(name, kind, **variant)
    before = copy.deepcopy(lab.base.state_dict()) if hasattr(lab.base, "state_dict") else {}
    metrics = lab.run()
    assert len(lab.batches) >= 3 and lab.complaints() == []
    assert metrics["decisions"] == lab.view.rows()["reward"].size
    assert int(metrics["control_steps"]) == sum(map(len, lab.world.log))
    for key, x in before.items():  # the base is a guest: whatever is trained is a copy
        assert torch.equal(x, lab.base.state_dict()[key])


def test_the_world_ends_in_every_way():
    """Else the seam tests would say nothing about the ends that are missing."""
    lab = Lab("gaussian_ppo", "gaussian", worlds=7)
    lab.run()
    rows = lab.view.rows()
    ends = zip(rows["steps"][rows["ended"]].tolist(), rows["terminated"][rows["ended"]].tolist(), strict=True)
    assert set(ends) == {(steps, terminated) for steps in range(1, EXECUTE + 1) for terminated in (True, False)}
    assert np.isfinite(rows["obs"]["state"]).all()


@pytest.mark.parametrize("name", [name for name in METHODS if name.startswith("residual")])
def test_a_residual_sees_what_its_base_will_do(name):
    lab = Lab(name, "callable", worlds=3)
    lab.run()
    ear = checker(lab.world, lab.gamma, 1, 1)
    rows = lab.view.rows()
    ear.base_actions(rows, EXECUTE, START, HORIZON)
    if isinstance(lab.loop, OffPolicy):
        ear.base_actions(replay_rows(lab.loop.replay), EXECUTE, START, HORIZON)
    assert ear.complaints == []
    rows["next_obs"]["base_action"][0] += 0.01
    ear.base_actions(rows, EXECUTE, START, HORIZON)
    assert len(ear.complaints) == 3


@pytest.mark.parametrize("name", OFFLINE)
def test_an_offline_learner_goes_on_in_the_world(name):
    world = SeamWorld(3)
    env = seam_env(world)
    config = shrunk(OFFLINE[name]())
    learner = build_offline(config, None, seam_spec(env), seed=1)
    view, replay = Watched(ChunkEnv(env, EXECUTE, 0.9)), Replay(3000, 3)
    loop = OffPolicy(learner, view, replay, OffPolicyConfig(warmup=9, batch=8), seed=1)
    for _ in range(20):
        metrics = loop.iterate()
    assert all(math.isfinite(float(value)) for key, value in metrics.items() if "loss" in key)
    ear = checker(world, 0.9, EXECUTE, 1)
    ear.rows(view.rows())
    ear.rows(replay_rows(replay))
    assert metrics and ear.complaints == []


REMOTE = [name for name in METHODS if "remote" in bases_of(name)]


@pytest.mark.parametrize("name", REMOTE)
def test_a_slow_base_is_asked_no_more_than_it_must(name):
    """It refuses to answer twice; and the loops ask it once per decision, and once more where an episode was cut."""
    lab = Lab(name, "remote", worlds=2)
    lab.run()
    remote = lab.base.fn
    assert isinstance(remote, Remote)
    rows = lab.view.rows()
    decisions = sum(1 for world in lab.world.log for tick in world if (tick.tick - 1) % EXECUTE == 0)
    ends, worlds = int(rows["ended"].sum()), rows["reward"].shape[1]
    assert 0 < remote.rows <= decisions + ends + worlds


# ---- the checker is tested too ----


@pytest.fixture(scope="module")
def healthy():
    lab = Lab("residual_td3", "callable", worlds=3, goal=True)
    lab.run()
    chunked = Lab("gaussian_ppo", "gaussian", worlds=3, history=2, image=True)
    chunked.run()
    return lab, chunked


def swap(x, a, b):
    x[a], x[b] = x[b].copy(), x[a].copy()


def at_end(rows, terminated):
    """The first row that ended in that way, not in the last time step."""
    return tuple(np.argwhere((rows["ended"] & (rows["terminated"] == terminated))[:-1])[0])


def reset_instead_of_final(rows):
    t, n = at_end(rows, False)
    for key, x in rows["next_obs"].items():
        x[t, n] = rows["obs"][key][t + 1, n]


def terminated_for_truncated(rows):
    rows["terminated"][at_end(rows, False)] = True


DAMAGE = {
    "reward of another row": lambda rows: swap(rows["reward"], (1, 0), (2, 0)),
    "reward of another world": lambda rows: swap(rows["reward"], (1, 0), (1, 1)),
    "reward without discount": lambda rows: rows["reward"].__setitem__((0, 0), rows["reward"][0, 0] * 1.01),
    "a truncation that ends the future": lambda rows: rows["discount"].__setitem__(at_end(rows, False), 0.0),
    "a termination with a future": lambda rows: rows["discount"].__setitem__(at_end(rows, True), 0.9),
    "a truncation called termination": terminated_for_truncated,
    "an end that is not there": lambda rows: rows["ended"].__setitem__((0, 0), True),
    "an end forgotten": lambda rows: rows["ended"].__setitem__(at_end(rows, True), False),
    "steps": lambda rows: rows["steps"].__setitem__((0, 0), rows["steps"][0, 0] + 1),
    "the reset for where it led": reset_instead_of_final,
    "next_obs of another world": lambda rows: swap(rows["next_obs"]["state"], (0, 0), (0, 1)),
    "obs one row late": lambda rows: rows["obs"]["state"].__setitem__((0, 0), rows["obs"]["state"][1, 0]),
    "worlds confused": lambda rows: [swap(x, np.s_[:, 0], np.s_[:, 1]) for x in rows["obs"].values()],
    "a row left out": lambda rows: [
        tree.__setitem__(key, np.delete(x, 2, 0))
        for tree in (rows, rows["obs"], rows["next_obs"])
        for key, x in list(tree.items())
        if not isinstance(x, dict)
    ],
    "poison": lambda rows: rows["next_obs"]["state"].__setitem__((0, 0), np.nan),
    "another action": lambda rows: rows["executed"].__setitem__((0, 0, 0, 0), rows["executed"][0, 0, 0, 0] + 0.01),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_the_checker_complains(healthy, what):
    for lab in healthy:
        rows = lab.view.rows()
        ear = checker(lab.world, lab.gamma, lab.execute, lab.history)
        ear.rows(rows)
        assert ear.complaints == []
        DAMAGE[what](rows)
        ear.rows(rows)
        assert ear.complaints, "the damage went unnoticed"


def test_the_checker_complains_of_chunks_goals_memory_and_bootstraps(healthy):
    single, chunked = healthy
    rows = single.view.rows()
    rows["obs"]["goal"][0, 0] += 1
    damaged = [(single, rows)]
    for key, place in (("state", (2, 0, 0)), ("image.top", (2, 0, 0))):  # the older of two frames
        rows = chunked.view.rows()
        rows["obs"][key][place] += 1
        damaged.append((chunked, rows))
    rows = chunked.view.rows()
    t, n = (int(i) for i in np.argwhere(rows["steps"] < EXECUTE)[0])
    rows["executed"][t, n, -1] = 0.1  # beyond the end
    damaged.append((chunked, rows))
    for lab, rows in damaged:
        ear = checker(lab.world, lab.gamma, lab.execute, lab.history)
        ear.rows(rows)
        assert ear.complaints
    rows, _, stored = rollout_rows(chunked.batches[0])
    for wrong in (stored[1:], [*stored, stored[0]], [stored[0] + 1, *stored[1:]]):
        ear = checker(chunked.world, chunked.gamma, EXECUTE, 2)
        ear.bootstrap(rows, wrong)
        assert ear.complaints


@pytest.mark.parametrize(("name", "memory"), [("residual_td3", Replay), ("dppo", Rollout)])
def test_a_loop_that_stores_the_reset_is_found_out(name, memory, monkeypatch):
    real = memory.record if memory is Replay else memory.add

    def careless(self, *parts):
        swapped = [part._replace(next_obs=part.obs) if isinstance(part, Outcome) else part for part in parts]
        return real(self, *swapped)

    monkeypatch.setattr(memory, real.__name__, careless)
    lab = Lab(name, "flow")
    lab.run()
    assert any("next_obs" in complaint for complaint in lab.complaints())


def test_a_view_that_asks_twice_is_found_out(monkeypatch):
    real = ChunkController.step

    def forgetful(self, obs):
        self._plan = None  # what was computed for the peek
        return real(self, obs)

    monkeypatch.setattr(ChunkController, "step", forgetful)
    with pytest.raises(AssertionError, match="asked twice"):
        Lab("residual_td3", "remote").run()


# ---- the table ----


def test_the_table_says_what_is_so():
    for name, method in METHODS.items():
        config = method.config()
        assert hasattr(config, "discount") and hasattr(config, "loop") and method.doc
        kinds = bases_of(name)
        assert kinds, f"nothing can be refined by {name}"
        if method.recordings is not Recorded.unused:
            assert not hasattr(config.loop, "decisions_per_update"), f"{name} is on-policy and reads no recordings"


@pytest.mark.parametrize("name", METHODS)
def test_a_base_that_lacks_something_is_refused_in_one_sentence(name):
    env = seam_env(SeamWorld(2))
    for kind in (*BASES, None):
        if kind in bases_of(name):
            continue
        base = None if kind is None else make_base(kind, seam_spec(env))
        with pytest.raises(BurnishError, match=f"^method={name} needs a policy that .*; .*Try method=") as caught:
            prepare(shrunk(METHODS[name].config()), base, env)
        for other in METHODS:  # whoever is proposed can do it
            if f"method={other}" in str(caught.value).partition("Try")[2].replace(",", " ").split():
                assert kind in bases_of(other)


def test_recordings_for_a_method_that_cannot_use_them_are_refused():
    env = seam_env(SeamWorld(2))
    with pytest.raises(BurnishError, match="its own decisions alone"):
        prepare(METHODS["dppo"].config(), make_base("flow", seam_spec(env)), env, prior=Replay(4))
