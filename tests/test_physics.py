"""N worlds at once against N worlds in turn: the gather over their memory, the threads, the saved state."""

from __future__ import annotations

import gc
import threading

import mujoco
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.policies.core.errors import BurnishError
from burnish.sim.physics import Column, Physics, WorkerThreads

pytestmark = pytest.mark.sim

# A cart-pole that hits a box that lies about, so that contacts, free joints, mocap bodies and sensors are all there.
MJCF = """
<mujoco>
  <option timestep="0.005"/>
  <worldbody>
    <geom type="plane" size="2 2 0.1"/>
    <body name="cart" pos="0 0 0.6"><joint name="slide" type="slide" axis="1 0 0" damping="0.1"/>
      <geom type="box" size="0.1 0.05 0.05" mass="1"/>
      <body name="pole"><joint name="hinge" axis="0 1 0" damping="0.01"/>
        <geom type="capsule" fromto="0 0 0 0 0 -0.5" size="0.03" mass="0.2"/><site name="tip" pos="0 0 -0.5"/>
      </body>
    </body>
    <body name="box" pos="0.3 0 0.06"><freejoint/><geom type="box" size="0.05 0.05 0.05" mass="0.05"/></body>
    <body name="marker" mocap="true" pos="0 1 0"><geom size="0.02" contype="0" conaffinity="0"/></body>
  </worldbody>
  <actuator><motor joint="slide" gear="5" ctrlrange="-1 1"/><motor joint="hinge" ctrlrange="-1 1"/></actuator>
  <sensor><framepos objtype="site" objname="tip"/></sensor>
</mujoco>"""
WORLDS = 5
FIELDS = {
    "qpos": [None, 3, -1, slice(2, 5), slice(None, None, 2)],
    "qvel": [None, slice(0, 0)],
    "ctrl": [None, 1],
    "xpos": [None, 2, slice(1, 3)],
    "xmat": [None, 1],
    "site_xpos": [None, 0],
    "cfrc_ext": [None, slice(1, None)],
    "mocap_pos": [None, 0],
    "sensordata": [None],
}
CASES = [(field, at) for field, places in FIELDS.items() for at in places]


def made(num_worlds: int = WORLDS, threads: int | None = None) -> Physics:
    """Worlds that differ."""
    physics = Physics(mujoco.MjModel.from_xml_string(MJCF), num_worlds, threads)
    for i, data in enumerate(physics.data):
        data.qpos[1] = 0.1 * (i + 1)
    physics.forward()
    return physics


def controls(ticks: int, num_worlds: int = WORLDS) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (ticks, num_worlds, 2))


def in_turn(physics: Physics, field: str, at) -> np.ndarray:
    fields = [np.asarray(getattr(data, field)) for data in physics.data]
    return np.stack([x if at is None else x[at] for x in fields])


@pytest.mark.parametrize(("field", "at"), CASES)
def test_a_column_reads_what_a_loop_reads(field, at):
    physics = made()
    for ctrl in controls(20):
        physics.step(ctrl, 5)
    column = physics.column(field, at)
    read = column.read()
    assert read.shape == column.shape and np.array_equal(read, in_turn(physics, field, at))
    read += 1  # a copy
    assert np.array_equal(column.read(), in_turn(physics, field, at))


