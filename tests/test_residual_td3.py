"""The off-policy correction: exact where it corrects nothing, honest about what was executed, and able to learn."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.finetune.loops import Assembly, OffPolicy, OffPolicyConfig
from burnish.finetune.methods.residual_td3 import Algorithm, ResidualTD3Config, build
from burnish.offline.replay import Replay
from burnish.offline.sac import SACConfig, soft_agent
from burnish.offline.td3 import TD3Config, deterministic_agent
from burnish.policies.cli.cli import compose, to_object
from burnish.policies.controllers import ChunkController, controller_for
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.core.types import Step
from burnish.policies.core.views import Hidden
from burnish.policies.core.wrapper import Wrapper
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.nets.critic import CriticConfig
from refine_lab import EXECUTE, ON_LINE, flow_base, learnt, line, mean_return, weights
from scripted import TERMINATED, TRUNCATED, ScriptedWorld
from training_lab import check_resumed

# Ends of both kinds, with the base's queue empty (even lengths) and half played (odd ones).
SCRIPT = [[(5, TERMINATED), (4, TRUNCATED)], [(3, TRUNCATED), (6, TERMINATED)], [(2, TRUNCATED)]]
# Mean returns of 20 recorded seeds: TD3 -1.15 to -1.09, SAC -1.18 to -1.10; of noise as rewards -3.72 to -1.46 and
# -4.41 to -2.29; the base -2.74.
LEARNT = -1.3


def planned(state: Tensor, place: Tensor) -> Tensor:
    """What the scripted base plays (..., 2) at ``place`` of a chunk that it began on ``state``; often beyond 0.9."""
    return torch.sin(state[..., 1:] + 2.0 * state[..., :1] + place[..., None])


def scripted_base(noisy: bool = False, asked: list | None = None) -> CallablePolicy:
    shape = (4,) if noisy else None
    spec = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-2, 0), (2, 1)), 4, EXECUTE, 1, noise_shape=shape)

    def act(obs: dict[str, Tensor], noise: Tensor | None = None) -> Tensor:
        if asked is not None and noise is not None:
            asked.extend(tuple(row) for row in torch.cat([obs["state"], noise], 1).tolist())
        return planned(obs["state"][:, None].expand(-1, 4, -1), torch.arange(4.0) - 1)

    return CallablePolicy(act, spec)


def wrong_by_a_bit() -> CallablePolicy:
    """Comes to rest 0.4 m beside the goal."""

    def act(obs: dict[str, Tensor]) -> Tensor:
        x, goal = obs["state"].split(1, 1)
        return (2.5 * (goal + 0.4 - x))[:, None].clamp(-1, 1).expand(-1, 2, -1)

    return CallablePolicy(act, ON_LINE)


def tiny(algorithm: str = "td3", **loop: Any) -> ResidualTD3Config:
    critic = CriticConfig(members=4, hidden=[64, 64])
    shared = {"lr": 1e-3, "actor_lr": 1e-3, "tau": 0.02, "subset": 2, "actor_mean": True, "actor_every": 2}
    td3 = TD3Config(**shared, explore_std=0.3, delay_targets=False, critic=critic)
    td3.agent = deterministic_agent(hidden=[32, 32], zero_last=True)
    sac = SACConfig(**shared, alpha=0.05, backup_entropy=False, critic=critic)
    sac.agent = soft_agent(hidden=[32, 32], zero_last=True)
    usual = {"capacity": 20_000, "warmup": 400, "initial_updates": 100, "updates_per_decision": 0.5, "batch": 64}
    return ResidualTD3Config(
        Algorithm(algorithm), 1.0, 1.0, loop=OffPolicyConfig(**(usual | {"n_step": 3} | loop)), td3=td3, sac=sac
    )


def on_script(config: ResidualTD3Config, base: Any = None, seed: int = 0) -> Assembly:
    return build(config, base or scripted_base(), ScaledEnv(ScriptedWorld(SCRIPT)), seed=seed)


def training(config: ResidualTD3Config, assembly: Assembly) -> OffPolicy[Any]:
    replay = Replay(config.loop.capacity, assembly.env.num_envs)
    return OffPolicy(assembly.learner, assembly.env, replay, config.loop, seed=1)


def awaken(agent: Any, seed: int = 0) -> None:
    """Weights that correct something."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=noise))


