"""Entry points: ``burnish serve | export | deploy``."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import MISSING

from ..policies.__main__ import acting_policy, in_words, origin_of, prepare, say, seen_by, where_of, world_for
from ..policies.build import CheckpointConfig
from ..policies.core.cli import main
from ..policies.core.errors import BurnishError
from ..policies.core.evaluate import evaluate, evaluation_seeds
from ..policies.core.run import require_writable
from ..policies.core.types import Controller, Step
from ..policies.horizon import controller_for
from ..policies.remote import API_KEY
from ..sim.build import ENVS, world_from
from ..sim.mirror import Mirror
from .discovery import make_adapter
from .env import RobotEnv
from .errors import RobotError
from .export import ExportConfig, source
from .export import export as run_export
from .listening import ServerConfig
from .robots import ROBOTS, Hardware, stage_for
from .safe_robot import Safety
from .supervisor import Keyboard

CHECKPOINT: dict[str, type] = {"checkpoint": CheckpointConfig}
# Hydra groups of each verb below: verb -> group -> choice -> dataclass.
GROUPS: dict[str, dict[str, dict[str, type]]] = {
    "serve": {"policy": CHECKPOINT},
    "export": {"policy": CHECKPOINT},
    "deploy": {"policy": CHECKPOINT, "robot": ROBOTS, "env": {name: kind.config for name, kind in ENVS.items()}},
}
REHEARSALS = 50  # of a policy, to see how long it thinks
NOT_SAFETY_RATED = (
    "note: the guard is no safety-rated function; the limits of the robot's controller and an emergency stop made of "
    "hardware are still needed"
)


@dataclass
class ServeConfig(ServerConfig):
    policy: Any = MISSING
    device: str = "cpu"
    threads: int = 0


@dataclass
class ExportVerb(ExportConfig):
    policy: Any = MISSING
    out: str = MISSING


@dataclass
class DeployConfig:
    policy: Any = MISSING
    robot: Any = MISSING
    env: Any = None  # what the policy was trained for, by default
    safety: Safety = field(default_factory=Safety)
    episodes: int = 10
    seed: int = 0
    realtime: bool = True  # false: a robot that is a model plays as fast as it can
    compare: bool = True  # play the same episodes in simulation too
    dry_run: bool = False  # do all but move: connect, read, think, report
    supervisor: str = ""  # keyboard: somebody takes over, and says how it went
    out: str | None = None  # folder for deploy.json
    threads: int = 1

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise BurnishError(f"episodes={self.episodes} must be at least 1")
        if self.supervisor not in ("", "keyboard"):
            raise BurnishError(f"supervisor={self.supervisor} is not known; choices: keyboard")


def serve(config: ServeConfig) -> int:
    device = prepare(config.device, config.threads)
    try:
        from .server import PolicyServer
    except ImportError as error:
        raise BurnishError("serving needs websockets and msgpack; pip install 'burnish[serve]'") from error
    policy, _ = acting_policy(config.policy, device, None)
    server = PolicyServer(policy, config, key=os.environ.get(API_KEY), device=device)
    reach = "to this machine alone" if config.local else "to whoever has the key"
    say(f"{config.policy.path} answers at {server.url}, {reach}; Ctrl-C ends it")
    if not config.local:
        say("note: what is said there can be read on the way; tunnel it (ssh -L), or put TLS in front (wss://)")
    # What is loaded now stays: a collection that walks all of torch holds every answer up for some 100 ms.
    gc.collect()
    gc.freeze()
    server.run()
    say("no longer served")
    return 0


def export(config: ExportVerb) -> int:
    policy, _ = acting_policy(config.policy, torch.device("cpu"), None)
    made = run_export(config, policy, source(config.policy.path))
    worst = max(float(x) for x in _numbers(made.bundle.parity, "largest")) if made.bundle.parity else 0.0
    say(f"{config.out}: answers as {config.policy.path} does, within {worst:.1e}; no torch is needed to run it")
    return 0


def _numbers(data: Any, name: str) -> list[Any]:
    if not isinstance(data, Mapping):
        return []
    return [x for key, x in data.items() if key == name] + [y for x in data.values() for y in _numbers(x, name)]


def deploy(config: DeployConfig) -> int:
    """One robot, a policy, so many episodes; and the same episodes in simulation beside them."""
    device = prepare("cpu", config.threads)
    if config.out is not None:
        require_writable(Path(config.out))
    policy, origin = acting_policy(config.policy, device, config.env)
    world = origin_of(config.env) or origin.get("env")
    if world is None:
        raise BurnishError(f"{where_of(config.policy)} does not say which world it is for; give env=...")
    body = Mirror(world_from(world))
    try:
        return _deployed(config, policy, body, world)
    except RobotError as error:
        raise BurnishError(str(error)) from error


def _deployed(config: DeployConfig, policy: Any, body: Mirror, world: Mapping[str, Any]) -> int:
    say(NOT_SAFETY_RATED)
    seeds = evaluation_seeds(config.episodes, base=config.seed)
    thinks = _thinking_s(policy, body, seeds[0])
    period_s = 1 / body.spec.control_hz
    say(
        f"{where_of(config.policy)} thinks for {thinks['p50']:.1f} ms, {thinks['p99']:.1f} ms at worst in a hundred; a "
        f"control tick is {1e3 * period_s:.0f} ms"
    )
    if config.dry_run:
        return _dry_run(config, policy, body, seeds[0])
    if thinks["p50"] > 1e3 * period_s and config.realtime:
        raise BurnishError("the policy is slower than its own control rate; export it, or run it on a faster machine")
    supervisor = Keyboard(body.spec.action.dim) if config.supervisor else None
    stage = stage_for(config.robot, body, config.safety, config.realtime, supervisor)
    env = RobotEnv(body, stage, supervisor=supervisor)
    try:
        result = evaluate(seen_by(policy.spec, env), controller_for(policy, 1), seeds)
    finally:
        env.close()
        if supervisor is not None:
            supervisor.close()
    say(f"on the robot: {in_words(result)}")
    found: dict[str, Any] = {"robot": result.summary(), "thinking_ms": thinks, "reports": env.reports}
    if config.compare:
        simulated = world_for(policy.spec, world, min(config.episodes, 32), torch.device("cpu"))
        beside = evaluate(simulated, controller_for(policy, simulated.num_envs), seeds)
        say(f"in simulation, the same episodes: {in_words(beside)}")
        found["simulation"] = beside.summary()
    say(_kept(env.reports))
    if config.out is not None:
        path = Path(config.out) / "deploy.json"
        path.write_text(json.dumps({**found, "seeds": seeds, "world": world}, indent=1) + "\n", encoding="utf-8")
    return 0


def _thinking_s(policy: Any, body: Mirror, seed: int) -> dict[str, float]:
    """How long a decision takes here, in ms, once everything is warm. Before anything moves."""
    body.begin(seed)
    obs = {key: torch.from_numpy(np.asarray(x, np.float32)) for key, x in body.observe().items()}
    env = seen_by(policy.spec, _Still(body, obs))
    took = []
    for _ in range(REHEARSALS):
        controller: Controller = controller_for(policy, 1)
        controller.reset(torch.ones(1, dtype=torch.bool), [seed])
        seen = env.reset(None, [seed])
        began = time.perf_counter()
        controller.step(seen)
        took.append(1e3 * (time.perf_counter() - began))
    warm = took[REHEARSALS // 5 :]
    return {"p50": float(np.percentile(warm, 50)), "p99": float(np.percentile(warm, 99))}


class _Still:
    """The first observation of an episode, again and again."""

    def __init__(self, body: Mirror, obs: dict[str, torch.Tensor]) -> None:
        self.num_envs, self.device, self.spec, self._obs = 1, torch.device("cpu"), body.spec, obs

    def reset(self, mask: Any = None, seeds: Any = None) -> dict[str, torch.Tensor]:
        return self._obs

    def step(self, action: torch.Tensor, active: torch.Tensor | None = None) -> Step:
        raise NotImplementedError("nothing is played here")


def _dry_run(config: DeployConfig, policy: Any, body: Mirror, seed: int) -> int:
    """Connect and read a robot that is hardware, and say what the policy would do first."""
    controller = controller_for(policy, 1)
    controller.reset(torch.ones(1, dtype=torch.bool), [seed])
    body.begin(seed)
    here = body.start
    if isinstance(config.robot, Hardware):
        adapter = make_adapter(config.robot.name, config.robot.device)
        try:
            adapter.configure()
            here = adapter.read(1.0).q
        finally:
            adapter.close()
    body.see(here, np.zeros_like(here))
    obs = {key: torch.from_numpy(np.asarray(x, np.float32)) for key, x in body.observe().items()}
    action = controller.step(seen_by(policy.spec, _Still(body, obs)).reset(None, [seed]))[0].numpy()
    middle = (np.array(body.spec.action.high) + np.array(body.spec.action.low)) / 2
    half = (np.array(body.spec.action.high) - np.array(body.spec.action.low)) / 2
    target = body.targets(middle + half * action)
    say(f"the joints are at {here.round(3).tolist()} rad")
    say(f"the first set-points would be {target.round(3).tolist()}, {np.abs(target - here).max():.3f} rad away")
    say("nothing was moved")
    return 0


def _kept(reports: list[dict[str, Any]]) -> str:
    """What the guard and the loop did, over all episodes."""
    counts: dict[str, int] = {}
    for report in reports:
        for kind, count in report.get("counts", {}).items():
            counts[kind] = counts.get(kind, 0) + count
    ticks = sum(report.get("timing", {}).get("ticks", 0) for report in reports)
    misses = sum(report.get("timing", {}).get("misses", 0) for report in reports)
    of_note = {
        kind: counts[kind] for kind in sorted(counts) if counts[kind] and kind not in ("start", "stopped", "ramp")
    }
    words = ", ".join(f"{kind} {count}" for kind, count in of_note.items()) or "nothing"
    return f"the control loop: {ticks} ticks, {misses} deadlines missed; the guard and the ladder: {words}"


if __name__ == "__main__":
    sys.exit(main())
