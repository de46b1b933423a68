"""Collision limits: a box for the tool, a floor, and the arm's own body, as a constraint of `fallback`.

The geometry is a MuJoCo model's. ``clearance(q)`` is the least of: distances between bodies that are not neighbours,
heights of what moves above the floor, and distances of the tool from the sides of its box. A path (what is sent next,
and all of the braking after it, to the pose at rest) is allowed if each of these stays above the margin all along it,
between the set-points too.

**No tunnelling.** When joints turn by dq, no point moves farther than sum_i |dq_i| r_i, with r_i the farthest that it
can be from joint i; a distance between two bodies shrinks by no more than that, where i runs over the joints between
them. So of two looks, at which a distance exceeds the margin by x and y with a motion of at most m between them, it
exceeds it by (x + y - m) / 2 everywhere in between. A path is looked at in its first and its last pose, and then where
this says least, until it says enough everywhere (conservative advancement from both ends; Mirtich, PhD thesis, Berkeley
1996). Every set-point of an allowed path is at least `RESOLUTION_M` farther away than the margin, which leaves room to
begin the next path. A path that needs more than ``LOOKS`` is refused: a tick costs a bounded time.

**Departures.** Bodies of a joint and of its parent may touch, as in MuJoCo. Heights above the floor and other planes
take capsules and spheres as they are, other shapes by their bounding boxes. A held object is not known here, and
what stands around is where the model has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from ..errors import Refused

Array = NDArray[np.float64]

RESOLUTION_M = 1e-3
FAR_M = 0.3  # clearances beyond this are not told apart
LOOKS = 12  # at one path; who would need more is not moved
UP = np.array([0.0, 0.0, 1.0])
NEXT, LAST = [1, 2, 0], [2, 0, 1]


@dataclass(frozen=True)
class Workspace:
    """Limits in space: a floor, a box for the tool (m), and the distance between bodies of the arm."""

    margin_m: float = 0.01
    floor_z_m: float | None = 0.0  # nothing that moves comes lower
    tool_lower_m: Sequence[float] | None = None  # of the box for the tool's site
    tool_upper_m: Sequence[float] | None = None
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
    """A `fallback.Constraint`. Joints are those named, or all hinges and slides of the model in their order; a device's
    rounding moves each of them by up to ``quantum``, after which the margin is kept too."""

    def __init__(
        self,
        mjcf: str | Path,
        tool_site: str,
        workspace: Workspace,
        joints: Sequence[str] | None = None,
        quantum: Array | float = 0.0,
    ) -> None:
        """``mjcf`` is the model itself, or the path of its file."""
        try:
            self._model = model = (
                mujoco.MjModel.from_xml_path(str(mjcf))
                if isinstance(mjcf, Path)
                else mujoco.MjModel.from_xml_string(mjcf)
            )
            names = joints or [model.joint(i).name for i in range(model.njnt) if _turns_or_slides(model, i)]
            ids = np.array([model.joint(name).id for name in names])
            self._tool = model.site(tool_site).id
        except (ValueError, KeyError) as error:
            raise Refused(f"the model does not have what it should: {error}") from error
        if not all(_turns_or_slides(model, i) for i in ids):
            raise Refused(f"joints of an arm are hinges and slides, and not all of {list(names)} are")
        self.workspace = workspace
        self.refused = ""  # "apart", "floor" or "workspace": which distance refused the last path; or else "looks"
        self._data = mujoco.MjData(model)
        self._columns = model.jnt_qposadr[ids]
        bodies = range(model.nbody)
        behind = np.array([[_is_behind(model, int(model.jnt_bodyid[i]), end) for end in bodies] for i in ids])
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
        self._boxed = workspace.tool_lower_m is not None
        # Of each distance, the most that it changes per radian of each joint (per metre of a slide), and its kind.
        self._rates, self._kinds = self._distances(ids, behind)
        self.reach_m = self._rates.max(axis=0, initial=0.0)  # r_i
        self._margin = workspace.margin_m + self._rates @ np.broadcast_to(np.asarray(quantum, np.float64), len(ids))

    def clearance(self, q: Array) -> float:
        """Metres, negative where something is too far already; nothing beyond `FAR_M` is told apart."""
        everything = np.full(len(self._kinds), np.inf)
        return min(float(self._rooms(q, everything, 0.0).min(initial=FAR_M)), FAR_M)

    def __call__(self, path: Array) -> bool:
        """Whether all of a path keeps the margin; its first set-point has been sent already."""
        moved = np.zeros((len(path), len(self._kinds)))  # of each distance, at most, since the first set-point
        np.cumsum(np.abs(np.diff(path, axis=0)) @ self._rates.T, axis=0, out=moved[1:])
        last = len(path) - 1
        still = not moved[-1].any()
        first = self._rooms(path[0], moved[-1] + RESOLUTION_M, self._margin)
        if not self._enough(first, RESOLUTION_M if still else 0.0):
            return False
        if (first - moved[-1] >= RESOLUTION_M).all():
            return True
        rest = self._rooms(path[-1], moved[-1] + RESOLUTION_M, self._margin)
        if not self._enough(rest, RESOLUTION_M):
            return False
        # Between two looks: (where, distances beyond the margin) of both; 1.5 is half way from set-point 1 to 2.
        open_parts = [(0.0, first, float(last), rest)]
        for _ in range(LOOKS - 2):
            while open_parts:
                a, before, b, after = open_parts.pop()
                low, high = _at(moved, a), _at(moved, b)
                spare = before + after - (high - low)
                if not ((spare >= 2 * RESOLUTION_M).all() or (b <= np.floor(a) + 1 and (spare >= 0).all())):
                    break
            else:
                return True
            worst = int(spare.argmin())
            where = (low[worst] + high[worst] + before[worst] - after[worst]) / 2
            t = float(np.interp(where, moved[:, worst], np.arange(last + 1.0)))
            # At a set-point where there is one in between: there the distance must be larger.
            t = min(max(round(t), np.floor(a) + 1), np.ceil(b) - 1) if b > np.floor(a) + 1 else (a + b) / 2
            now = _at(moved, t)
            found = self._rooms(_at(path, t), np.maximum(now - low, high - now) + RESOLUTION_M, self._margin)
            if not self._enough(found, RESOLUTION_M):
                return False
            open_parts += [(a, before, t, found), (t, found, b, after)]
        self.refused = "looks"
        return False

    def _enough(self, rooms: Array, least: float) -> bool:
        worst = int(rooms.argmin()) if len(rooms) else -1
        if worst < 0 or rooms[worst] >= least:
            return True
        self.refused = self._kinds[worst]
        return False

    def _rooms(self, q: Array, wanted: Array, margin: Array | float) -> Array:
        """By how much each distance exceeds the margin, at least; measured exactly where it might be less than
        ``wanted``, and up to `FAR_M`."""
        model, data, workspace = self._model, self._data, self.workspace
        data.qpos[self._columns] = q
        mujoco.mj_kinematics(model, data)
        rooms = np.empty(len(self._kinds))
        pairs = rooms[: len(self._pairs)]
        if len(pairs):
            # Spheres around the shapes are apart by less than the shapes, and are quickly measured.
            between = data.geom_xpos[self._pairs[:, 0]] - data.geom_xpos[self._pairs[:, 1]]
            pairs[:] = np.sqrt((between * between).sum(axis=1)) - self._round_m
            for i in np.flatnonzero(pairs < np.minimum(wanted + margin, FAR_M)[: len(pairs)]).tolist():
                one, other = self._pairs[i]
                apart = mujoco.mj_geomDistance(model, data, one, other, FAR_M, None)
                # MuJoCo 3.8 says exactly 0 for a hundredth of all pairs of boxes, however far apart they are.
                pairs[i] = apart if apart != 0 else self._separated(one, other)
        at, size = len(pairs), len(self._moving)
        if workspace.floor_z_m is not None:
            rooms[at : at + size] = self._above(UP, workspace.floor_z_m * UP)
            at += size
        for plane in self._planes:
            rooms[at : at + size] = self._above(data.geom_xmat[plane, 2::3], data.geom_xpos[plane])
            at += size
        if workspace.tool_lower_m is not None and workspace.tool_upper_m is not None:
            tool = data.site_xpos[self._tool]
            rooms[at] = min(np.min(tool - workspace.tool_lower_m), np.min(workspace.tool_upper_m - tool))
        return rooms - margin

    def _distances(self, ids: NDArray[np.int_], behind: NDArray[np.bool_]) -> tuple[Array, list[str]]:
        """Of each distance, in the order of ``_rooms``: (distances, joints) by how much it can change, and its kind."""
        model = self._model
        reach = np.array([[self._reach(joint, g) for g in range(model.ngeom)] for joint in ids]).reshape(len(ids), -1)
        moves = behind[:, model.geom_bodyid]
        one, other = self._pairs.T
        # A joint behind which both are, or neither is, turns none of them against the other.
        between = moves[:, one] != moves[:, other]
        rates = [np.where(between, np.where(moves[:, one], reach[:, one], reach[:, other]), 0.0).T]
        kinds = ["apart"] * len(one)
        planes = len(self._planes) + (self.workspace.floor_z_m is not None)
        for _ in range(planes):
            rates.append(reach[:, self._moving].T)
            kinds += ["floor"] * len(self._moving)
        if self._boxed:
            far = float(np.linalg.norm(model.site_pos[self._tool]))
            rates.append(np.array([[self._far(joint, int(model.site_bodyid[self._tool]), far) for joint in ids]]))
            kinds.append("workspace")
        return np.concatenate(rates), kinds

    def _separated(self, one: int, other: int) -> float:
        """At least so far are the boxes of two shapes apart: the widest gap between them along the directions of their
        faces and of pairs of their edges. Never more than the distance, so it is safe to believe."""
        a, b = (self._data.geom_xmat[g].reshape(3, 3) for g in (one, other))
        x, y = a.T[:, None], b.T[None]
        across = (x[..., NEXT] * y[..., LAST] - x[..., LAST] * y[..., NEXT]).reshape(9, 3)  # cross products
        size = np.linalg.norm(across, axis=1)
        normals = np.concatenate([a.T, b.T, across[size > 1e-6] / size[size > 1e-6, None]])
        middles = [self._data.geom_xpos[g] + x @ self._middle[g] for g, x in ((one, a), (other, b))]
        gaps = np.abs(normals @ (middles[0] - middles[1]))
        for g, x in ((one, a), (other, b)):
            gaps = gaps - np.abs(normals @ x) @ (self._half[g] + self._shell[g])
        return min(float(gaps.max()), FAR_M)

    def _above(self, normal: Array, point: Array) -> Array:
        """The height of the lowest point of each moving shape above a plane."""
        data, moving = self._data, self._moving
        along = normal @ data.geom_xmat[moving].reshape(-1, 3, 3)  # of each shape's axes
        low = (data.geom_xpos[moving] - point) @ normal + (along * self._middle[moving]).sum(axis=1)
        return low - (np.abs(along) * self._half[moving]).sum(axis=1) - self._shell[moving]

    def _who_keeps_apart(self, behind: NDArray[np.bool_]) -> NDArray[np.int_]:
        """Pairs of shapes that can move against each other and are not of one body or of neighbours."""
        model = self._model
        bodies = {model.body(i).name: i for i in range(model.nbody)}
        for name in (name for pair in self.workspace.may_touch for name in pair):
            if name not in bodies:
                raise Refused(f"may_touch names {name!r}, which is no body of the model; choices: {', '.join(bodies)}")
        named = {frozenset((bodies[a], bodies[b])) for a, b in self.workspace.may_touch}
        pairs = []
        for one, other in combinations(np.flatnonzero(model.geom_type != int(mujoco.mjtGeom.mjGEOM_PLANE)).tolist(), 2):
            a, b = int(model.geom_bodyid[one]), int(model.geom_bodyid[other])
            still = (behind[:, a] == behind[:, b]).all()
            neighbours = _is_parent(model, a, b) or _is_parent(model, b, a)
            if not still and not neighbours and frozenset((a, b)) not in named:
                pairs.append((one, other))
        return np.array(pairs, int).reshape(-1, 2)

    def _reach(self, joint: int, geom: int) -> float:
        """The farthest that a point of a shape can be from a joint it is behind: all links between them, stretched."""
        model = self._model
        corner = np.linalg.norm(np.abs(self._middle[geom]) + self._half[geom] + self._shell[geom])
        return self._far(joint, int(model.geom_bodyid[geom]), float(np.linalg.norm(model.geom_pos[geom]) + corner))

    def _far(self, joint: int, end: int, beyond: float) -> float:
        """To what is ``beyond`` the origin of a body; 1 for a slide, and 0 for what is not behind the joint."""
        body = int(self._model.jnt_bodyid[joint])
        if not _is_behind(self._model, body, end):
            return 0.0
        slides = int(self._model.jnt_type[joint]) == int(mujoco.mjtJoint.mjJNT_SLIDE)
        return 1.0 if slides else self._stretched(body, end) + beyond

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


def _at(rows: Array, t: float) -> Array:
    """Between two rows, on a straight line."""
    i = min(int(t), len(rows) - 1)
    return rows[i] if i == t else rows[i] + (t - i) * (rows[i + 1] - rows[i])
