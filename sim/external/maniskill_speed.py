"""The same numbers in less time: what ManiSkill 3.0.1 computes for one world on a CPU, with fewer calls of torch.

Half of a step and more is Python and torch around tensors of seven numbers. Four places are replaced, in the classes
of ManiSkill and for the whole process. Each gives the numbers of the original bit for bit (tests/test_maniskill.py
plays episodes both ways), and hands on to it whatever is not one world on a CPU.

* ``Pose.create`` of one pose of the simulator: one tensor, not two that are joined.
* ``ee_pose_at_base``, where an arm is in its own frame: once per command instead of twice, and the inverse of the frame
  only where the frame has moved.
* ``is_grasping`` of a Panda: no angles are computed where a finger touches nothing.
* ``set_joint_drive_targets``: NumPy's numbers for the joints instead of a tensor for each.

Another version of ManiSkill is left as it is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

VERSION = "3.0.1"
_originals: list[tuple[type, str, Any]] = []


def speed_up() -> bool:
    """Whether ManiSkill is quicker now; it is once it was sped up, until ``undo``."""
    if not _originals and importlib.metadata.version("mani_skill") == VERSION:
        pose = importlib.import_module("mani_skill.utils.structs.pose").Pose
        arm = importlib.import_module("mani_skill.agents.controllers.pd_ee_pose").PDEEPosController
        panda = importlib.import_module("mani_skill.agents.robots.panda.panda").Panda
        articulation = importlib.import_module("mani_skill.utils.structs.articulation").Articulation
        _replace(pose, "create", classmethod(_create(pose)))
        _replace(arm, "ee_pose_at_base", property(_arm_in_its_frame(arm)))
        _replace(arm, "set_action", _command(arm))
        _replace(panda, "is_grasping", _is_grasping(panda))
        _replace(articulation, "set_joint_drive_targets", _set_targets(articulation))
    return bool(_originals)


def undo() -> None:
    """The original functions of ManiSkill, put back in the place of the fast ones."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


def _replace(owner: type, name: str, new: Any) -> None:
    _originals.append((owner, name, vars(owner)[name]))
    setattr(owner, name, new)


def _create(owner: Any) -> Callable[..., Any]:
    original = vars(owner)["create"].__func__
    simulator = importlib.import_module("sapien").Pose

    def create(cls: Any, pose: Any, device: torch.device | None = None) -> Any:
        if type(pose) is not list or len(pose) != 1 or type(pose[0]) is not simulator or not _on_cpu(device):
            return original(cls, pose, device)
        one = pose[0]
        return cls(raw_pose=torch.from_numpy(np.concatenate((one.p, one.q))[None]))

    return create


def _on_cpu(device: Any) -> bool:
    return isinstance(device, torch.device) and device.type == "cpu"


def _arm_in_its_frame(owner: Any) -> Callable[[Any], Any]:
    original = owner.ee_pose_at_base.fget

    def ee_pose_at_base(self: Any) -> Any:
        if not _on_cpu(self.device):
            return original(self)
        known = getattr(self, "_known_pose", None)  # during a command, in which nothing moves
        if known is not None:
            return known
        frame = self.root_link.pose
        before, inverse = getattr(self, "_known_frame", (None, None))
        if before is None or not torch.equal(before, frame.raw_pose):
            inverse = frame.inv()
            self._known_frame = frame.raw_pose.clone(), inverse
        return inverse * self.ee_pose

    return ee_pose_at_base


def _command(owner: Any) -> Callable[[Any, Any], None]:
    original = vars(owner)["set_action"]

    def set_action(self: Any, action: Any) -> None:
        self._known_pose = self.ee_pose_at_base if _on_cpu(self.device) else None
        try:
            original(self, action)
        finally:
            self._known_pose = None

    return set_action


def _is_grasping(owner: Any) -> Callable[..., Tensor]:
    original = vars(owner)["is_grasping"]

    def is_grasping(self: Any, object: Any, min_force: float = 0.5, max_angle: float = 85) -> Tensor:
        if _on_cpu(self.device):
            for finger in (self.finger1_link, self.finger2_link):
                force = self.scene.get_pairwise_contact_forces(finger, object)
                if not bool(torch.linalg.norm(force, dim=1) >= min_force):
                    return torch.zeros(1, dtype=torch.bool)
        return original(self, object, min_force, max_angle)

    return is_grasping


def _set_targets(owner: Any) -> Callable[..., None]:
    original = vars(owner)["set_joint_drive_targets"]

    def set_joint_drive_targets(self: Any, targets: Any, joints: Any = None, joint_indices: Any = None) -> None:
        if joints is None or not isinstance(targets, Tensor) or not _on_cpu(self.device):
            return original(self, targets, joints, joint_indices)
        numbers = targets[0].float().numpy()
        for i, joint in enumerate(joints):
            joint._objs[0].drive_target = numbers[i : i + 1]

    return set_joint_drive_targets
