"""Each randomised quantity: what it changes, within which range, and that nothing else moves."""

from __future__ import annotations

import copy

import mujoco
import numpy as np
import pytest

from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.sim.batch import BatchedMujoco
from burnish.sim.build import world_from
from burnish.sim.randomize import QUANTITIES, RandomizeConfig, randomize
from burnish.sim.tasks.reach import Reach, ReachConfig

pytestmark = pytest.mark.sim

MJCF = """
<mujoco>
  <statistic extent="3" center="0.1 0.2 0.3"/>
  <worldbody>
    <camera name="fixed" pos="1 0 1" xyaxes="0 1 0 -1 0 1" fovy="50"/>
    <geom name="floor" type="plane" size="1 1 0.1" friction="0.8 0.02 0.001"/>
    <body pos="0 0 0.5"><joint name="a" axis="0 1 0" damping="0.4"/>
      <geom name="u" size="0.05" fromto="0 0 0 0.3 0 0" type="capsule"/>
      <camera name="tracking" mode="trackcom" pos="0 -1 0.2" xyaxes="1 0 0 0 0 1"/>
      <body pos="0.3 0 0"><joint name="b" axis="0 1 0" damping="0.2"/>
        <geom name="v" size="0.04" fromto="0 0 0 0.3 0 0" type="capsule"/>
      </body>
    </body>
  </worldbody>
  <contact><pair geom1="floor" geom2="v" friction="0.7 0.7 0.01 0.001 0.001"/></contact>
  <actuator><position joint="a" kp="50" kv="3"/><motor joint="b" gear="2"/></actuator>
</mujoco>"""
NOMINAL = mujoco.MjModel.from_xml_string(MJCF)
# Ratios to the nominal value, field by field; all entries of a model are drawn at once.
SCALED = {
    "mass": ("body_mass", "body_inertia"),
    "friction": ("geom_friction", "pair_friction"),
    "gains": ("actuator_gainprm", "actuator_biasprm"),
    "damping": ("dof_damping",),
    "camera_fovy": ("cam_fovy",),
}
MOVED = {"camera_m": "cam_pos", "camera_rad": "cam_quat"}
# What the compiler works out from masses and cameras.
DERIVED = {
    "mass": {
        "body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0", "actuator_acc0",
        "cam_poscom0", "light_poscom0", "tendon_invweight0",
    },
    "camera_m": {"cam_pos0", "cam_poscom0"},
    "camera_rad": {"cam_mat0"},
}  # fmt: skip


def drawn(seed: int = 0, **ranges: float) -> mujoco.MjModel:
    model = copy.copy(NOMINAL)
    randomize(model, RandomizeConfig(**ranges), np.random.default_rng(seed), mujoco.MjData(model))
    return model


def fields(model: mujoco.MjModel) -> dict[str, np.ndarray]:
    found = {name: getattr(model, name) for name in dir(model) if not name.startswith("_")}
    return {name: x for name, x in found.items() if isinstance(x, np.ndarray)}


def changed(model: mujoco.MjModel) -> set[str]:
    before = fields(NOMINAL)
    return {name for name, x in fields(model).items() if not np.array_equal(x, before[name])}


@pytest.mark.parametrize("name", SCALED)
def test_a_share_scales_its_fields_within_its_range(name):
    ratios = []
    for seed in range(200):
        model = drawn(seed, **{name: 0.3})
        parts = []
        for field in SCALED[name]:
            nominal, now = getattr(NOMINAL, field), getattr(model, field)
            parts.append(now[nominal != 0] / nominal[nominal != 0])
            assert (now[nominal == 0] == 0).all()
        ratios.append(np.concatenate(parts))
    ratio = np.array(ratios)
    assert ratio.min() >= 0.7 and ratio.max() <= 1.3
    # Of 200 uniform draws the mean has a standard error of 0.012, and the least is within 0.03 of the end but for 4e-5.
    assert abs(ratio.mean() - 1) < 0.05 and ratio.min() < 0.73 and ratio.max() > 1.27


@pytest.mark.parametrize("name", [*SCALED, *MOVED])
def test_nothing_else_moves(name):
    allowed = {MOVED[name]} if name in MOVED else set(SCALED[name])
    found = changed(drawn(**{name: 0.2}))
    assert allowed <= found <= allowed | DERIVED.get(name, set())
    assert changed(drawn()) == set()


