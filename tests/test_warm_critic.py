"""``critic_from=RUN``: a refinement that begins with the critic of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.finetune import refine
from burnish.finetune.build import prepare
from burnish.finetune.methods.dsrl import DSRLConfig, Variant
from burnish.finetune.warm_critic import adopt_critic, critic_state
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import agent_spec
from burnish.policies.runs.run import CHECKPOINTS
from burnish.sim.point_reach import PointReach, PointReachConfig, Reward
from seam import make_base, shrunk

WORLD = PointReachConfig(reward=Reward.distance, goal_in_state=True, max_steps=10)
SMALL: dict[str, Any] = {
    "worlds": 2,
    "total": 24,
    "eval.episodes": 2,
    "eval.worlds": 2,
    "eval.confirm": 2,
    "threads": 1,
}
NETWORKS: dict[str, Any] = {"loop.warmup": 10, "sac.agent.hidden": [8], "sac.critic.hidden": [8]}
MBPO: dict[str, Any] = {f"inner.{name}": x for name, x in NETWORKS.items()} | {
    "model.hidden": [8],
    "model.updates": 2,
    "refit": 100,
    "rollouts": 1,
    "imagined_worlds": 4,
}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of SAC."""
    out = tmp_path_factory.mktemp("runs") / "first"
    refine(None, WORLD, method="sac", out=out, **SMALL, **NETWORKS)
    return out


@pytest.mark.parametrize("method", ["sac", "mbpo"])
def test_the_critic_is_that_of_the_run_before_it_learns(first, method, tmp_path):
    """Nothing is learnt in the warm-up, so what a run saves within it is what it began with."""
    settings = NETWORKS | {"loop.updates_per_decision": 0} if method == "sac" else MBPO
    settings = settings | ({} if method == "sac" else {"inner.loop.updates_per_decision": 0})
    saved = critic_state(str(first))

    def begun(**options: Any) -> dict[str, torch.Tensor]:
        out = tmp_path / str(len(options))
        refine(str(first), WORLD, method=method, out=out, **SMALL, **settings, **options)
        return critic_state(str(out))

    kept, fresh = begun(critic_from=str(first)), begun()
    own = [name for name in saved if name.endswith("weight")]
    assert own and all(torch.equal(kept[name], saved[name]) for name in saved)
    assert not any(torch.equal(fresh[name], saved[name]) for name in own), "without critic_from= it begins anew"


def test_what_an_offline_run_has_learnt_goes_on_in_the_world(tmp_path, capsys):
    collected = ["collect", "env=point_reach", "expert=clean", "episodes=4", f"out={tmp_path}/data"]
    assert main(collected) == 0
    sizes = ["method.critic.hidden=[8]", "threads=1", "eval.episodes=2"]
    offline = ["offline", "method=iql", f"data={tmp_path}/data", "steps=4", "batch=8", "chunk.execute=2"]
    assert main([*offline, *sizes, f"out={tmp_path}/iql"]) == 0
    online = ["finetune", "method=iql", f"policy.path={tmp_path}/iql", f"critic_from={tmp_path}/iql", "env=point_reach"]
    online += ["worlds=2", "total=20", "method.loop.warmup=10", "method.loop.updates_per_decision=0", *sizes[1:]]
    assert main([*online, sizes[0], f"out={tmp_path}/online"]) == 0
    for judge in ("critic", "value"):  # from the value the critic is learnt, so a fresh one would undo it
        saved, kept = critic_state(str(tmp_path / "iql"), judge), critic_state(str(tmp_path / "online"), judge)
        assert saved and all(torch.equal(kept[name], saved[name]) for name in saved)
    capsys.readouterr()
    assert main([*online, "method.critic.hidden=[9]", f"out={tmp_path}/other"]) == 2
    said = capsys.readouterr().err
    assert "is another one: online." in said and "iql/config.yaml" in said and not (tmp_path / "other").exists()


def test_both_critics_of_aliased_noise_are_brought(monkeypatch):
    env = ScaledEnv(PointReach(2))
    base = make_base("flow", agent_spec(env.spec))
    one, other = (
        prepare(shrunk(DSRLConfig(variant=Variant.aliased)), base, env, seed=seed, probe=False).learner.inner
        for seed in (0, 1)
    )
    monkeypatch.setattr("burnish.finetune.warm_critic.critic_state", lambda run, name: one.state_dict()[name])
    adopt_critic(other, "run")
    for name in ("critic", "latent_critic"):
        saved, kept = one.state_dict()[name], getattr(other, name).state_dict()
        assert all(torch.equal(kept[key], x) for key, x in saved.items()), name


def test_an_agent_that_learns_its_scales_anew_is_refused(first, tmp_path):
    """The first row that it sees would make another function of the critic."""
    settings = {**NETWORKS, **SMALL, "critic_from": str(first), "normalize": True}
    with pytest.raises(BurnishError, match=r"begin with the policy of that run too: policy\.path="):
        refine(None, WORLD, method="sac", out=tmp_path / "anew", **settings)
    refine(None, WORLD, method="sac", out=tmp_path / "plain", **settings | {"normalize": False})


def test_what_has_no_critic_is_refused(first, tmp_path):
    with pytest.raises(BurnishError, match=r"has no checkpoints; give the folder of a run"):
        critic_state(str(tmp_path))
    with pytest.raises(BurnishError, match=r"learns no critic that could begin as that of critic_from="):
        adopt_critic(object(), str(first))
    out = tmp_path / "gaussian"
    refine(None, WORLD, method="gaussian_ppo", out=out, **SMALL, **{"loop.decisions_per_update": 6})
    assert (out / CHECKPOINTS).is_dir()
    with pytest.raises(BurnishError, match=r"the method of critic_from=.*gaussian learns no critic"):
        critic_state(str(out))