@pytest.mark.parametrize(("field", "at"), CASES)
def test_a_column_writes_where_a_loop_writes(field, at):
    physics, by_hand = made(), made()
    column, rows = physics.column(field, at), np.array([3, 0])
    value = np.random.default_rng(1).normal(size=column.shape)
    column.write(value, rows)
    for i in rows:
        whole = getattr(by_hand.data[i], field)
        whole[slice(None) if at is None else at] = value[i]
    for mine, theirs in zip(physics.data, by_hand.data, strict=True):
        assert np.array_equal(getattr(mine, field), getattr(theirs, field))
    column.write(value)
    assert np.array_equal(column.read(), value)
    column.write(0.5)
    assert (in_turn(physics, field, at) == 0.5).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_column_is_a_loop_for_any_arrays(data):
    """Views of any start and stride, in arrays that lie anywhere in memory."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = data.draw(st.integers(1, 4))
    at = tuple(slice(data.draw(st.integers(0, extent - 1)), None, data.draw(st.integers(1, 3))) for extent in shape)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays = [rng.normal(size=shape) for _ in range(count)]
    copies = [x.copy() for x in arrays]
    column = Column([x[at] for x in arrays])
    assert np.array_equal(column.read(), np.stack([x[at] for x in copies]))
    rows = np.array(data.draw(st.lists(st.integers(0, count - 1), unique=True)), np.int64)
    value = rng.normal(size=column.shape)
    column.write(value, rows)
    for i in rows:
        copies[i][at] = value[i]
    assert all(np.array_equal(x, y) for x, y in zip(arrays, copies, strict=True))


def test_a_column_of_unlike_fields_is_refused():
    with pytest.raises(ValueError, match="float64 fields of one shape"):
        Column([np.zeros(3), np.zeros(4)])
    with pytest.raises(ValueError, match="float64 fields of one shape"):
        Column([np.zeros(3, np.float32)])


def played(physics: Physics, ticks: int, num_worlds: int) -> np.ndarray:
    for ctrl in controls(ticks)[:, :num_worlds]:
        physics.step(ctrl, 5)
    return physics.state()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_and_numbers_of_worlds_change_no_bit(threads):
    """Against one world stepped by MuJoCo itself, physics step by physics step."""
    model = mujoco.MjModel.from_xml_string(MJCF)
    state = played(made(threads=threads), 100, WORLDS)
    few = played(made(2, threads), 100, 2)
    assert np.array_equal(few, state[:2])
    for i in range(WORLDS):
        data = mujoco.MjData(model)
        data.qpos[1] = 0.1 * (i + 1)
        mujoco.mj_forward(model, data)
        for ctrl in controls(100)[:, i]:
            data.ctrl[:] = ctrl
            for _ in range(5):
                mujoco.mj_step(model, data)
        alone = np.empty(state.shape[1])
        mujoco.mj_getState(model, data, alone, mujoco.mjtState.mjSTATE_INTEGRATION)
        assert np.array_equal(alone, state[i])


def test_only_the_rows_asked_for_are_stepped():
    physics = made()
    before, rows = physics.state(), np.array([1, 4])
    physics.step(controls(1)[0], 5, rows)
    same = (physics.state() == before).all(axis=1)
    assert same.tolist() == [True, False, True, True, False]
    physics.step(controls(1)[0], np.array([0, 0, 3, 0, 0]))
    assert [data.time for data in physics.data] == pytest.approx([0, 0.025, 0.015, 0, 0.025])


def test_what_is_derived_is_derived_in_every_world():
    physics = made()
    physics.step(controls(1)[0], 5)
    stale = physics.column("site_xpos", 0).read()
    physics.step(controls(1)[0], 0, derive=[mujoco.mj_kinematics])
    fresh = physics.column("site_xpos", 0).read()
    assert (stale != fresh).any(axis=1).all()


def test_restored_worlds_go_on_bit_for_bit():
    physics = made()
    played(physics, 40, WORLDS)
    saved = physics.state()
    once = played(physics, 100, WORLDS)
    other = made()
    played(other, 7, WORLDS)
    other.restore(saved)
    assert np.array_equal(other.state(), saved)
    assert np.array_equal(played(other, 100, WORLDS), once)


def test_the_warm_start_belongs_to_the_state():
    """Without it, which is how `mujoco.rollout` goes on, the same worlds end elsewhere: control of the test above."""
    physics = made()
    played(physics, 40, WORLDS)
    saved = physics.state()
    once = played(physics, 100, WORLDS)
    physics.restore(saved)
    physics.column("qacc_warmstart").write(0.0)
    assert not np.array_equal(played(physics, 100, WORLDS), once)


def test_an_own_model_is_of_one_world_and_begins_nominal():
    physics = made()
    own = physics.own_model(2, ("body_mass",))
    own.body_mass[:] *= 3
    own.geom_friction[:] *= 2
    assert physics.models[2] is own and all(physics.models[i] is physics.model for i in (0, 1, 3, 4))
    assert physics.own_model(2, ("body_mass",)) is own
    assert np.array_equal(own.body_mass, physics.model.body_mass)
    assert np.array_equal(own.geom_friction, 2 * physics.model.geom_friction)  # it was not named


def test_no_worlds_are_refused():
    with pytest.raises(BurnishError, match="at least one world is needed"):
        Physics(mujoco.MjModel.from_xml_string(MJCF), 0)


def test_every_world_is_stepped_once_by_any_number_of_threads():
    for threads in range(4):
        for count in range(6):
            done: list[int] = []
            WorkerThreads(threads).share(done.extend, range(count))
            assert sorted(done) == list(range(count))


def test_an_idle_thread_takes_what_another_has_left():
    """The first world waits until the second of the same share is done, which only the other thread can do."""
    second = threading.Event()
    order = []

    def work(worlds):
        for i in worlds:
            if i == 0:
                assert second.wait(timeout=30)
            order.append(i)
            if i == 1:
                second.set()

    WorkerThreads(1).share(work, range(4))
    assert order.index(1) < order.index(0)


def test_an_error_in_another_thread_is_raised_here():
    here = threading.get_ident()

    def work(worlds):
        elsewhere = threading.get_ident() != here
        if not elsewhere:
            assert entered.wait(timeout=30)
        for _ in worlds:
            if elsewhere:
                entered.set()
                raise RuntimeError("the solver is lost")

    entered = threading.Event()
    crew = WorkerThreads(1)
    with pytest.raises(RuntimeError, match="the solver is lost"):
        crew.share(work, range(4))
    done: list[int] = []
    crew.share(done.extend, range(4))  # and the crew is still there
    assert sorted(done) == list(range(4))


def test_threads_end_with_the_worlds_that_they_step():
    before = set(threading.enumerate())
    physics = made(threads=3)
    physics.step(controls(1)[0], 1)
    crew = set(threading.enumerate()) - before
    assert len(crew) == 2
    del physics
    gc.collect()
    for thread in crew:
        thread.join(timeout=30)
        assert not thread.is_alive()
