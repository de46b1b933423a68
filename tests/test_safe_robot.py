"""Every rung of the ladder, entered for every reason and left again; and that nothing else makes commands."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from burnish.real_robot.adapter import Fault, GripperSpec, Phase, StopKind
from burnish.real_robot.clock import VirtualClock, ns
from burnish.real_robot.errors import DeviceFault, Refused, StaleState
from burnish.real_robot.safety.safe_robot import Rung, SafeRobot, Safety
from robot_lab import Puppet, spec, twin

SAFETY = Safety(rate_hz=100.0, blend_s=0.0, start_gap_rad=2.0)
PERIOD_S = 0.01


def running(safety: Safety = SAFETY, robot: Puppet | None = None, **more) -> tuple[SafeRobot, Puppet]:
    puppet = robot or Puppet()
    safe = SafeRobot(puppet, safety, **more)
    safe.start()
    return safe, puppet


def ticks(safe: SafeRobot, count: int, request, **more) -> list:
    found = []
    for _ in range(count):
        safe.clock.sleep_until_ns(safe.clock.now_ns() + ns(PERIOD_S))
        if safe.rung is Rung.STOPPED:
            break
        found.append(safe.step(request, **more))
    return found


def test_it_begins_where_the_robot_is_and_follows_what_is_asked():
    puppet = Puppet()
    puppet.q = np.array([0.3, -0.2])
    safe, _ = running(robot=puppet)
    assert safe.rung is Rung.RUN and safe.phase is Phase.ACTIVE
    first = ticks(safe, 1, [0.3, -0.2])[0]
    assert np.array_equal(first.sent, [0.3, -0.2]) and not first.changed, "the first command moves nothing"
    last = ticks(safe, 100, [0.5, 0.1])[-1]
    assert np.array_equal(last.sent, [0.5, 0.1]) and last.rung is Rung.RUN and not last.changed
    speeds = np.diff([c.target for c in puppet.written], axis=0) / PERIOD_S
    assert np.abs(speeds).max() <= 2.0 * (1 + 1e-9) and np.abs(speeds).max() > 0.5
    assert safe.counts["velocity"] + safe.counts["acceleration"] > 0


def test_a_command_says_when_it_expires_and_which_state_caused_it():
    safe, puppet = running()
    info = ticks(safe, 1, [0.0, 0.0])[0]
    sent = puppet.written[-1]
    assert sent.obs_seq == info.state.seq and sent.valid_until_ns - sent.t_ns == ns(PERIOD_S)
    assert [c.seq for c in puppet.written] == list(range(1, len(puppet.written) + 1))


def test_two_commands_are_never_nearer_than_a_period():
    """A caller that steps in a burst is held up; the guard's promise is per command."""
    safe, puppet = running()
    for _ in range(20):
        safe.step([0.5, 0.5])  # the clock moves only by what is waited for
    gaps = np.diff([c.t_ns for c in puppet.written])
    assert gaps.min() >= ns(PERIOD_S) * 0.98


@pytest.mark.parametrize("bad", [[np.nan, 0.0], [0.0], "up", object(), [[0.0, 0.0]], [np.inf, 0.0]], ids=range(6))
def test_bad_requests_brake_and_then_stop(bad):
    safe, puppet = running()
    ticks(safe, 30, [0.9, 0.9])
    few = ticks(safe, SAFETY.bad_in_a_row - 1, bad)
    assert all(info.rung is Rung.RUN for info in few) and safe.counts["bad"] == len(few)
    ticks(safe, 1, [0.9, 0.9])
    assert safe.rung is Rung.RUN, "a good one forgives"
    found = ticks(safe, 60, bad)
    assert found[-1].rung is Rung.STOPPED and puppet.calls[-2:] == ["stop hold", "deactivate"]
    moves = np.diff([c.target for c in puppet.written], axis=0) / PERIOD_S
    assert np.abs(np.diff(moves, axis=0)).max() / PERIOD_S <= 10 * (1 + 1e-6), "it brakes with the limit, no harder"
    assert np.isfinite([c.target for c in puppet.written]).all()


def test_silence_holds_and_a_longer_one_stops():
    safe, _ = running()
    ticks(safe, 40, [0.9, 0.9])
    held = ticks(safe, 50, None)
    assert {info.rung for info in held} == {Rung.HOLD} and np.array_equal(held[-1].sent, held[-2].sent)
    assert ticks(safe, 1, [0.9, 0.9])[0].rung is Rung.RUN, "it comes back by itself"
    assert ticks(safe, 120, None)[-1].rung is Rung.STOPPED
    assert any("nobody has asked" in event.text for event in safe.events)


