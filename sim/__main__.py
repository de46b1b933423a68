"""Entry points: ``burnish collect``, demonstrations of a scripted expert or of a trained policy, and ``burnish view``.

The set grows in public while it is recorded: killed at any instant, it holds what was published a few seconds before,
and ``resume=true`` continues it to the same bytes (with a network and another number of worlds: to the same rounding).
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..policies.build import SAVED, loaded
from ..policies.cli.cli import main
from ..policies.controllers import controller_for
from ..policies.core.config import to_data
from ..policies.core.errors import BurnishError
from ..policies.core.files import require_writable
from ..policies.core.seed import derive
from ..policies.core.spec import ActionSpec
from ..policies.core.types import Controller, VecEnv
from ..policies.core.wrapper import continues, description, feature_names
from ..policies.data.episodes import NO_SUCCESS, Episode
from ..policies.data.lerobot_writer import LeRobotWriter
from ..policies.runs.interrupt import interruptible
from ..policies.runs.manifest import burnish_version
from ..policies.runs.run import episodes_bar
from .build import ENVS, make_env, named, observed_by, world_from
from .collect import stream
from .experts import make_expert
from .experts.hosted import Errors
from .external.maniskill import Backend, ManiSkillConfig
from .external.settings import GymConfig
from .two_mode import TwoModeConfig
from .view import ViewConfig, watch

GROUPS: dict[str, dict[str, dict[str, type]]] = {
    "collect": {
        "env": {name: kind.config for name, kind in ENVS.items()},
        "policy": SAVED,
    },
}
GROUPS["view"] = GROUPS["collect"]

PUBLISH_EVERY_S = 5.0  # so much work a kill costs at most, or a twentieth of the time where publishing takes long


@dataclass
class CollectConfig:
    """Settings of `burnish collect`: a world, an expert or a policy, and the number of episodes."""

    env: Any = None  # world; two_mode by default; with a policy, the one that it was trained for
    # level of the expert: clean by default; noisy, clumsy, for arms multi_modal; or module:callable, or an entry point
    expert: str | None = None
    # errors of an expert in worlds of other packages, instead of its level's
    errors: Errors = field(default_factory=Errors)
    policy: Any = None  # trained policy that acts instead of the expert: policy=checkpoint policy.path=...
    episodes: int = 100  # episodes that are recorded
    worlds: int = 50  # worlds that are stepped at once; changes what a network does by no more than rounding
    seed: int = 0  # seed of every random draw
    out: str = "runs/data"  # folder of the dataset
    resume: bool = False  # continue what an interrupted or killed call left at out=, or lengthen it
    sim_state: bool = False  # keep the simulator's own state with every frame, so that any frame can be restored

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.worlds < 1:
            raise BurnishError(f"episodes={self.episodes} and worlds={self.worlds} must be at least 1")
        if self.errors != Errors() and not isinstance(self.env, GymConfig | ManiSkillConfig):
            raise BurnishError(
                "errors.* are for experts in worlds of other packages; choose a level here, expert=clumsy"
            )
        if self.expert is not None and self.policy is not None:
            raise BurnishError(f"expert={self.expert} and policy=checkpoint cannot both act; give one of them")


class Scene(NamedTuple):
    """The actor and its world."""

    raw: VecEnv
    env: VecEnv  # as the controller sees it
    controller: Controller
    origin: dict[str, Any]  # what the dataset remembers
    limits: ActionSpec | None = None  # of a policy, whose actions may span less than the world's


def collect(config: CollectConfig) -> int:
    """Episodes of an expert or a policy, written as a LeRobot data set; exit status."""
    if Path(config.out).exists() and not config.resume:
        raise BurnishError(f"{config.out} exists already; use another out=, or continue it with resume=true")
    require_writable(Path(config.out).parent)
    scene = _scene(config)
    seeds = [derive(config.seed, "collect", i) for i in range(config.episodes)]
    with LeRobotWriter(
        config.out,
        scene.raw.spec,
        scene.origin,
        names=feature_names(scene.raw),
        publish_every_s=PUBLISH_EVERY_S,
        resume=config.resume,
    ) as writer:
        begun = len(writer.seeds)
        if begun > len(seeds):
            raise BurnishError(
                f"{config.out} has {begun} episodes already, more than episodes={config.episodes}; ask for at least as "
                "many, or use another out="
            )
        if writer.seeds != seeds[:begun]:
            raise BurnishError(
                f"{config.out} holds episodes of other seeds, so it cannot be continued; use another out="
            )
        if begun == len(seeds):
            sys.stdout.write(f"{config.out} has its {begun} episodes already; nothing is recorded\n")
            return 0
        _record(scene, writer, seeds, config.sim_state)
    kept = writer.totals()
    reported = kept["successes"] > 0 or _reported(scene)
    success = f"{kept['successes']} successful" if reported else "success unknown"
    size = f"{kept['episodes']} episodes, {kept['frames']} frames, {success}"
    sys.stdout.write(f"{config.out}: {scene.origin['env']['name']}, {size}\n")
    if not reported:
        sys.stdout.write("note: no step reported a success; env.success=KEY names the key of its info that does\n")
    if kept["episodes"] < len(seeds):
        sys.stdout.write(f"stopped after {kept['episodes']} of {len(seeds)} episodes; continue with resume=true\n")
        return 130
    return 0


def view(config: ViewConfig) -> int:
    """A window or films of a policy or an expert at work in a world; exit status."""
    played = {"env": config.env, "expert": config.expert, "policy": config.policy, "episodes": config.episodes}
    acting = CollectConfig(**played, worlds=1, seed=config.seed)
    scene = _scene(acting)
    return watch(scene.raw, scene.env, scene.controller, config, scene.limits)


def _record(scene: Scene, writer: LeRobotWriter, seeds: list[int], sim_state: bool) -> None:
    """The missing episodes, handed to the writer one by one; Ctrl-C ends it after a tick."""
    begun, won = len(writer.seeds), bool(writer.totals()["successes"])
    state = _state_of(scene) if sim_state else None
    with interruptible() as stop, episodes_bar(len(seeds), begun) as progress:
        try:
            given = {"progress": progress, "state": state, "limits": scene.limits}
            for ready in stream(scene.env, scene.controller, seeds[begun:], **given):
                won = won or any(episode.success for episode in ready)
                writer.notes = [] if won or _reported(scene) else [NO_SUCCESS]
                for episode in ready:
                    writer.add(episode if scene.env is scene.raw else _as_the_world_gave(episode, scene))
                writer.publish_if_due()
                if stop.requested:
                    break
        except BurnishError as error:
            if len(writer.seeds) == begun:
                raise
            writer.publish()
            kept = f"{writer.path} keeps the {len(writer.seeds)} episodes before that; go on with resume=true"
            raise BurnishError(f"{error}; {kept}") from error
    if not writer.seeds:
        raise KeyboardInterrupt  # before the first episode ended there is nothing to keep


def _scene(config: CollectConfig) -> Scene:
    worlds, limits = min(config.worlds, config.episodes), None
    if config.policy is None:
        world, made_by = config.env or TwoModeConfig(), {"expert": config.expert or "clean"}
        beside = isinstance(world, ManiSkillConfig) and world.backend is Backend.auto  # where its expert can stand
        raw = env = make_env(replace(world, backend=Backend.cpu) if beside else world, worlds)
        if line := description(raw):
            sys.stdout.write(f"{line}\n")
        errors = None if config.errors == Errors() else config.errors
        controller: Controller = make_expert(world, worlds, made_by["expert"], seed=config.seed, env=raw, errors=errors)
        made_by |= {} if errors is None else {"errors": to_data(errors)}
    else:
        chosen = config.policy
        policy, trained = loaded(chosen)
        if not (config.env or trained.get("env")):
            raise BurnishError("this policy does not say which world it was trained for; give env=...")
        world = config.env or world_from(trained["env"])
        made_by = {"policy": to_data(chosen) | {"sha256": _weights(policy)}}
        raw = make_env(world, worlds)
        env, controller, limits = observed_by(policy.spec, raw), controller_for(policy, worlds), policy.spec.action
    generator = {"burnish": burnish_version(), "task": getattr(raw, "version", None)}
    settings = {"seed": config.seed, **made_by, "sim_state": config.sim_state, "generator": generator}
    return Scene(raw, env, controller, {"env": named(world), **settings}, limits)


def _reported(scene: Scene) -> bool:
    """Whether its world has said of any step if it is a success."""
    return getattr(scene.raw, "reported", True)


def _state_of(scene: Scene) -> Any:
    state_dict = getattr(scene.raw, "state_dict", None)
    if state_dict is None or not continues(scene.raw):
        name = scene.origin["env"]["name"]
        raise BurnishError(f"the world {name} cannot save its state, so it cannot be recorded; leave sim_state=false")
    return state_dict


def _weights(policy: torch.nn.Module) -> str:
    """Which policy it was: a path may hold another one later."""
    digest = hashlib.sha256()
    for name, x in sorted(policy.state_dict().items()):
        digest.update(name.encode() + x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _as_the_world_gave(episode: Episode, scene: Scene) -> Episode:
    """Episodes on disk hold single frames and text; both are made into what a policy sees when windows are cut."""
    stacked, given = scene.env.spec.obs.shapes, scene.raw.spec.obs.shapes
    obs = {key: x if stacked[key] == given[key] else x[:, -1] for key, x in episode.obs.items() if key in given}
    return replace(episode, obs=obs)


if __name__ == "__main__":
    sys.exit(main())
