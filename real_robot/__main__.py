"""Entry points: ``burnish serve | export | deploy | record``."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import MISSING

from ..policies.acting import acting_policy
from ..policies.build import SAVED, saved_policy, weights_of, where_of
from ..policies.cli.cli import main
from ..policies.cli.machine import prepare_machine, say
from ..policies.controllers import controller_for
from ..policies.core.config import from_data, to_data
from ..policies.core.errors import BurnishError
from ..policies.core.files import fresh, require_writable
from ..policies.core.scale import ScaledEnv
from ..policies.core.seed import derive
from ..policies.core.types import VecEnv
from ..policies.evaluator import in_words
from ..policies.external.remote import API_KEY
from ..policies.lerobot.export import export as export_to_lerobot
from ..policies.measure.evaluate import evaluate, evaluation_seeds
from ..policies.runs.interrupt import interruptible
from ..policies.runs.manifest import burnish_version
from ..sim.build import ENVS, make_env, origin_of, seen_by, world_from
from ..sim.experts import make_expert
from ..sim.guard import GuardConfig
from ..sim.mirror import EmptyDesk, Mirror
from .camera_observations import require_shown, with_camera_observations
from .compatibility import narrower, stricter
from .deployment import (
    NOT_SAFETY_RATED,
    PERSONS,
    AllowedChunks,
    DeployConfig,
    RecordConfig,
    RobotVerb,
    ahead,
    at_rest,
    conclude,
    first_step,
    in_sentences,
    name_of,
    require_quick,
    write_json,
)
from .env import RobotEnv, with_instruction
from .errors import RobotError
from .export.exporter import ExportConfig, To, source
from .export.exporter import export as run_export
from .export.parity import largest
from .gripper_channel import with_gripper_channel
from .inference.action_sources import (
    ActionSource,
    BundleConfig,
    ServedConfig,
    StillWorld,
    exported,
    inference_ms,
    require_fit,
    served,
)
from .inference.chunk_settings import Mode
from .inference.predictors import loaded
from .inference.realtime_chunking import RealtimeChunking
from .joints import Joints, JointsConfig
from .recorder import Demonstrator, HoldPosition, play, recording
from .robots import ROBOTS, Hardware, connection, inspected, spec_of, stage_for, with_model
from .serving.listening import ServerConfig
from .shadow import Log, ShadowEnv, page, summary, watch
from .supervisor import Gamepad, Keyboard

CHECKPOINT = SAVED
ACTING: dict[str, type] = {**CHECKPOINT, "bundle": BundleConfig, "remote": ServedConfig}
WORLDS: dict[str, type] = {**{name: kind.config for name, kind in ENVS.items()}, "joints": JointsConfig}
ON_A_ROBOT = {"policy": ACTING, "robot": ROBOTS, "env": WORLDS}
CHUNKS: dict[str, type] = {mode.value: AllowedChunks for mode in Mode}
# Hydra groups of each verb below: verb -> group -> choice -> dataclass.
GROUPS: dict[str, dict[str, dict[str, type]]] = {
    "serve": {"policy": CHECKPOINT},
    "export": {"policy": CHECKPOINT},
    "deploy": {**ON_A_ROBOT, "chunks": CHUNKS},
    "record": ON_A_ROBOT,
}
MOST = 32  # worlds at once, where a policy is compared with itself in simulation


@dataclass
class ServeConfig(ServerConfig):
    """Settings of `burnish serve`: a policy, an address, and limits of requests."""

    policy: Any = MISSING  # policy to serve: policy=checkpoint policy.path=FOLDER, or another kind
    device: str = "cpu"  # device of the networks: cpu, cuda, cuda:1
    threads: int = 0  # CPU threads of torch; 0: as torch chooses


@dataclass
class ExportVerb(ExportConfig):
    """Settings of `burnish export`: a policy, and the folder that is written."""

    policy: Any = MISSING  # policy to export: policy=checkpoint policy.path=FOLDER
    out: str = MISSING  # folder that is written, which must not exist yet


def serve(config: ServeConfig) -> int:
    """A policy server, run until it is interrupted; exit status."""
    device = prepare_machine(config.device, config.threads)
    try:
        from .serving.server import PolicyServer
    except ImportError as error:
        raise BurnishError("serving needs websockets and msgpack; pip install 'burnish[serve]'") from error
    policy, _ = acting_policy(config.policy, device, None)
    server = PolicyServer(policy, config, key=os.environ.get(API_KEY), device=device)
    reach = "to this machine alone" if config.local else "to clients that have the key"
    say(f"{config.policy.path} answers at {server.url}, {reach}; Ctrl-C ends it")
    if not config.local:
        say("note: what is said there can be read on the way; tunnel it (ssh -L), or put TLS in front (wss://)")
    # Loaded modules stay: a collection that walks all of torch holds every answer up for some 100 ms.
    gc.collect()
    gc.freeze()
    server.run()
    say("no longer served")
    return 0


def export(config: ExportVerb) -> int:
    """A policy as a bundle, or as one of LeRobot's, compared with the original; exit status."""
    policy, origin = acting_policy(config.policy, torch.device("cpu"), None)
    if config.to is To.lerobot:
        say(f"{config.out}: {export_to_lerobot(policy, origin, config.out)}")
        return 0
    path = config.policy.path
    made = run_export(config, policy, source(saved_policy(path), weights_of(path)))
    say(f"{config.out}: answers as {path} does, within {largest(made.bundle.parity):.1e}; it runs without torch")
    return 0