@pytest.mark.parametrize("worlds", [1, 7])
@pytest.mark.parametrize("algorithm", ["td3", "sac"])
@pytest.mark.parametrize("make", [wrong_by_a_bit, flow_base])
def test_a_fresh_correction_is_the_base_bit_for_bit(make: Any, algorithm: str, worlds: int) -> None:
    """Through the view, and as it is deployed; awakened weights play something else, so equality says something."""
    base = make()
    assembly = build(tiny(algorithm), base, line(worlds), seed=5)
    policy = assembly.learner.policy
    controllers = [controller_for(p, worlds, seed=2) for p in (base, policy)]
    env = line(worlds)
    everyone = torch.ones(worlds, dtype=torch.bool)
    seeds = list(range(worlds))
    obs = env.reset(seeds=seeds)
    for controller in controllers:
        controller.reset(everyone, seeds)
    seen = assembly.env.reset(seeds)
    fixed = ChunkController(base, worlds)
    fixed.reset(everyone, seeds)
    for _ in range(8):
        expected, played = (controller.step(obs) for controller in controllers)
        assert torch.equal(expected, played)
        with torch.no_grad():
            outcome = assembly.env.step(policy.net.act(seen, greedy=True))
        step = env.step(expected)
        assert torch.equal(outcome.executed[:, 0], step.info["executed"])
        assert torch.equal(outcome.next_obs["state"], step.obs["state"])
        obs, seen = step.obs, outcome.obs
        if bool(outcome.ended.any()):
            break
    awaken(policy.net)
    assert not torch.equal(controllers[0].peek(obs), controllers[1].peek(obs))


class Told(Wrapper):
    """Remembers the last action. What a world reports as executed went through its units and back, which rounds."""

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        self.action = action
        return self.env.step(action, active)


def test_what_is_deployed_plays_what_the_view_plays() -> None:
    config, told = replace(tiny(), bound=0.3), Told(line(3))
    assembly, env = build(config, wrong_by_a_bit(), told, seed=5), line(3)
    policy, seeds = assembly.learner.policy, [0, 1, 2]
    awaken(policy.net)
    controller = controller_for(policy, 3)
    controller.reset(torch.ones(3, dtype=torch.bool), seeds)
    obs, seen = env.reset(seeds=seeds), assembly.env.reset(seeds)
    for _ in range(3):
        with torch.no_grad():
            correction = policy.net.act(seen, greedy=True)
            outcome = assembly.env.step(correction)
        action = controller.step(obs)
        assert torch.equal(action, told.action)
        torch.testing.assert_close(action, outcome.executed[:, 0])
        expected = (seen["base_action"] + 0.3 * correction[:, 0]).clamp(-1, 1)
        torch.testing.assert_close(action, expected)
        obs, seen = env.step(action).obs, outcome.obs


def test_the_warm_up_is_uniform_around_the_base() -> None:
    """Within ``warm_noise`` of it, also where that is further than the agent can go."""
    assembly = on_script(replace(tiny(), bound=0.1, warm_noise=0.2))
    obs = {"state": torch.zeros(500, 3), "base_action": torch.full((500, 2), 0.3)}
    decision = assembly.learner.actor.act(obs, warm=True, generator=torch.Generator().manual_seed(0))
    away = assembly.learner.inner.transform(obs, decision.action) - 0.3
    assert float(away.abs().max()) <= 0.2 + 1e-6
    # 1000 uniform numbers: mean 0 within 5 standard errors of .0037, deviation .2 / sqrt(3).
    assert abs(float(away.mean())) < 0.018 and float(away.std()) == pytest.approx(0.1155, rel=0.06)


@pytest.mark.parametrize("algorithm", ["td3", "sac"])
def test_the_critic_is_shown_what_was_executed(algorithm: str) -> None:
    config = tiny(algorithm, warmup=30)
    config.warm_noise = 0.3  # the base stands near the border often: some sums are clipped
    assembly = on_script(config)
    awaken(assembly.learner.inner.agent)
    loop = training(config, assembly)
    assembly.learner.columns = ("executed",)
    loop = training(config, assembly)
    for _ in range(20):
        loop.iterate()
    held = loop.replay.sample(256)
    shown = assembly.learner.inner.transform(held["obs"], held["action"])
    assert torch.equal(shown, held["executed"])
    raw = held["obs"]["base_action"][:, None] + config.bound * held["action"]
    assert 0.02 < float((raw.abs() > 1).float().mean()) < 0.9


