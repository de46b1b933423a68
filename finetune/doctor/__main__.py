"""Entry point: ``burnish doctor policy.path=...``: a policy as sentences, and a table of the refinements that fit it.
With ``env=...`` alone it examines that world (`sim/external/doctor.py`)."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...policies.acting import acting_policy
from ...policies.build import ACTING, where_of
from ...policies.cli.cli import main
from ...policies.cli.machine import prepare_machine
from ...policies.core import files
from ...policies.core.config import to_data
from ...policies.core.errors import plain_text
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import generator
from ...policies.core.spec import EnvSpec, PolicySpec, dtype_of
from ...policies.core.tree import index
from ...policies.core.types import Obs
from ...policies.data.info import world_name
from ...sim.build import WORLDS, origin_of, raw_world, seen_by
from ...sim.external.doctor import DoctorConfig as WorldConfig
from ...sim.external.doctor import doctor as examine_world
from ...sim.external.doctor import limits, said
from ..fit import Fit, compatibility
from ..probe import Steerability, probe

GROUPS: dict[str, dict[str, Mapping[str, type]]] = {"doctor": {"policy": ACTING, "env": WORLDS}}
ASKED = 30  # decisions that are timed, after as many as a tenth of them that are not


@dataclass
class DoctorConfig:
    """Settings of `burnish doctor`: a policy, or a world, to examine, and for how long."""

    policy: Any = None  # policy to examine: policy.path=FOLDER, or another kind
    # the world to examine; of a policy, the one that it is probed in, by default that which it was trained for
    env: Any = None
    worlds: int = 8  # worlds whose joint speed is measured, or whose first observations the policy is probed on
    seconds: float = 10.0  # seconds of steps in each look at a world; longer episodes are compared as far as that goes
    out: str | None = None  # folder for doctor.json, of a policy
    device: str = "cpu"  # device of the policy: cpu, cuda, cuda:1
    threads: int = 0  # CPU threads of torch; 0: as torch chooses

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "worlds", "(0, inf)": "seconds"})


def doctor(config: DoctorConfig) -> int:
    """The examination of a policy or of a world, printed; exit status."""
    if config.policy is None:
        return examine_world(WorldConfig(config.env, config.worlds, config.seconds))
    if config.out is not None:
        files.require_writable(Path(config.out))
    device = prepare_machine(config.device, config.threads)
    base, origin = acting_policy(config.policy, device, config.env)
    world = origin_of(config.env) or origin.get("env")
    surroundings = None
    if world is None:
        samples = random_observations(base.spec, config.worlds, device)
        where = "random observations, because nothing says which world it is for (env=...)"
    else:
        raw = raw_world(world, config.worlds, device)
        surroundings, samples = raw.spec, seen_by(base.spec, raw).reset()
        where = f"the first observations of {config.worlds} episodes of {world_name(world)}"
    found = probe(base, samples) if base.spec.noise_shape is not None else None
    milliseconds, fits = decision_ms(base, samples), compatibility(base, samples)
    for line in described(where_of(config.policy), base, milliseconds, surroundings):
        said(line)
    said(steering(found, where))
    sys.stdout.write("\n" + plain_text(as_table(fits)) + "\n")
    if config.out is not None:
        facts = {
            "policy": type(base).__name__,
            "spec": to_data(base.spec.to_dict()),
            "world": to_data(surroundings),
            "decision_ms": milliseconds,
            "probed_on": where,
            "steerable": found is not None and found.steerable,
            "hidden": None if found is None else found.hidden,
            "methods": [fit._asdict() for fit in fits],
        }
        files.replace(files.named(config.out) / "doctor.json", json.dumps(facts, indent=1) + "\n")
    return 0


def described(path: str, base: Any, milliseconds: float, world: EnvSpec | None = None) -> Iterator[str]:
    """Sentences on what a policy sees and does, in a ``world`` if one is known, and what that costs."""
    spec: PolicySpec = base.spec
    shapes = spec.obs.shapes
    cameras = [f"{key} ({' x '.join(map(str, shape))})" for key, shape in shapes.items() if "image." in key]
    others = [f"{key} ({' x '.join(map(str, shape))})" for key, shape in shapes.items() if "image." not in key]
    frames = f", each with the {spec.history - 1} before it" if spec.history > 1 else ""
    yield f"{path} is a {type(base).__name__}. It sees {', '.join(others + cameras)}{frames}; {len(cameras)} cameras."
    hz = spec.control_hz or (world and world.control_hz)
    rate = "a rate that it does not say" if hz is None else f"{hz:g} ticks a second"
    rate += ", those of the world" if hz != spec.control_hz else ""
    yield (
        f"It acts in {spec.action.dim} dimensions, {limits(spec.action)}, in the units of the actuators "
        f"({spec.action_mode or 'nothing says which'}), at {rate}."
    )
    if world is not None and limits(world.action) != limits(spec.action):
        yield (
            f"The world takes actions {limits(world.action)}: it clips those outside, and the policy asks for none "
            "outside its own limits."
        )
    first = f", from number {spec.start + 1} on" if spec.start else ""
    yield f"A decision is a chunk of {spec.horizon} actions, of which {spec.execute} are executed{first}."
    room = ""
    if hz is not None:
        share = milliseconds * hz / spec.execute / 1000
        room = f", {share:.0%} of the time in which its actions are played"
    yield f"A decision for one world takes {milliseconds:.2f} ms here{room}."


def steering(found: Steerability | None, where: str) -> str:
    """A sentence on whether its noise steers it."""
    if found is None:
        return "It takes no noise, so there is nothing to steer."
    can = "It can be steered by its noise" if found.steerable else "It cannot be steered by its noise"
    if found.steerable and found.faint:
        can = "Its noise steers it faintly, and corrections reach further"
    return f"{can}: {found.sentence()}. It was probed on {where}."


@torch.no_grad()
def decision_ms(base: Any, samples: Obs) -> float:
    """The median time of a decision for one world."""
    one, times = index(samples, slice(0, 1)), []
    for _ in range(ASKED + ASKED // 10):
        began = time.perf_counter()
        base.act(one).cpu()  # which waits for a GPU
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[ASKED // 10 :])


def random_observations(spec: PolicySpec, rows: int, device: torch.device) -> Obs:
    """Numbers from N(0, 1), and pictures of noise."""
    source, found = generator(0, "doctor", device=device), {}
    for key, shape in spec.inputs.shapes.items():
        size, kind = (rows, *shape), dtype_of(key)
        drawn = torch.randn(size, generator=source, device=device)
        found[key] = drawn if kind.is_floating_point else (drawn.abs() * 64).clamp(max=255).to(kind)
    return found


def as_table(fits: list[Fit]) -> str:
    """A line for each method: those that fit first."""
    width = max(len(fit.method) for fit in fits)
    lines = [f"{fit.method:<{width}}  {'fits' if fit.fits else 'does not:'}  {fit.reason}" for fit in fits]
    return "\n".join(line for ok in (True, False) for line, fit in zip(lines, fits, strict=True) if fit.fits is ok)


if __name__ == "__main__":
    sys.exit(main())