def deploy(config: DeployConfig) -> int:
    """One robot, a policy, so many episodes; and the same episodes in simulation beside them."""
    device = prepare_machine("cpu", config.threads)
    if config.out is not None:
        require_writable(Path(config.out))
    with in_sentences(), _acting(config, device) as acting, _body(config, acting) as (body, world):
        seeds = evaluation_seeds(config.episodes, base=config.seed)
        note = _inspected(config, acting, body, seeds, moves=not (config.dry_run or config.shadow))
        say(NOT_SAFETY_RATED)
        if note:
            say(note)
        # With chunks it is timed where it will happen (`_ahead`).
        inference = _inference_time(acting, body, seeds[0]) if config.chunks is None else {}
        if config.dry_run:
            return _dry_run(config, acting, body, seeds[0])
        if config.shadow:
            return _shadow(config, acting, body, seeds, inference)
        return _deployed(config, acting, body, world, seeds, inference)


def _deployed(
    config: DeployConfig,
    acting: ActionSource,
    body: Any,
    world: Mapping[str, Any] | None,
    seeds: list[int],
    inference: Mapping[str, float],
) -> int:
    with ExitStack() as stack:
        supervisor = stack.enter_context(closing(_person(config, body))) if config.supervisor else None
        stage = stage_for(config.robot, body, config.safety, config.realtime, supervisor)
        env = RobotEnv(body, stage, supervisor=supervisor)
        chunking = None
        if config.chunks is None:
            require_quick(config.realtime, body, inference)
            view, controller = acting.view, acting.make(1)
        else:
            view, chunking = partial(seen_by, acting.spec), _ahead(config, acting, env, body, seeds[0])
            controller = stack.enter_context(closing(chunking))
        played: VecEnv = stack.enter_context(at_rest(env))
        if config.record is not None:
            robot = name_of(config.robot)
            about = {"env": world, **_itself(config), "robot": robot, "policy": acting.where, "seed": config.seed}
            played, _ = stack.enter_context(recording(env, config.record, about, robot, seeds))
        result = evaluate(view(played), controller, seeds)
    say(f"on the robot: {in_words(result)}")
    found: dict[str, Any] = {"robot": result.summary(), "reports": env.reports}
    if chunking is None:
        found["inference_ms"] = inference
    else:
        found["chunks"] = chunking.report.summary()
    if config.compare and world is not None:
        simulated = acting.view(make_env(world_from(world), min(config.episodes, acting.most)))
        beside = evaluate(simulated, acting.make(simulated.num_envs), seeds)
        say(f"in simulation, the same episodes: {in_words(beside)}")
        found["simulation"] = beside.summary()
    status = conclude(env.reports)
    if config.record is not None:
        say(f"recorded: {config.record}")
    write_json(config.out, "deploy.json", {**found, "seeds": seeds, "world": world})
    return status


def _ahead(config: DeployConfig, acting: ActionSource, env: RobotEnv, body: Any, seed: int) -> RealtimeChunking:
    """Measures inference before the first motion, and refuses a policy that cannot do what ``chunks`` asks for."""
    found = ahead(acting, config.chunks, env, None if config.realtime else config.latency)
    body.begin(seed)
    try:
        took = found.warm_up(seen_by(acting.spec, StillWorld(body)).reset(None, [seed]))
    except RobotError:
        found.close()
        raise
    times = f"{took['p50']:.1f} ms, {took['p99']:.1f} ms at worst, so {took['delay']:.0f} ticks"
    say(f"inference beside the robot takes {times}")
    return found


