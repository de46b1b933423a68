"""The control loop on a virtual clock: deadlines, plans, orders. And once for real, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from burnish.real_robot.adapter import Phase
from burnish.real_robot.clock import VirtualClock, ns
from burnish.real_robot.control.link import RobotLink
from burnish.real_robot.control.loop import ORDERS, PHASES, RUNGS, ControlLoop, Order, Plan
from burnish.real_robot.control.shared_memory import MOST, Board, blank, order_dtype, plan_dtype, state_dtype
from burnish.real_robot.control.timing import Timing
from burnish.real_robot.errors import Refused, RobotError
from burnish.real_robot.safety.safe_robot import Rung, SafeRobot, Safety
from robot_lab import ARM, LIMITS, Puppet

pytestmark = pytest.mark.real_time

SAFETY = Safety(rate_hz=100.0, blend_s=0.0, start_gap_rad=2.0)
MS = 1_000_000


class Bench:
    """A loop on a puppet, with the boards as others see them."""

    def __init__(self, folder, puppet: Puppet | None = None) -> None:
        self.clock = VirtualClock()
        self.puppet = puppet or Puppet(self.clock)
        self.robot = SafeRobot(self.puppet, SAFETY)
        kinds = {"plans": plan_dtype(2), "orders": order_dtype(), "states": state_dtype(2)}
        self.boards = {name: Board.create(folder / name, kind) for name, kind in kinds.items()}
        self.loop = ControlLoop(self.robot, *(self.boards[name] for name in ("plans", "orders", "states")))
        self.loop._next_ns = self.clock.now_ns()
        self._orders = self._plans = 0

    def order(self, order: Order) -> None:
        self._orders += 1
        self.boards["orders"].write(blank(order_dtype(), seq=self._orders, what=ORDERS.index(order)))

    def plan(self, targets, dt_s=0.05, start_ns=None, linear=0) -> None:
        self._plans += 1
        start_ns = self.clock.now_ns() if start_ns is None else start_ns
        values = {"seq": self._plans, "t_start_ns": start_ns, "dt_ns": ns(dt_s), "linear": linear, "gripper": np.nan}
        record = blank(plan_dtype(2), count=len(targets), **values)
        record["targets"][0, : len(targets)] = targets
        self.boards["plans"].write(record)

    def run(self, ticks: int) -> list:
        found = []
        for _ in range(ticks):
            self.clock.sleep_until_ns(self.loop._next_ns)
            found.append(self.loop.tick())
        return found

    @property
    def report(self):
        return self.boards["states"].read()[0]


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


def test_orders_plans_and_the_report(bench):
    assert bench.run(3) == [None, None, None] and bench.puppet.calls == [], "nothing happens unasked"
    bench.order(Order.START)
    bench.run(2)
    assert bench.robot.rung is Rung.HOLD and bench.report["plan_seq"] == -1
    bench.plan([[0.1, -0.1]] * 20)
    infos = bench.run(60)
    assert np.array_equal(infos[-1].sent, [0.1, -0.1])
    report = bench.report
    assert report["plan_seq"] == 1 and report["ticks"] == 65 and np.array_equal(report["q"], [0.1, -0.1])
    assert 0 < report["plan_index"] < 20 and report["late"] == 0
    bench.order(Order.STOP)
    bench.run(10)
    assert bench.robot.rung is Rung.STOPPED and bench.robot.phase is Phase.INACTIVE


def test_the_plan_of_now_is_followed_and_ends(bench):
    bench.order(Order.START)
    bench.run(1)
    bench.plan([[0.01, 0.0], [0.02, 0.0], [0.03, 0.0]], dt_s=0.1)
    seen = [info.sent[0] for info in bench.run(30)]
    assert seen[8] == 0.01 and seen[18] == 0.02 and seen[28] == 0.03
    assert bench.run(3)[-1].rung is Rung.HOLD, "a plan that is over is nothing"


def test_a_plan_in_straight_lines(bench):
    plan = Plan(blank(plan_dtype(1), t_start_ns=0, dt_ns=100, count=3, linear=1, targets=0, gripper=np.nan))
    plan._targets[:3, 0] = [0, 1, 3]
    values = [plan.at(t)[1][0] for t in (0, 25, 100, 150, 200, 299)]
    assert values == [0, 0.25, 1, 2, 3, 3]
    assert plan.at(-1) is None and plan.at(300) is None


WRONG = [{"count": 0}, {"count": -3}, {"count": MOST + 1}, {"dt_ns": 0}, {"dt_ns": -5}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_records_that_are_no_plan(wrong):
    values = {"t_start_ns": 0, "dt_ns": 100, "count": 1, **wrong}
    assert Plan(blank(plan_dtype(1), **values)).at(0) is None


def test_a_plan_of_before_the_start_is_not_taken_up(bench):
    bench.plan([[0.5, 0.5]] * 60)
    bench.order(Order.START)
    assert bench.run(20)[-1].rung is Rung.HOLD and np.array_equal(bench.puppet.q, [0, 0])


def test_a_start_that_is_refused_leaves_the_plan_alone(bench):
    bench.order(Order.START)
    bench.run(1)
    bench.plan([[0.9, 0.9]] * 60)
    bench.run(20)
    bench.order(Order.START)
    infos = bench.run(20)
    assert {info.rung for info in infos} == {Rung.RUN} and bench.report["refused"] == 2
    assert np.diff([info.sent[0] for info in infos]).min() > 0.005, "it goes on as it was"


@pytest.mark.parametrize("way", ["order", "fault"])
def test_the_device_is_stopped_after_a_sign_of_life(bench, way):
    """How long that may take is the driver's to say; a watchdog has to know that it has begun."""
    seen, real = [], bench.puppet._stop

    def stop(kind):
        bench.clock.advance_ns(300 * MS)
        row = bench.report
        seen.append((PHASES[row["phase"]], RUNGS[row["rung"]], bench.clock.now_ns() - int(row["heartbeat_ns"])))
        real(kind)

    bench.puppet._stop = stop
    bench.order(Order.START)
    bench.run(2)
    if way == "fault":
        bench.puppet.script.fails["write"] = OSError("unplugged")
    bench.order(Order.STOP)
    bench.run(2)
    ((phase, rung, age_ns),) = seen
    assert phase is Phase.STOPPING and age_ns == 300 * MS
    assert rung is not Rung.STOPPED, "whoever waits for the stop must not be told too early"
    assert RUNGS[bench.report["rung"]] is Rung.STOPPED