def test_before_the_first_request_it_waits_for_ever():
    safe, _ = running()
    assert ticks(safe, 500, None)[-1].rung is Rung.HOLD


def test_old_states_hold_then_stop():
    safe, puppet = running()
    ticks(safe, 20, [0.9, 0.9])
    puppet.script.mute = True
    rungs = [info.rung for info in ticks(safe, 40, [0.9, 0.9])]
    assert Rung.HOLD in rungs[:5] and rungs[-1] is Rung.STOPPED
    ramped = rungs.index(Rung.RAMP) * PERIOD_S
    assert ramped <= SAFETY.stale_ramp_s + 2 * PERIOD_S, "the ramp began later than the age allows"


def test_a_short_gap_in_the_states_is_only_a_hold():
    safe, puppet = running()
    ticks(safe, 20, [0.9, 0.9])
    puppet.script.mute = True
    infos = ticks(safe, 5, [0.9, 0.9])
    assert not infos[-1].fresh and infos[-1].rung is Rung.HOLD
    puppet.script.mute = False
    assert ticks(safe, 1, [0.9, 0.9])[0].rung is Rung.RUN


def test_missed_deadlines_slow_it_down_and_stop_it():
    safe, _ = running()
    ticks(safe, 60, [0.9, 0.9])
    infos = ticks(safe, SAFETY.ramp_after - 1, [-0.9, -0.9], late=True)
    assert infos[1].rung is Rung.RUN and infos[2].rung is Rung.SLOW and infos[-1].rung is Rung.SLOW
    assert ticks(safe, 1, [-0.9, -0.9])[0].rung is Rung.RUN
    for _ in range(60):
        ticks(safe, 2, [-0.9, -0.9], late=True)
        ticks(safe, 1, [-0.9, -0.9])
    assert safe.rung is Rung.RUN
    assert ticks(safe, 100, [0.9, 0.9], late=True)[-1].rung is Rung.STOPPED


def test_slow_is_half_of_the_speed():
    safe, puppet = running(replace(SAFETY, ramp_after=10_000))
    ticks(safe, 5, [-0.9, -0.9], late=True)
    ticks(safe, 60, [0.9, 0.9], late=True)
    speeds = np.diff([c.target for c in puppet.written], axis=0) / PERIOD_S
    assert speeds.max() == pytest.approx(1.0)


def test_an_arm_that_does_not_follow_is_stopped():
    safe, puppet = running()
    puppet.script.stuck = True
    found = ticks(safe, 200, [0.5, 0.5])
    assert found[-1].rung is Rung.STOPPED and any("from its set-points" in event.text for event in safe.events)
    # The set-point never runs away from the arm by more than what is allowed and the way of braking (V^2 / 2A + V h)
    # after `following_s` at V.
    assert np.abs(found[-1].sent).max() <= SAFETY.following_rad + 2.0 * SAFETY.following_s + 0.2 + 0.02


@pytest.mark.parametrize("what", ["estop", "fault"])
def test_what_the_robot_reports_stops_it_and_forbids_a_start(what):
    safe, puppet = running()
    setattr(puppet.script, what, True if what == "estop" else Fault("hot", "motor 3 is hot", 0))
    assert ticks(safe, 60, [0.1, 0.1])[-1].rung is Rung.STOPPED
    with pytest.raises(Refused, match=r"emergency stop|motor 3 is hot"):
        safe.start()


def test_a_fault_of_the_device_stops_at_once_and_needs_a_person():
    safe, puppet = running()
    puppet.script.fails["write"] = OSError("unplugged")
    with pytest.raises(DeviceFault, match="unplugged"):
        ticks(safe, 1, [0.1, 0.1])
    assert safe.rung is Rung.STOPPED and safe.phase is Phase.FAULT and puppet.calls[-1] == "stop hold"
    with pytest.raises(Refused, match="not started"):
        safe.step([0.1, 0.1])
    puppet.script.fails.clear()
    safe.recover()
    safe.start()
    assert ticks(safe, 1, [0.0, 0.0])[0].rung is Rung.RUN


def test_who_does_not_answer_at_rest_is_begun_anew_by_order_alone():
    safe, puppet = running()
    safe.stop()
    puppet.script.mute = True
    with pytest.raises(StaleState, match=r"mute; if that stays so, look at the robot, then call recover\(\)"):
        safe.start()
    assert safe.phase is Phase.INACTIVE and "recover" not in puppet.calls
    puppet.script.mute = False
    safe.recover()
    assert puppet.calls[-1] == "recover" and safe.phase is Phase.INACTIVE and safe.rung is Rung.STOPPED
    safe.start()
    assert ticks(safe, 1, [0.0, 0.0])[0].rung is Rung.RUN