def _shadow(
    config: DeployConfig, acting: ActionSource, body: Any, seeds: list[int], inference: Mapping[str, float]
) -> int:
    connect, anew = connection(config.robot, body, config.realtime)
    safety = with_model(config.safety, spec_of(config.robot, body, config.realtime), body)
    if not anew:
        body.begin(seeds[0])
        say(f"what the policy believes: {body.layout()}; Ctrl-C ends it")
    lines = nullcontext() if config.out is None else fresh(Path(config.out) / "shadow.jsonl")
    with lines as file, interruptible() as stop:
        env = ShadowEnv(body, connect, anew, safety, Log(file))
        watch(env, acting.view(env), acting.make(1), seeds, lambda: stop.requested)
    found = summary(env.log)
    for line in page(found, config.safety):
        say(line)
    write_json(config.out, "shadow.json", {**found, "inference_ms": inference, "seeds": seeds})
    return 0


def record(config: RecordConfig) -> int:
    """Episodes of a person or of an expert, with a policy or without, as a dataset."""
    device, out = prepare_machine("cpu", config.threads), Path(config.out)
    require_writable(out.parent)
    seeds = [derive(config.seed, "record", i) for i in range(config.episodes)]
    with in_sentences(), _acting(config, device) as acting, interruptible() as stop, ExitStack() as seeing:
        body, world = seeing.enter_context(_body(config, acting))
        supervisor, begin = _supervisor(config, body, world)
        about = {
            "env": world,
            **_itself(config),
            "robot": name_of(config.robot),
            "supervisor": config.supervisor if config.supervisor in PERSONS else f"{config.level} {config.supervisor}",
            "after": config.after,
            "policy": None if acting is None else acting.where,
            "seed": config.seed,
            "generator": {"burnish": burnish_version()},
        }
        with ExitStack() as stack:
            stack.enter_context(closing(supervisor))
            note = _inspected(config, acting, body, seeds)
            stage = stage_for(config.robot, body, config.safety, config.realtime, supervisor)
            env = stack.enter_context(at_rest(RobotEnv(body, stage, supervisor=supervisor)))
            robot, stopped = name_of(config.robot), lambda: stop.requested
            tape = recording(env, config.out, about, robot, seeds, resume=config.resume, stopped=stopped)
            taped, writer = stack.enter_context(tape)
            if (begun := len(writer.seeds)) == len(seeds):
                say(f"{out} has its {begun} episodes already; nothing is recorded")
                return 0
            say(NOT_SAFETY_RATED)
            if note:
                say(note)
            seen, controller = ScaledEnv(taped), HoldPosition(body)
            if acting is not None:
                require_quick(config.realtime, body, _inference_time(acting, body, seeds[0]))
                seen, controller = acting.view(taped), acting.make(1)
            play(seen, controller, seeds[begun:], begin, stopped)
            totals = writer.totals()
    say(f"{out}: {totals['episodes']} episodes, {totals['frames']} frames, {totals['successes']} successful")
    conclude(env.reports)
    if totals["episodes"] < len(seeds):
        say(f"stopped after {totals['episodes']} of {len(seeds)} episodes; continue with resume=true")
        return 130
    return 0


@contextmanager
def _acting(config: RobotVerb, device: torch.device) -> Iterator[Any]:
    """The policy that ``policy=...`` names, connected as long as it is needed; None where none is named."""
    chosen = config.policy
    if isinstance(chosen, BundleConfig):
        acting = exported(chosen)
    elif isinstance(chosen, ServedConfig):
        acting = served(chosen, os.environ.get(API_KEY))
    elif chosen is not None:
        policy, origin = acting_policy(chosen, device, config.env)
        make, view = partial(controller_for, policy), partial(seen_by, policy.spec)
        predictor = partial(loaded, partial(acting_policy, chosen, device, config.env), threads=config.threads)
        acting = ActionSource(where_of(chosen), policy.spec, make, view, origin.get("env"), MOST, predictor)
    else:
        yield None
        return
    try:
        yield acting
    finally:
        acting.close()


