"""The world that a checkpoint, a dataset or a bundle remembers is a stranger's word: plain settings, and no paths."""

from __future__ import annotations

import math
import os

import pytest
import torch
from verb_lab import refused

from burnish.finetune.api import load
from burnish.policies.__main__ import GROUPS, EvaluateConfig
from burnish.policies.build import build_policy, describe
from burnish.policies.cli.cli import choices, compose, main, to_object
from burnish.policies.cli.machine import say_delivered
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import agent_spec
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.lerobot import write_lerobot
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.runs import checkpoint
from burnish.policies.runs.stored_world import LARGEST_OF, LONGEST, plain_world
from burnish.sim.build import ENVS, Named, make_env, named, origin_of, world_for, world_from
from burnish.sim.external.settings import GymConfig

HOPPER = "Hopper-v5"
PUSH = {"name": "gym", "config": {"id": "pytest/Push-v0"}}
SAY_IT = "say it yourself, for example env=gym"


def stored(**kwargs) -> dict:
    return {"name": "gym", "config": {"id": HOPPER, "kwargs": kwargs}}


REFUSED = {
    "a path": stored(xml_file="/etc/hostname"),
    "a path of Gymnasium's own": stored(xml_file="hopper.xml"),  # the name is what counts
    "a path under a harmless name": stored(camera_name="../../secret"),
    "a path with backslashes": stored(camera_name="..\\secret"),
    "a mapping of anything": stored(default_camera_config={"distance": 4}),
    "an argument of make": stored(disable_env_checker=False),
    "pictures of 60 GB": stored(width=100_000, height=100_000),
    "a number without end": stored(frame_skip=math.inf),
    "not a number": stored(reset_noise_scale=math.nan),
    "an integer of thousands of digits": stored(frame_skip=10**5000),
    "a long list": stored(healthy_z_range=[0.0] * (LONGEST + 1)),
    "a deep list": stored(healthy_z_range=[[[[[0.0]]]]]),
    "a long word": stored(camera_name="x" * 81),
    "an id that climbs": {"name": "gym", "config": {"id": "../../Hopper-v5"}},
    "episodes without end": {"name": "point_reach", "config": {"max_steps": 10**9}},
    "a space of 10^6 dimensions": {"name": "point_reach", "config": {"dim": 10**6}},
    "a matrix of 10^8 numbers": {"name": "lqr", "config": {"axes": 10**4}},
    "cameras without end": {"name": "reach", "config": {"observe": "pixels", "cameras": ["wrist"] * 1000}},
    "large pictures": {"name": "reach", "config": {"image_size": 30_000}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_stored_world_says_plain_settings_alone(name):
    with pytest.raises(BurnishError, match=SAY_IT) as refusal:
        world_from(REFUSED[name])
    assert len(str(refusal.value)) < 600
    # The control: what the user names is not judged here, but by the world itself.
    if name != "an integer of thousands of digits":
        named_one = Named(REFUSED[name])
        try:
            world_from(named_one)
        except BurnishError as error:
            assert SAY_IT not in str(error)


@pytest.mark.parametrize("data", ["gym", [], None, {"name": ["gym"]}, {"name": "gym", "config": "x"}, {"config": {}}])
def test_a_stored_world_of_another_form_is_one_sentence(data):
    with pytest.raises(BurnishError):
        world_from(data)


def shipped() -> list[str]:
    return [*ENVS, *(name for name in choices(GROUPS["evaluate"])["env"])]


@pytest.mark.parametrize("name", sorted(set(shipped()) - {"remote"}))  # which a file may not name
def test_every_world_that_ships_may_be_stored(name):
    """Otherwise nothing that was trained could be evaluated without saying env=... again."""
    words = ["policy=checkpoint", "policy.path=x", f"env={name}"]
    config = to_object(compose("evaluate", EvaluateConfig, GROUPS["evaluate"], words)).env
    assert world_from(dict(named(config))) == config


@pytest.mark.parametrize(
    "kwargs",
    [
        {"healthy_z_range": [0.7, math.inf]},
        {"forward_reward_weight": 2, "terminate_when_unhealthy": False},
        {"render_mode": "rgb_array", "width": LARGEST_OF["width"], "height": LARGEST_OF["height"]},
        {"frame_skip": LARGEST_OF["frame_skip"]},
    ],
)
def test_harmless_arguments_of_gymnasium_may_be_stored(kwargs):
    assert world_from(stored(**kwargs)).kwargs == kwargs


def test_numbers_are_bounded_at_their_limits():
    for name, most in LARGEST_OF.items():
        plain_world({name: most}, "a test")
        with pytest.raises(BurnishError, match="beyond"):
            plain_world({name: most + 1}, "a test")


@pytest.fixture
def planted(tmp_path):
    """A checkpoint and a dataset of a world whose description waits for ever: its file is a pipe."""
    pipe = tmp_path / "pipe.xml"
    os.mkfifo(pipe)
    env = make_env(GymConfig(id=HOPPER), 1)
    policy = build_policy(GaussianConfig(hidden=[4]), agent_spec(env.spec))
    world = {"name": "gym", "config": {"id": HOPPER, "kwargs": {"xml_file": str(pipe)}}}
    checkpoint.save(tmp_path / "p", config=describe(policy, {"env": world}), state=policy.state_dict())
    width = env.spec.obs.shapes["state"][0]
    episode = Episode({"state": torch.zeros(4, width)}, torch.zeros(3, 3), torch.zeros(3), True, False, False, 0)
    write_lerobot(Episodes([episode, episode], env.spec, {"env": world}), tmp_path / "d")
    return tmp_path


VERBS = {
    "evaluate": ("evaluate", "policy.path={0}/p"),
    "evaluate against": ("evaluate", "policy.path={0}/p", "against={0}/p"),
    "collect": ("collect", "policy.path={0}/p", "out={0}/o"),
    "view": ("view", "policy.path={0}/p"),
    "pretrain": ("pretrain", "policy=gaussian", "data={0}/d", "out={0}/o"),
    "offline": ("offline", "method=iql", "data={0}/d", "out={0}/o"),
    "finetune": ("finetune", "method=residual_td3", "policy.path={0}/p", "out={0}/o"),
    "distill": ("distill", "teachers={0}/p", "out={0}/o"),
    "deploy": ("deploy", "policy.path={0}/p", "robot=twin"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_opens_a_file_that_a_stored_world_names(planted, verb, capsys):
    """On a pipe the old code waited for ever: the timeout of the suite, or of the person, ended it."""
    assert main([word.format(planted) for word in VERBS[verb]]) == 2
    said = capsys.readouterr().err
    assert "env.kwargs.xml_file" in said and SAY_IT in said and len(said.splitlines()) == 1


def test_no_bundle_opens_a_file_that_its_world_names(planted, capsys):
    assert main(["export", f"policy.path={planted}/p", f"out={planted}/b"]) == 0
    assert "env.kwargs.xml_file" in refused(capsys, "deploy", "policy=bundle", f"policy.path={planted}/b", "robot=twin")


def test_what_the_user_types_of_a_world_is_used(planted, capsys):
    """Also where a stored world says otherwise: then the user's is the one that counts."""
    words = ["evaluate", f"policy.path={planted}/p", "eval.episodes=1", "env=gym", f"env.id={HOPPER}"]
    (planted / "other.xml").write_text("<mujoco")
    assert main([*words, f"env.kwargs={{xml_file: {planted}/other.xml}}"]) == 2
    assert "XML" in capsys.readouterr().err  # it was opened, and is none
    assert main([*words, "env.kwargs={xml_file: hopper.xml}", "env.max_steps=5"]) == 0


def test_a_world_in_python_is_the_users_own_word(planted):
    policy = load(planted / "p")
    view = world_for(
        policy.spec, origin_of(GymConfig(id=HOPPER, kwargs={"xml_file": "hopper.xml"})), 1, torch.device("cpu")
    )
    assert view.num_envs == 1


def test_the_name_of_a_stored_world_is_joined_to_no_path(planted, tmp_path, capsys):
    """``compare`` looks for experiments of the task by that name."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "dsrl.yaml").write_text("defaults: [{override /method: dsrl}]\n")
    saved = checkpoint.load(planted / "p")
    config = saved.config | {"origin": {"env": {"name": str(tmp_path / "mine"), "config": {}}}}
    checkpoint.save(tmp_path / "q", config=config, state=saved.state)
    assert main(["compare", f"base={tmp_path}/q", "methods=mine_alone", f"out={tmp_path}/o"]) == 2
    assert "dsrl" in capsys.readouterr().err  # a choice among the methods, but no experiment of that folder


@pytest.mark.parametrize(
    ("world", "imports", "named"),
    [
        ({"name": "two_mode", "config": {}}, "", ""),
        (stored(width=64), "", ""),
        (None, "", " env=..."),
        (stored(xml_file="my.xml"), "", " env=..."),
        (Named(stored(xml_file="my.xml")), "", " env=..."),
        (PUSH, "", " env=..."),  # imported in this process alone
        (Named(PUSH), "", " env=gym env.id=pytest/Push-v0"),
        (PUSH, "pytest", ""),
    ],
)
def test_the_command_that_a_verb_prints_names_the_world_where_the_file_may_not(
    world, imports, named, capsys, monkeypatch
):
    monkeypatch.setenv("BURNISH_IMPORT", imports)
    say_delivered("my policy", world, "against=runs/bc")
    command = "burnish evaluate 'policy.path=my policy' against=runs/bc" + named
    assert capsys.readouterr().out == f"policy: my policy  ({command})\n"