def test_base_actions_at_ends_of_both_kinds_and_after_resets() -> None:
    """``planned`` says in closed form what the base does at tick t of an episode: it was asked at t - t % n."""
    config = tiny(warmup=10_000)
    loop = training(config, on_script(config))
    for _ in range(40):
        loop.iterate()
    held = loop.replay.gather(torch.arange(len(loop.replay)))
    for name in ("obs", "next_obs"):
        state = held[name]["state"]
        place = state[:, 2] % EXECUTE
        began = torch.cat([state[:, :2], (state[:, 2] - place)[:, None]], 1)
        assert torch.equal(held[name]["base_action"], planned(began, place))
    cut = held["ended"] & ~held["terminated"]
    for kind in (held["terminated"], cut):  # each end was met with the queue empty and half played
        assert set((held["next_obs"]["state"][kind, 2] % EXECUTE).tolist()) == {0.0, 1.0}


def test_the_base_is_never_asked_twice() -> None:
    asked: list = []
    config = tiny(warmup=12, initial_updates=0, batch=16)
    loop = training(config, on_script(config, scripted_base(noisy=True, asked=asked)))
    for _ in range(40):
        loop.iterate()
    assert len(asked) > 60 and len(set(asked)) == len(asked)


@pytest.mark.parametrize("algorithm", ["td3", "sac"])
def test_the_target_equals_a_slow_loop(algorithm: str) -> None:
    config = tiny(algorithm, warmup=60)
    config.td3.target_std, config.td3.subset, config.sac.subset = 0.0, 0, 0
    assembly = on_script(config)
    loop = training(config, assembly)
    for _ in range(15):
        loop.iterate()
    inner = assembly.learner.inner
    awaken(inner.target_agent if algorithm == "td3" else inner.agent)
    batch = loop.replay.sample(32)
    noise = copy.deepcopy(inner.noise.get_state())
    target = inner._target(batch["next_obs"], batch)
    inner.noise.set_state(noise)
    with torch.no_grad():
        if algorithm == "td3":
            action = inner.target_agent.act(batch["next_obs"], greedy=True)
        else:
            action = inner.agent.draw(batch["next_obs"], generator=inner.noise).action
        for i in range(32):
            one = {key: x[i : i + 1] for key, x in batch["next_obs"].items()}
            played = (one["base_action"] + config.bound * action[i]).clamp(-1, 1)[None]
            value = min(float(q) for q in inner.critic.target(one, played)[:, 0])
            expected = float(batch["reward"][i]) + float(batch["discount"][i]) * value
            assert float(target[i]) == pytest.approx(expected, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("algorithm", ["td3", "sac"])
def test_phase_and_queue_are_learnt_from_and_resume_bit_for_bit(algorithm: str) -> None:
    config = replace(tiny(algorithm, warmup=24, initial_updates=3, updates_per_decision=1.0, batch=16))
    config.observe = list(Hidden)
    straight, _ = check_resumed(lambda seed: training(config, on_script(config, seed=seed)), 14, 6)
    held = straight.replay.sample(64)
    for obs in (held["obs"], held["next_obs"]):
        state, place = obs["state"], obs["state"][:, 2] % EXECUTE
        began = torch.cat([state[:, :2], (state[:, 2] - place)[:, None]], 1)
        rest = torch.where((place == 0)[:, None], planned(began, place + 1), 0.0)
        assert torch.equal(obs["base_phase"][:, 0], place / EXECUTE)
        assert torch.equal(obs["base_queue"], torch.stack([obs["base_action"], rest], 1))


def test_who_is_trained_when() -> None:
    base = flow_base()
    config = tiny(warmup=32, initial_updates=6, updates_per_decision=1.0, batch=16)
    assembly = build(config, base, line(4))
    loop, inner = training(config, assembly), assembly.learner.inner
    frozen, agent, critic = weights(base), weights(inner.agent), weights(inner.critic.online)
    for _ in range(9):
        loop.iterate()
    assert loop.statistics.decisions == 32, "nothing is played while the critic learns from the warm-up"
    assert inner.updates == 6, "the initial updates, and no other yet"
    assert torch.equal(weights(inner.agent), agent), "the initial updates are for the critic"
    assert not torch.equal(weights(inner.critic.online), critic)
    for _ in range(3):
        loop.iterate()
    assert inner.updates == 6 + 3 * 4
    assert not torch.equal(weights(inner.agent), agent)
    assert torch.equal(weights(base), frozen)
    critic = weights(inner.critic.online)
    metrics = inner._actor_step(loop.replay.sample(16)["obs"])
    assert torch.equal(weights(inner.critic.online), critic) and "saturation" in metrics


def test_the_distance_to_the_base_is_reported() -> None:
    config = tiny(warmup=16, initial_updates=0, updates_per_decision=1.0, batch=16)
    config.td3.actor_every = 1
    assembly = on_script(config)
    loop = training(config, assembly)
    while "base_distance" not in (metrics := loop.iterate()):
        pass
    assert 0 < float(metrics["base_distance"]) < 2


@pytest.mark.parametrize("algorithm", ["td3", "sac"])
def test_resumes_bit_for_bit(algorithm: str) -> None:
    config = tiny(algorithm, warmup=24, initial_updates=3, updates_per_decision=1.0, batch=16)
    both = check_resumed(lambda seed: training(config, on_script(config, seed=seed)), 14, 6)
    for part in ("agent", "critic"):
        assert torch.equal(*(weights(getattr(x.learner.inner, part)) for x in both))


def test_refusals() -> None:
    for settings, message in (({"bound": 0.0}, "bound=0.0"), ({"warm_noise": -0.1}, "warm_noise")):
        with pytest.raises(BurnishError, match=message):
            ResidualTD3Config(**settings)
    with pytest.raises(BurnishError, match="CallablePolicy"):
        on_script(tiny(), base=planned)


def test_a_controller_may_be_the_base() -> None:
    ready = ChunkController(scripted_base(), 3)
    assembly = on_script(tiny(), ready)
    assert assembly.env.env.base is ready and assembly.learner.policy.base is ready.policy


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "seed"), [("td3", 0), ("td3", 1), ("td3", 2), ("sac", 0)])
def test_learns_to_correct_a_base(algorithm: str, seed: int) -> None:
    config = tiny(algorithm)
    base = wrong_by_a_bit()
    level = learnt(build(config, base, line(16, seed=seed), seed=seed), config, 1500, seed)
    assert level > LEARNT > mean_return(base) + 1.0