@contextmanager
def _body(config: RobotVerb, acting: ActionSource | None) -> Iterator[tuple[Any, Mapping[str, Any] | None]]:
    """The body that gives the policy's numbers their meaning on this robot, with the cameras that it has; and the
    world that they are of, if there is one."""
    policy, world = None if acting is None else acting.known, None
    modelled = not isinstance(config.robot, Hardware)
    if isinstance(config.env, JointsConfig):
        alone = EmptyDesk()
        itself = spec_of(config.robot, alone, config.realtime)
        body: Any = Joints(config.env, itself, policy, alone if modelled else None)
    else:
        world = origin_of(config.env) or (acting.world if acting is not None else None)
        if world is None:
            who = "without a policy nobody says" if acting is None else f"{acting.where} does not say"
            raise BurnishError(
                f"{who} which world it is for; give env=..., or env=joints if it is none but the robot's own numbers"
            )
        mirror = Mirror(world_from(world), draws=modelled and not config.cameras)
        body = with_gripper_channel(mirror, spec_of(config.robot, mirror, config.realtime))
    with with_camera_observations(body, config.cameras, policy) as seeing:
        if acting is not None and acting.learn is not None:
            learnt = acting.learn(seeing.spec)
            require_shown(config.cameras, learnt)
            say(
                f"{acting.where} says nothing of itself; it answers with {learnt.horizon} actions of "
                f"{learnt.action.dim}, which are taken to be {1 / seeing.spec.control_hz:.3f} s apart"
            )
        if acting is not None:
            for note in require_fit(acting, seeing):
                say(f"note: {note}")
        yield with_instruction(seeing, config.instruction), world


def _itself(config: RobotVerb) -> dict[str, Any]:
    """For a dataset, which would say of no world what its numbers mean."""
    return {"joints": to_data(config.env)} if isinstance(config.env, JointsConfig) else {}


def _inspected(
    config: RobotVerb, acting: ActionSource | None, body: Any, seeds: Sequence[int], moves: bool = True
) -> str:
    """Refuses a robot that is not the body's; of one that is and may do less, a note."""
    spec = inspected(config.robot, body, config.safety, config.realtime, seeds, moves)
    settings = None if acting is None else (acting.world or {}).get("config", {}).get("guard")
    if acting is None or not settings:  # trained behind no guard; every robot has one, and is stricter than none
        return narrower(spec, body.ranges)
    guard = from_data(GuardConfig, settings, "env.guard")
    return stricter(acting.where, guard.limits(body.ranges), spec, config.safety)


def _inference_time(acting: ActionSource, body: Any, seed: int) -> dict[str, float]:
    found = inference_ms(acting, body, seed)
    say(
        f"{acting.where} answers in {found['p50']:.1f} ms, {found['p99']:.1f} ms at worst in a hundred (the first time "
        f"{found['first']:.0f} ms); a control tick is {1e3 / body.spec.control_hz:.0f} ms"
    )
    return found


def _person(config: Any, body: Any) -> Keyboard | Gamepad:
    dim = body.spec.action.dim
    return Keyboard(dim) if config.supervisor == "keyboard" else Gamepad(dim, Path(config.gamepad))


def _supervisor(config: RecordConfig, body: Any, world: Mapping[str, Any] | None) -> tuple[Any, Callable[[int], None]]:
    """The supervisor of the robot, and the call that prepares each episode for them."""
    if config.supervisor == "expert":
        if world is None:
            raise BurnishError("env=joints has no task, so nobody is an expert of it; give supervisor=keyboard")
        acts = make_expert(world_from(world), 1, config.level, config.seed, env=body.world)
        expert = Demonstrator(acts, config.after)
        return expert, expert.begin
    person = _person(config, body)
    if isinstance(config.robot, Hardware):
        return person, lambda seed: None  # the stage asks, because there is something to lay out
    return person, lambda seed: person.ready("The next episode begins where the robot is put")


def _dry_run(config: DeployConfig, acting: ActionSource, body: Any, seed: int) -> int:
    here, target, gripper = first_step(config.robot, acting, body, seed)
    say(f"the joints are at {here.round(3).tolist()} rad")
    say(f"the first set-points would be {target.round(3).tolist()}, {np.abs(target - here).max():.3f} rad away")
    say(f"the gripper would be {gripper[0]:.0%} open; nothing was moved" if gripper else "nothing was moved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
