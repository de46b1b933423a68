"""Where the arm may be: a box for the tool, a floor, and its own body, as a constraint of `fallback`.

The geometry is a MuJoCo model's. ``clearance(q)`` is the least of: distances between bodies that are not neighbours,
heights of what moves above the floor, and distances of the tool from the sides of its box. A path (what is sent next,
and all of the braking after it, to the pose at rest) is allowed if the clearance stays above the margin all along it,
between the set-points too.

**No tunnelling.** When joints turn by dq, no point moves farther than sum_i |dq_i| r_i, with r_i the farthest that
anything behind joint i can be from it; neither does a distance shrink by more. So a pose with clearance c vouches for
all of the path within c - margin of motion, and the next look is taken there: few looks where there is room, many
close to something (conservative advancement; Mirtich, PhD thesis, Berkeley 1996). Every set-point of an allowed path
is at least `RESOLUTION_M` farther away than the margin, which leaves room to begin the next path.

**Departures.** Bodies of a joint and of its parent may touch, as in MuJoCo. Heights above the floor and other planes
take capsules and spheres as they are, other shapes by their bounding boxes. What a gripper holds is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import mujoco
import numpy as np
from numpy.typing import NDArray

from .errors import Refused

Array = NDArray[np.float64]

RESOLUTION_M = 1e-3
FAR_M = 0.3  # clearances beyond this are not told apart
LOOKS = 300  # at one path; who would need more is not moved


@dataclass(frozen=True)
class Workspace:
    margin_m: float = 0.01
    floor_z_m: float | None = 0.0  # nothing that moves comes lower
    tool_lower_m: tuple[float, float, float] | None = None  # of the box for the tool's site
    tool_upper_m: tuple[float, float, float] | None = None
    itself: bool = True  # whether bodies of the arm keep apart, and from bodies that stand still
    may_touch: Sequence[tuple[str, str]] = field(default=())  # pairs of bodies, besides neighbours

    def __post_init__(self) -> None:
        if not 0 <= self.margin_m < FAR_M:
            raise Refused(f"margin_m={self.margin_m:g} must lie in [0, {FAR_M:g})")
        lower, upper = self.tool_lower_m, self.tool_upper_m
        if (lower is None) != (upper is None):
            raise Refused("a box for the tool needs both tool_lower_m and tool_upper_m")
        if lower is not None and upper is not None and not (np.array(lower) < np.array(upper)).all():
            raise Refused(f"a box for the tool needs room, got {lower} to {upper}")


class Collision:
    """A `fallback.Constraint`. Joints are those named, or all hinges and slides of the model in their order."""

    def __init__(self, mjcf: str, tool_site: str, workspace: Workspace, joints: Sequence[str] | None = None) -> None:
        try:
            self._model = model = mujoco.MjModel.from_xml_string(mjcf)
            names = joints or [model.joint(i).name for i in range(model.njnt) if _turns_or_slides(model, i)]
            ids = np.array([model.joint(name).id for name in names])
            self._tool = model.site(tool_site).id
        except (ValueError, KeyError) as error:
            raise Refused(f"the model does not have what it should: {error}") from error
        if not all(_turns_or_slides(model, i) for i in ids):
            raise Refused(f"joints of an arm are hinges and slides, and not all of {list(names)} are")
        self.workspace = workspace
        self._data = mujoco.MjData(model)
        self._columns = model.jnt_qposadr[ids]
        behind = np.array([_behind(model, model.jnt_bodyid[i]) for i in ids])  # (joints, bodies)
        # Half extents of a box with a shell around it: capsules and spheres are a segment and a point with a radius.
        self._half, self._middle = model.geom_aabb[:, 3:].copy(), model.geom_aabb[:, :3].copy()
        self._shell = np.zeros(model.ngeom)
        for i, kind in enumerate(model.geom_type):
            if int(kind) in (int(mujoco.mjtGeom.mjGEOM_SPHERE), int(mujoco.mjtGeom.mjGEOM_CAPSULE)):
                self._shell[i] = model.geom_size[i, 0]
                self._half[i] -= self._shell[i]
        solid = np.array([int(kind) != int(mujoco.mjtGeom.mjGEOM_PLANE) for kind in model.geom_type])
        self._moving = np.flatnonzero(np.any(behind[:, model.geom_bodyid], axis=0) & solid)
        self._planes = np.flatnonzero(~solid) if workspace.itself else []
        self._pairs = self._who_keeps_apart(behind) if workspace.itself else np.zeros((0, 2), int)
        self._round_m = model.geom_rbound[self._pairs].sum(axis=1)
        self.reach_m = np.array([self._reach(i) for i in ids])  # r_i: metres per radian, or 1 for a slide

    def clearance(self, q: Array) -> float:
        """Metres, negative where something is too far already; nothing beyond `FAR_M` is told apart."""
        model, data, workspace = self._model, self._data, self.workspace
        data.qpos[self._columns] = q
        mujoco.mj_kinematics(model, data)
        least = FAR_M
        if workspace.tool_lower_m is not None and workspace.tool_upper_m is not None:
            tool = data.site_xpos[self._tool]
            sides = np.concatenate([tool - workspace.tool_lower_m, np.subtract(workspace.tool_upper_m, tool)])
            least = min(least, float(sides.min()))
        if workspace.floor_z_m is not None:
            least = min(least, self._above(np.array([0.0, 0.0, 1.0]), np.array([0.0, 0.0, workspace.floor_z_m])))
        for plane in self._planes:
            least = min(least, self._above(data.geom_xmat[plane, 2::3], data.geom_xpos[plane]))
        if len(self._pairs):
            centres = data.geom_xpos[self._pairs]
            # A pair whose spheres are farther apart than what was found already need not be looked at.
            bounds = np.linalg.norm(centres[:, 0] - centres[:, 1], axis=1) - self._round_m
            for i in np.argsort(bounds):
                if bounds[i] >= least:
                    break
                one, other = self._pairs[i]
                apart = mujoco.mj_geomDistance(model, data, one, other, FAR_M, None)
                # MuJoCo 3.8 says exactly 0 for a hundredth of all pairs of boxes, however far apart they are.
                least = min(least, apart if apart != 0 else self._separated(one, other))
        return least

    def __call__(self, path: Array) -> bool:
        """Whether all of a path keeps the margin; its first set-point has been sent already."""
        moved = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(path, axis=0)) @ self.reach_m)])
        at, room = 0.0, self.clearance(path[0]) - self.workspace.margin_m
        if room < (0 if moved[-1] > 0 else RESOLUTION_M):
            return False
        for _ in range(LOOKS):
            if at >= moved[-1]:
                return True
            free = room - RESOLUTION_M
            after = int(np.searchsorted(moved, at, side="right"))  # the next set-point
            # Close to something: a small step, in which no set-point is passed unseen.
            at = min(at + free, moved[-1]) if free >= RESOLUTION_M else min(at + RESOLUTION_M, moved[after])
            room = self.clearance(_along(path, moved, at)) - self.workspace.margin_m
            if room < RESOLUTION_M:
                return False
        return False

    def _separated(self, one: int, other: int) -> float:
        """At least so far are the boxes of two shapes apart: the widest gap between them along the directions of their
        faces and of pairs of their edges. Never more than the distance, so it is safe to believe."""
        a, b = (self._data.geom_xmat[g].reshape(3, 3) for g in (one, other))
        across = np.cross(a.T[:, None], b.T[None]).reshape(9, 3)
        size = np.linalg.norm(across, axis=1)
        normals = np.concatenate([a.T, b.T, across[size > 1e-6] / size[size > 1e-6, None]])
        middles = [self._data.geom_xpos[g] + x @ self._middle[g] for g, x in ((one, a), (other, b))]
        gaps = np.abs(normals @ (middles[0] - middles[1]))
        for g, x in ((one, a), (other, b)):
            gaps = gaps - np.abs(normals @ x) @ (self._half[g] + self._shell[g])
        return min(float(gaps.max()), FAR_M)

    def _above(self, normal: Array, point: Array) -> float:
        """How far the lowest of what moves is above a plane."""
        data, moving = self._data, self._moving
        if not len(moving):
            return FAR_M
        along = normal @ data.geom_xmat[moving].reshape(-1, 3, 3)  # of each shape's axes
        low = (data.geom_xpos[moving] - point) @ normal + (along * self._middle[moving]).sum(axis=1)
        low -= (np.abs(along) * self._half[moving]).sum(axis=1) + self._shell[moving]
        return float(low.min())

    def _who_keeps_apart(self, behind: NDArray[np.bool_]) -> NDArray[np.int_]:
        """Pairs of shapes that can move against each other and are not of one body or of neighbours."""
        model = self._model
        named = {frozenset((model.body(a).id, model.body(b).id)) for a, b in self.workspace.may_touch}
        pairs = []
        for one, other in combinations(np.flatnonzero(model.geom_type != int(mujoco.mjtGeom.mjGEOM_PLANE)).tolist(), 2):
            a, b = int(model.geom_bodyid[one]), int(model.geom_bodyid[other])
            still = (behind[:, a] == behind[:, b]).all()
            neighbours = _is_parent(model, a, b) or _is_parent(model, b, a)
            if not still and not neighbours and frozenset((a, b)) not in named:
                pairs.append((one, other))
        return np.array(pairs, int).reshape(-1, 2)

    def _reach(self, joint: int) -> float:
        """The farthest that a shape or the tool behind a joint can be from it: all links between them, stretched."""
        model = self._model
        if int(model.jnt_type[joint]) == int(mujoco.mjtJoint.mjJNT_SLIDE):
            return 1.0
        body = int(model.jnt_bodyid[joint])
        corners = np.linalg.norm(np.abs(self._middle) + self._half + self._shell[:, None], axis=1)
        ends = [
            (int(model.geom_bodyid[g]), float(np.linalg.norm(model.geom_pos[g]) + corners[g]))
            for g in range(model.ngeom)
        ]
        ends.append((int(model.site_bodyid[self._tool]), float(np.linalg.norm(model.site_pos[self._tool]))))
        return max((self._stretched(body, end) + far for end, far in ends if _is_behind(model, body, end)), default=0.0)

    def _stretched(self, body: int, end: int) -> float:
        """From the joints of a body to the origin of another one behind it, at most."""
        model, length = self._model, 0.0
        while True:
            first, count = int(model.body_jntadr[end]), int(model.body_jntnum[end])
            for joint in range(first, first + count):
                slides = int(model.jnt_type[joint]) == int(mujoco.mjtJoint.mjJNT_SLIDE)
                # An origin turns about an anchor beside it, or slides as far as its range allows.
                length += float(
                    np.abs(model.jnt_range[joint]).max() if slides else 2 * np.linalg.norm(model.jnt_pos[joint])
                )
            if end == body:
                return length
            length += float(np.linalg.norm(model.body_pos[end]))
            end = int(model.body_parentid[end])


def _turns_or_slides(model: mujoco.MjModel, joint: int) -> bool:
    # As plain numbers: not every MuJoCo's enumerations equal NumPy's integers from both sides.
    return int(model.jnt_type[joint]) in (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE))


def _is_parent(model: mujoco.MjModel, body: int, child: int) -> bool:
    """As MuJoCo has it: bodies without a joint between them are one, and the world is nobody's parent."""
    parent = int(model.body_parentid[model.body_weldid[child]])
    return parent != 0 and (parent == body or 0 != model.body_weldid[parent] == model.body_weldid[body])


def _is_behind(model: mujoco.MjModel, body: int, end: int) -> bool:
    while end not in (body, 0):
        end = int(model.body_parentid[end])
    return end == body


def _behind(model: mujoco.MjModel, body: int) -> list[bool]:
    return [_is_behind(model, int(body), end) for end in range(model.nbody)]


def _along(path: Array, moved: Array, at: float) -> Array:
    """The pose at so much motion, on the straight lines between set-points."""
    i = min(int(np.searchsorted(moved, at, side="right")), len(moved) - 1)
    length = moved[i] - moved[i - 1]
    share = (at - moved[i - 1]) / length if length > 0 else 1.0
    return path[i - 1] + share * (path[i] - path[i - 1])