def test_stop_ramps_then_holds_and_can_be_called_again():
    safe, puppet = running()
    ticks(safe, 30, [0.9, 0.9])
    count = len(puppet.written)
    safe.stop()
    safe.stop()
    assert safe.rung is Rung.STOPPED and safe.phase is Phase.INACTIVE
    moves = np.diff([c.target for c in puppet.written[count - 3 :]], axis=0) / PERIOD_S
    assert np.abs(moves[-1]).max() == 0 and np.abs(np.diff(moves, axis=0)).max() / PERIOD_S <= 10 * (1 + 1e-6)
    safe.start()
    safe.stop(StopKind.HOLD)
    assert puppet.calls[-2:] == ["stop hold", "deactivate"]


def test_stop_survives_a_device_that_fails_while_braking():
    safe, puppet = running()
    ticks(safe, 30, [0.9, 0.9])
    puppet.script.fails["write"] = OSError("unplugged")
    safe.stop()
    assert safe.rung is Rung.STOPPED
    safe.close()
    assert safe.phase is Phase.CLOSED


def test_a_first_request_from_elsewhere_is_not_followed():
    safe, puppet = running(replace(SAFETY, start_gap_rad=0.5))
    found = ticks(safe, 10, [0.9, 0.0])
    assert found[-1].rung is Rung.STOPPED and np.array_equal(puppet.written[-1].target, [0.0, 0.0])
    assert safe.counts["gap"] == 1


@pytest.mark.parametrize(
    "bad",
    [[np.nan, 0.0], object(), 0.0, [0.0], [[0.0, 0.0]], [[0.0], [0.0]], [[]], ["0.0", "0.0"], [False, False]],
    ids=["nan", "object", "scalar", "one number", "row", "column", "empty", "text", "truth"],
)
def test_a_malformed_first_request_leaves_the_check_of_the_first_gap_on(bad):
    """Also one that arithmetic would spread over all joints. The gap is looked at again when numbers come."""
    safe, _ = running(replace(SAFETY, start_gap_rad=0.5))
    assert ticks(safe, 2, bad)[-1].rung is Rung.RUN
    assert ticks(safe, 10, [0.9, 0.0])[-1].rung is Rung.STOPPED and safe.counts["gap"] == 1


def test_a_stop_ends_even_if_the_device_will_not_let_go():
    safe, puppet = running()
    ticks(safe, 30, [0.9, 0.9])
    puppet.script.fails["deactivate"] = OSError("busy")
    safe._protection.longest = 2  # fewer ticks than braking takes
    safe.stop()
    assert safe.rung is Rung.STOPPED and puppet.calls[-2:] == ["stop hold", "deactivate"]
    assert any(event.kind == "deactivate" and "busy" in event.text for event in safe.events)


def test_where_a_simulated_robot_is():
    safe = SafeRobot(twin(), SAFETY)
    safe.start()
    truth = safe.truth()
    assert truth is not None and np.abs(truth).max() < 0.01 and SafeRobot(Puppet(), SAFETY).truth() is None


def test_speed_is_blended_in():
    safe, puppet = running(replace(SAFETY, blend_s=1.0))
    ticks(safe, 60, [0.4, 0.4])
    speeds = np.diff([c.target for c in puppet.written], axis=0)[:, 0] / PERIOD_S
    allowed = 2.0 * (np.arange(1, len(speeds) + 1) + 2) * PERIOD_S
    assert (speeds <= allowed).all() and speeds.max() > 0.3


def test_and_anew_when_somebody_else_asks():
    """Far away and up to speed; then the other way, with as little speed as after the start."""
    for again in (True, False):
        safe, puppet = running(replace(SAFETY, blend_s=0.5))
        ticks(safe, 100, [0.9, 0.9])
        begun = len(puppet.written)
        if again:
            safe.blend()
        ticks(safe, 10, [-0.9, -0.9])
        speeds = -np.diff([c.target for c in puppet.written[begun:]], axis=0)[:, 0] / PERIOD_S
        allowed = 4.0 * (np.arange(1, len(speeds) + 1) + 2) * PERIOD_S
        assert bool((speeds <= allowed).all()) == again, "without it, it is faster"