def test_deadlines_that_are_over_are_skipped(bench):
    """After 45 ms elsewhere the ticks of 10, 20, 30 and 40 ms are misses, and the next one is at 50: no burst."""
    bench.order(Order.START)
    bench.run(2)
    first = bench.loop._next_ns
    bench.clock.sleep_until_ns(first)
    original = bench.puppet._read

    def slow(timeout_s):
        bench.clock.advance_ns(45 * MS)
        return original(timeout_s)

    bench.puppet._read = slow
    bench.loop.tick()
    bench.puppet._read = original
    assert bench.loop._next_ns == first + 50 * MS
    bench.run(3)
    due, late, _ = bench.loop.timing.kept()[-4:].T
    assert (due - first).tolist() == [0, 10 * MS, 60 * MS, 70 * MS], "the first that was skipped is served next"
    assert late.tolist() == [0, 40 * MS, 0, 0], "and is as late as it is: skipping makes no loop punctual"
    assert bench.loop.timing.misses == 1 and bench.robot.counts["late"] == 1
    gaps = np.diff([c.t_ns for c in bench.puppet.written])
    assert gaps.min() >= 0.98 * 10 * MS


def test_run_brings_the_robot_to_rest_however_it_ends(bench):
    bench.order(Order.START)
    bench.run(2)
    bench.plan([[0.9, 0.9]] * 60)
    bench.run(20)
    moving = np.diff([c.target for c in bench.puppet.written[-2:]], axis=0)
    assert np.abs(moving).max() > 0.001
    bench.order(Order.QUIT)
    bench.loop.run()
    assert bench.robot.rung is Rung.STOPPED and bench.puppet.calls[-1] == "deactivate"

    bench.order(Order.START)
    bench.run(1)
    with pytest.raises(KeyboardInterrupt):
        bench.loop.run(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert bench.robot.rung is Rung.STOPPED


def test_a_fault_is_reported_and_recovered_by_order_alone(bench):
    bench.order(Order.START)
    bench.run(2)
    bench.puppet.script.fails["write"] = OSError("unplugged")
    assert bench.run(1) == [None] and bench.robot.phase is Phase.FAULT
    bench.puppet.script.fails.clear()
    bench.order(Order.START)
    bench.run(1)
    assert bench.robot.phase is Phase.FAULT and any("start" in e.text for e in bench.robot.events)
    bench.order(Order.RECOVER)
    bench.run(1)
    bench.order(Order.START)
    bench.run(1)
    assert bench.robot.phase is Phase.ACTIVE


def test_timing_counts_what_it_says():
    timing = Timing(kept=4)
    rows = [
        (10_000, 1000, 5000, False),
        (20_000, 3000, 5000, True),
        (30_000, 2000, 9000, True),
        (40_000, 0, 1000, False),
    ]
    for due, late, work, missed in rows:
        timing.add(due, due + late, due + late + work, missed)
    assert timing.kept().tolist() == [list(row[:3]) for row in rows]
    found = timing.summary()
    assert (found["ticks"], found["misses"], found["longest_run"], found["miss_share"]) == (4, 2, 2, 0.5)
    assert found["late_p50_us"] == 1.5 and found["work_max_us"] == 9.0
    for due in range(5):
        timing.add(due, due + 7000, due + 14000, False)
    assert timing.summary()["late_p50_us"] == 7.0, "the latest ticks are kept"
    assert timing.kept()[:, 0].tolist() == [1, 2, 3, 4]
    assert Timing().summary()["ticks"] == 0 and len(Timing().kept()) == 0


def test_whoever_brakes_in_the_end_gives_signs_of_life(bench, monkeypatch):
    """A watchdog waits for a tenth of a second; braking from full speed takes longer."""
    bench.order(Order.START)
    bench.run(1)
    bench.plan([[0.9, 0.9]] * 4, 10.0)
    bench.run(40)
    told, real = [bench.clock.now_ns()], bench.loop._tell

    def tell(info) -> None:
        told.append(bench.clock.now_ns())
        real(info)

    monkeypatch.setattr(bench.loop, "_tell", tell)
    bench.loop.run(leave=lambda: True)
    assert bench.robot.rung is Rung.STOPPED and told[-1] - told[0] > 100 * MS, "the control: it takes longer"
    assert np.diff(told).max() <= 11 * MS


def linked(**safety) -> RobotLink:
    return RobotLink("twin", {"mjcf": ARM, **LIMITS}, Safety(**{"rate_hz": 100.0, "start_gap_rad": 1.0, **safety}))


def test_a_robot_in_a_process_of_its_own():
    with linked(blend_s=0.1) as link:
        assert link.start().phase is Phase.ACTIVE
        for _ in range(15):
            link.plan(np.tile([0.4, -0.3], (4, 1)), 0.05)
            time.sleep(0.1)
        state = link.state()
        assert np.abs(state.q - [0.4, -0.3]).max() < 0.02, "gravity sags it by 5 mrad"
        assert link.stop().rung is Rung.STOPPED
        report = link.close()
    assert report["counts"]["start"] == 1 and report["timing"]["ticks"] > 100
    assert not link.folder.exists() and not link.alive


def test_a_policy_that_falls_silent_or_dies_leaves_a_robot_at_rest():
    with linked(silent_ramp_s=0.3) as link:
        link.start()
        link.plan([[0.4, -0.3]] * 2, 0.05)
        deadline = time.monotonic() + 10
        while link.state().rung is not Rung.STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert link.state().rung is Rung.STOPPED
        assert any("nobody has asked" in event["text"] for event in link.close()["events"])


PARENT = """
import sys, time
from burnish.real_robot.control.link import RobotLink
from burnish.real_robot.safety.safe_robot import Safety
sys.path.insert(0, sys.argv[1])
from robot_lab import ARM, LIMITS
link = RobotLink("twin", {"mjcf": ARM, **LIMITS}, Safety(rate_hz=100.0))
link.start()
sys.stdout.write(f"{link.pid} {link.folder}\\n")
sys.stdout.flush()
time.sleep(60)
"""


def test_the_control_process_ends_with_its_parent(tmp_path, pytestconfig):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(pytestconfig.rootpath / "tests")], stdout=subprocess.PIPE, text=True
    )
    _, folder = parent.stdout.readline().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    report = os.path.join(folder, "control.json")
    deadline = time.monotonic() + 10
    while not os.path.exists(report) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.path.exists(report), "it did not notice, or did not bring the robot to rest"
    with open(report) as file:
        assert "stopped" in json.load(file)["counts"]
    shutil.rmtree(folder)