def test_what_belongs_together_is_scaled_together():
    heavy = drawn(mass=0.3)
    ratio = heavy.body_mass[1:] / NOMINAL.body_mass[1:]
    assert heavy.body_inertia[1:] / NOMINAL.body_inertia[1:] == pytest.approx(np.tile(ratio[:, None], 3))
    assert ratio[0] != ratio[1]
    strong = drawn(gains=0.3)
    assert strong.actuator_gainprm[0, 0] == -strong.actuator_biasprm[0, 1] != 50
    rough = drawn(friction=0.3)
    all_of_them = [
        *(rough.geom_friction / NOMINAL.geom_friction).flat,
        *(rough.pair_friction / NOMINAL.pair_friction).flat,
    ]
    assert all_of_them == pytest.approx([all_of_them[0]] * len(all_of_them))


def test_constants_that_follow_from_masses_are_those_of_a_model_compiled_so():
    heavy = drawn(mass=0.4)
    spec = mujoco.MjSpec.from_string(MJCF)
    for i, body in enumerate(spec.bodies[1:], 1):
        body.explicitinertial = True
        body.mass, body.inertia = heavy.body_mass[i], heavy.body_inertia[i]
        body.ipos, body.iquat = NOMINAL.body_ipos[i], NOMINAL.body_iquat[i]
    compiled = spec.compile()
    assert np.array_equal(compiled.body_mass, heavy.body_mass)
    for name in ("dof_invweight0", "body_invweight0", "body_subtreemass"):
        assert getattr(heavy, name) == pytest.approx(getattr(compiled, name))
        assert getattr(heavy, name) != pytest.approx(getattr(NOMINAL, name))
    assert heavy.stat.extent == 3 and heavy.stat.center.tolist() == [0.1, 0.2, 0.3]


def test_a_camera_turns_by_what_it_says():
    for seed in range(50):
        model = drawn(seed, camera_rad=0.1, camera_m=0.02)
        assert np.abs(model.cam_pos - NOMINAL.cam_pos).max() <= 0.02
        for quat, nominal in zip(model.cam_quat, NOMINAL.cam_quat, strict=True):
            turn = np.empty(3)
            mujoco.mju_subQuat(turn, quat, nominal)
            assert np.linalg.norm(quat) == pytest.approx(1)
            assert 0 < np.abs(turn).max() <= 0.1 + 1e-9


def test_the_nominal_values_laid_back_leave_no_trace():
    """How `Physics.own_model` and `randomize` work together over episodes: after any others, a seed gives its model."""
    config = RandomizeConfig(0.3, 0.3, 0.3, 0.3, 0.01, 0.02, 0.1, 0.1)
    assert all(kind.amount(config) for kind in QUANTITIES)
    model, scratch = copy.copy(NOMINAL), mujoco.MjData(NOMINAL)
    for seed in (4, 5, 6):
        for name in config.changed():
            getattr(model, name)[...] = getattr(NOMINAL, name)
        late = randomize(model, config, np.random.default_rng(seed), scratch)
    fresh = copy.copy(NOMINAL)
    assert late == randomize(fresh, config, np.random.default_rng(6), scratch)
    assert all(np.array_equal(x, fields(fresh)[name]) for name, x in fields(model).items())
    assert model.stat.meaninertia == fresh.stat.meaninertia


@pytest.mark.parametrize("wrong", [{"mass": 1.0}, {"friction": -0.1}, {"latency_s": -1}, {"camera_m": float("nan")}])
def test_impossible_ranges_are_refused(wrong):
    with pytest.raises(BurnishError, match=f"randomize.{next(iter(wrong))}="):
        RandomizeConfig(**wrong)


def test_every_world_of_a_batch_has_its_own_model_and_keeps_its_flags():
    env = BatchedMujoco(Reach(ReachConfig(randomize=RandomizeConfig(mass=0.3))), 3)
    env.reset(seeds=[1, 2, 3])
    masses = [model.body_mass[3] for model in env.physics.models]
    assert len(set(masses)) == 3
    flag = int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    assert all(int(model.opt.disableflags) & flag for model in env.physics.models)


def test_it_is_remembered_with_the_world():
    config = ReachConfig(randomize=RandomizeConfig(friction=0.3, camera_rad=0.05))
    assert world_from({"name": "reach", "config": to_data(config)}) == config
