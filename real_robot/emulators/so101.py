"""The six servos of an SO-101 arm with a MuJoCo model behind them, for the driver of the real one.

with PtyProcess(partial(so101, mjcf, start)) as bus:
    robot = make({"port": bus.path, "calibration": ..., ...})     # drivers.feetech
"""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np

from ..drivers.calibration import QUANTUM_RAD, TICKS, Calibration, JointCalibration
from .faults import NONE, Faults
from .feetech import FeetechChain
from .plant import MujocoPlant

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


def so101(
    mjcf: str, start: Sequence[float] = (), *, loss: float = 0.0, corruption: float = 0.0, seed: int = 0
) -> FeetechChain:
    """The chain; ``loss`` and ``corruption`` are shares of the packets, in either direction."""
    faults = Faults(drop=loss, corrupt=corruption) if loss or corruption else NONE
    ids, plant = range(1, len(JOINTS) + 1), MujocoPlant(mjcf, JOINTS, start)
    return FeetechChain(ids, plant, requests=faults, replies=faults, seed=seed)


def calibration(mjcf: str) -> Calibration:
    """Of joints with the model's limits, whose zero is in mid-range of the servo."""
    model, middle = mujoco.MjModel.from_xml_string(mjcf), TICKS // 2
    limits = [model.joint(name).range / QUANTUM_RAD for name in JOINTS]
    return Calibration(
        tuple(
            JointCalibration(name, i + 1, middle + int(np.ceil(low)), middle + int(np.floor(high)))
            for i, (name, (low, high)) in enumerate(zip(JOINTS, limits, strict=True))
        )
    )