def test_what_cannot_be_started_is_one_sentence():
    with pytest.raises(Refused, match="there is no robot 'toaster'; choices: "):
        RobotLink("toaster", {}, SAFETY)
    with pytest.raises(Refused, match="no setting 'speed'"):
        RobotLink("twin", {"mjcf": ARM, "speed": 1}, SAFETY)
    with linked() as link, pytest.raises(Refused, match=r"1 to 64 rows of 2 joint angles, got \(3, 5\)"):
        link.plan(np.zeros((3, 5)), 0.1)


def test_the_control_process_imports_no_torch():
    code = "import sys\nfrom burnish.real_robot.control import link, process\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def moving(link: RobotLink) -> None:
    """On its way to a far place, for as long as the plan lasts."""
    link.start()
    link.plan(np.tile([1.5, -1.5], (64, 1)), 0.05)
    deadline = time.monotonic() + 5
    while np.abs(link.state().qd).max() < 0.2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert np.abs(link.state().qd).max() >= 0.2


def test_a_control_process_that_hangs_is_killed():
    with linked(start_gap_rad=2.0) as link:
        moving(link)
        os.kill(link.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        while link.alive and time.monotonic() < stopped + 5:
            time.sleep(0.002)
        took_s = time.monotonic() - stopped
        assert not link.alive
        assert took_s < 1.0, "a tenth of a second is the limit; the rest is for a busy machine"
        assert "was killed" in link.close()["why"]


def test_without_a_watchman_the_robot_comes_to_rest():
    with linked(start_gap_rad=2.0) as link:
        moving(link)
        assert link._watchdog is not None
        os.kill(link._watchdog.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while link.state().rung is not Rung.STOPPED and time.monotonic() < deadline:
            time.sleep(0.005)
        assert link.state().rung is Rung.STOPPED
        with pytest.raises(RobotError, match="could not start"):
            link.start()
        assert any("nobody watches" in event["text"] for event in link.close()["events"])
