"""Compatibility of a robot with a policy, as far as its spec shows: is it the arm that the policy was trained for?

A policy of this project says where the joints of one body go, in that body's order. Other joints would follow it as
well: an arm of another maker, swung to angles that mean another pose there. So number, order and names of the joints
must be the body's, and where the names alone differ, a person says which joint is which. That zeros and directions are
the same no spec tells: they are what a calibration is for, and the person who calibrates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .adapter import RobotSpec, Vector
from .errors import Refused
from .safety.guard import Limits
from .safety.settings import Safety

SAME = 0.01  # of a limit; less is no other limit
SAME_RAD = 0.05  # so much two calibrations of one arm differ at the ends of its ranges


def require_same_joints(spec: RobotSpec, body: Sequence[str], called: Mapping[str, str]) -> None:
    """``called`` is what a person has said (``robot.joints``): the robot's name of a joint -> the body's. It renames,
    and reorders nothing: the order of set-points is the driver's affair."""
    own = [joint.name for joint in spec.joints]
    theirs, here = ", ".join(body), ", ".join(own)
    if len(own) != len(body):
        own_channel = "; its gripper is a channel of its own, and would have to be one of the joints"
        raise Refused(
            f"{spec.name} has {len(own)} joint(s) ({here}), and the arm that is to be moved {len(body)} ({theirs}), so "
            f"it is another arm{own_channel if spec.gripper is not None and len(own) < len(body) else ''}"
        )
    for name, meant in called.items():
        if name not in own or meant not in body:
            raise Refused(f"robot.joints says that {name!r} is {meant!r}; choices: {here} for the one, {theirs} for it")
    meant = [called.get(name, name) for name in own]
    if meant == list(body):
        return
    if sorted(meant) == sorted(body):
        raise Refused(
            f"the joints of {spec.name} come in the order {', '.join(meant)}, and those of the arm that is to be moved "
            f"in the order {theirs}; list them so where its driver is told of them (the calibration of servos)"
        )
    strange = [name for name, known in zip(own, meant, strict=True) if known not in body or meant.count(known) > 1]
    raise Refused(
        f"{spec.name} has the joints {here}, and the arm that is to be moved {theirs}; if it is the same arm, with "
        f"the same zeros and directions, say which joint each of {', '.join(strange)} is: "
        f"robot.joints={{{strange[0]}: ...}}"
    )


def require_start(spec: RobotSpec, start: Vector, seed: int) -> None:
    """An episode begins where the robot may go."""
    lower, upper = spec.column("lower"), spec.column("upper")
    beyond = np.maximum(lower - start, start - upper)
    if (beyond > SAME_RAD).any():
        i = int(beyond.argmax())
        raise Refused(
            f"the episode of seed {seed} begins with {spec.joints[i].name} at {start[i]:.2f} rad, and {spec.name} may "
            f"go from {lower[i]:.2f} to {upper[i]:.2f}; calibrate its whole range, or mount it as the model is"
        )


def narrower(spec: RobotSpec, ranges: np.ndarray) -> str:
    """One sentence, or nothing: where this robot may not go, and the (n, 2) ``ranges`` of the body's set-points do."""
    lower, upper = spec.column("lower"), spec.column("upper")
    lost = _lost(spec, *ranges.T)
    if not (lost > SAME_RAD).any():
        return ""
    i = int(lost.argmax())
    return (
        f"note: {spec.name} may go less far than its model ({_whose(spec, lost > SAME_RAD, i)} from {lower[i]:.2f} to "
        f"{upper[i]:.2f} rad instead of {ranges[i, 0]:.2f} to {ranges[i, 1]:.2f}); set-points beyond are cut off there"
    )


def stricter(where: str, trained: Limits, spec: RobotSpec, safety: Safety) -> str:
    """The joints for which this robot has narrower limits than the guard of the worlds in which the policy at ``where``
    was trained: one sentence, or nothing. Rounding by a device is no limit here, though it takes a step per period off
    the speed: a policy that was trained with the numbers of `docs/robots.md` gets no warning of them."""
    speed, acceleration = (safety.share * spec.column(name) for name in ("velocity", "acceleration"))
    found = []
    for what, unit, here, there in (
        ("speed", "rad/s", speed, trained.velocity),
        ("acceleration", "rad/s^2", acceleration, trained.acceleration),
    ):
        less = 1 - here / there
        if (less > SAME).any():
            i = int(less.argmax())
            whose = _whose(spec, less > SAME, i)
            found.append(f"{what} of {whose} {here[i]:g} instead of {there[i]:g} {unit}, {less[i]:.0%} less")
    again = f"; refine with env.guard.velocity={speed.min():g} env.guard.acceleration={acceleration.min():g}"
    advice = again if found else ""
    lost = _lost(spec, trained.lower, trained.upper)
    if (lost > SAME_RAD).any():
        i = int(lost.argmax())
        found.append(f"position of {_whose(spec, lost > SAME_RAD, i)} in a range that is {lost[i]:.2f} rad smaller")
    if safety.jerk:
        found.append(f"jerk of every joint {safety.jerk:g} rad/s^3, where there was no limit")
    if not found:
        return ""
    return (
        f"note: this robot is stricter than the guard with which {where} was trained ({', '.join(found)}), so it may "
        f"succeed less often than in training{advice}"
    )


def _lost(spec: RobotSpec, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    return np.maximum(spec.column("lower") - lower, 0) + np.maximum(upper - spec.column("upper"), 0)


def _whose(spec: RobotSpec, which: np.ndarray, worst: int) -> str:
    others = int(which.sum()) - 1
    return spec.joints[worst].name + (f" and {others} more" if others else "")