def test_meaningless_rewards_teach_nothing() -> None:
    config = tiny()
    assembly = build(config, wrong_by_a_bit(), line(16, negative_control=True))
    assert learnt(assembly, config, 1500, 0) < LEARNT


# ---- presets ----


def chosen(*words: str) -> ResidualTD3Config:
    return to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], list(words))).method


def test_the_published_preset_is_that_of_resfit_and_explicit_settings_win() -> None:
    published, cpu = chosen("method=residual_td3_published"), chosen("method=residual_td3")
    for agent, critic in ((x.agent, x.critic) for x in (published.td3, published.sac)):
        assert agent.hidden == critic.hidden == [1024, 1024] and agent.layer_norm and critic.layer_norm
        assert agent.zero_last and critic.members == 10 and critic.average
    td3, loop = published.td3, published.loop
    assert (td3.lr, td3.actor_lr, td3.subset, td3.actor_every, td3.max_grad_norm) == (1e-4, 1e-6, 2, 4, 1.0)
    assert (loop.warmup, loop.initial_updates, loop.updates_per_decision, loop.n_step) == (10_000, 10_000, 4, 3)
    assert cpu == chosen("method=residual_td3_cpu") == ResidualTD3Config()
    assert cpu.td3.critic.members == 2 and max(cpu.td3.critic.hidden) <= 256
    given = chosen("method=residual_td3_published", "method.td3.agent.hidden=[256,256]", "method.loop.warmup=4000")
    assert given.td3.agent.hidden == [256, 256] and given.loop.warmup == 4000  # also where it is the cpu preset's
    assert given.td3.agent.layer_norm and given.sac.agent.hidden == [1024, 1024]


@pytest.mark.parametrize("algorithm", ["td3", "sac"])
def test_the_critic_loss_is_averaged_over_members_so_that_the_clip_is_the_published_one(algorithm: str) -> None:
    config = ResidualTD3Config(Algorithm(algorithm), loop=OffPolicyConfig(warmup=60))
    for part in (config.td3, config.sac):
        part.critic = replace(part.critic, members=10)
    assembly = on_script(config)
    loop = training(config, assembly)
    for _ in range(15):
        loop.iterate()
    inner, batch = assembly.learner.inner, loop.replay.sample(32)
    noise = copy.deepcopy(inner.noise.get_state())
    target = inner._target(batch["next_obs"], batch)
    errors = inner.critic(batch["obs"], inner.transform(batch["obs"], batch["action"])).detach() - target
    inner.noise.set_state(noise)
    loss = inner._critic_step(batch["obs"], batch["next_obs"], batch)["critic_loss"]
    assert float(loss) == pytest.approx(float(errors.square().mean()), rel=1e-4)