def test_refusals_before_anything_moves():
    with pytest.raises(Refused, match=r"no watchdog of its own.*no_device_watchdog"):
        SafeRobot(Puppet(robot=spec(device_watchdog_s=None)), SAFETY).start()
    safe = SafeRobot(Puppet(robot=spec(device_watchdog_s=None)), replace(SAFETY, no_device_watchdog=True))
    safe.start()
    outside = Puppet()
    outside.q = np.array([1.2, 0.0])
    with pytest.raises(Refused, match=r"j0 .* 0.200 rad outside"):
        SafeRobot(outside, SAFETY).start()
    assert "activate" not in outside.calls
    nearly = Puppet()
    nearly.q = np.array([1.05, 0.0])  # nearer than `outside_rad`: it begins where it is (test_outside_starts.py)
    assert np.array_equal(ticks(running(robot=nearly)[0], 1, None)[0].sent, [1.05, 0.0])
    with pytest.raises(Refused, match="at 1 to 1000 Hz"):
        SafeRobot(Puppet(), replace(SAFETY, rate_hz=2000.0))
    with pytest.raises(Refused, match="not started"):
        SafeRobot(Puppet(), SAFETY).step([0, 0])


WRONG = ["rate_hz", "start_gap_rad", "stale_hold_periods", "stale_ramp_s", "silent_ramp_s", "following_rad", "share"]


@pytest.mark.parametrize("name", [*WRONG, "bad_in_a_row", "slow_after", "ramp_after"])
def test_settings_are_checked(name):
    with pytest.raises(Refused):
        replace(SAFETY, **{name: 0})
    with pytest.raises(Refused):
        replace(SAFETY, blend_s=-1.0)


def test_a_robot_slows_down_before_it_brakes():
    with pytest.raises(Refused, match="slow_after=11 must be at most ramp_after=10"):
        replace(SAFETY, slow_after=11, ramp_after=10)


def test_an_advisor_can_only_be_more_careful():
    asked, limit = [0.4, 0.4], 2.0
    for advice in (0.0, 0.25, 1.0, 7.0, -1.0, float("nan"), "fast", None):
        safe, puppet = running(advisor=lambda state, request, advice=advice: advice)
        ticks(safe, 100, asked)
        speeds = np.abs(np.diff([c.target for c in puppet.written], axis=0)) / PERIOD_S
        share = advice if advice in (0.25, 1.0) else 0.0
        assert speeds.max() <= share * limit + 1e-9, advice
        assert safe.rung is Rung.RUN

    def broken(state, request):
        raise RuntimeError("no network")

    safe, puppet = running(advisor=broken)
    ticks(safe, 10, asked)
    assert np.array_equal(puppet.written[-1].target, [0.0, 0.0]) and safe.counts["advisor"] == 10


def test_the_gripper_is_a_channel_of_its_own():
    robot = Puppet(robot=spec(gripper=GripperSpec(width_m=0.08, speed_m_s=0.08)))
    safe, _ = running(robot=robot)
    ticks(safe, 10, [0.0, 0.0], gripper=1.0)
    assert robot.written[-1].gripper == pytest.approx(0.5 + 10 * PERIOD_S), "as fast as it can, from where it was"
    for bad in (float("nan"), "wide", [1.0, 2.0]):
        before = robot.written[-1].gripper
        ticks(safe, 1, [0.0, 0.0], gripper=bad)
        assert robot.written[-1].gripper == before
    ticks(safe, 300, [0.0, 0.0], gripper=-5.0)
    assert robot.written[-1].gripper == 0.0
    ticks(safe, 5, None, gripper=1.0)
    assert robot.written[-1].gripper == 0.0, "it is held while the arm is held"


def test_on_a_model_with_latency_noise_and_losses():
    clock = VirtualClock()
    arm = twin(clock, command_latency_s=0.01, state_latency_s=0.008, jitter_s=0.004, noise_rad=0.002, drop=0.1, seed=3)
    safe = SafeRobot(arm, SAFETY)
    safe.start()
    infos = ticks(safe, 300, [0.4, -0.3])
    assert infos[-1].rung is Rung.RUN
    # The servos hold against gravity with kp=300: 0.2 kg at 0.1 and 0.3 m sag by less than 5 mrad; noise is 2 mrad.
    assert np.abs(infos[-1].state.q - [0.4, -0.3]).max() < 0.015


ROOT = Path(__file__).resolve().parents[1] / "real_robot"


def makers(tree: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) and ast.unparse(n.func).split(".")[-1] == "Command" for n in ast.walk(tree))


def test_nothing_else_makes_commands():
    """`adapter_checks` tries adapters without a robot to be safe for; it is run by those who write them."""
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if makers(ast.parse(path.read_text()))}
    assert files - {"adapter_checks.py"} == {"safety/safe_robot.py"}
    assert makers(ast.parse("adapter.Command(1)")) and not makers(ast.parse("x: Command"))
