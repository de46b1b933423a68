"""The contract of every policy in the table, and checkpoints that hold everything and execute nothing."""

from __future__ import annotations

import dataclasses
from enum import Enum
from importlib import resources

import pytest
import torch
import yaml

from burnish.policies.build import build_policy, describe, load_policy
from burnish.policies.core.config import from_data, to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec, check_compatible
from burnish.policies.external.table import EXTERNAL_KINDS
from burnish.policies.runs import checkpoint
from burnish.policies.table import POLICIES, policy_name

SPEC = PolicySpec(
    ObsSpec({"state": (3,), "image.top": (3, 16, 16), "goal": (2,)}),
    ActionSpec((-1, 0, 2), (1, 5, 3)),
    horizon=6,
    execute=2,
    start=1,
    history=2,
    control_hz=20.0,
    action_mode="velocity",
)

VLA = ("tiny_vla", "bins")  # observes one frame and no goal, and its chunk begins now
SEEN = ObsSpec({key: shape for key, shape in SPEC.obs.shapes.items() if key != "goal"})
VLA_SPEC = dataclasses.replace(SPEC, obs=SEEN, start=0, history=1)


def choices():
    """Every YAML of the policy group, as the data that a checkpoint would hold, over the defaults of the code."""

    def read(name):
        data = yaml.safe_load(resources.files("burnish.configs").joinpath(f"policy/{name}.yaml").read_text())
        (base,) = data.pop("defaults")
        if base.endswith("_schema"):
            return base.removesuffix("_schema"), data
        kind, below = read(base)
        return kind, below | data

    names = [f.name.removesuffix(".yaml") for f in resources.files("burnish.configs").joinpath("policy").iterdir()]
    return {
        name: read(name)
        for name in sorted(names)
        if name not in ("checkpoint", "bundle", "smolvla", "pi0", *EXTERNAL_KINDS)
    }


CHOICES = choices()


def make(choice, seed=0):
    kind, data = CHOICES[choice]
    return build_policy(from_data(POLICIES[kind].config, data), VLA_SPEC if kind in VLA else SPEC, seed=seed)


def observe(batch, seed=0, choice=""):
    source = torch.Generator().manual_seed(seed)
    obs = {
        "state": torch.randn(batch, 2, 3, generator=source),
        "image.top": torch.randint(0, 256, (batch, 2, 3, 16, 16), generator=source, dtype=torch.uint8),
        "goal": torch.randn(batch, 2, generator=source),
    }
    return obs if choice not in VLA else {key: x[:, 0] for key, x in obs.items() if key != "goal"}


def test_every_policy_of_the_table_has_a_choice():
    assert {kind for kind, _ in CHOICES.values()} == set(POLICIES)


@pytest.mark.parametrize("choice", CHOICES)
def test_contract(choice):
    policy = make(choice)
    obs = observe(4, choice=choice)
    noise = RowNoise([1, 2, 3, 4], [0, 0, 5, 6])
    chunk = policy.act(obs, generator=noise)
    assert chunk.shape == (4, 6, 3) and chunk.dtype == torch.float32
    assert chunk.abs().max() <= 1
    assert torch.equal(chunk, policy.act(obs, generator=RowNoise([1, 2, 3, 4], [0, 0, 5, 6]))), "same noise, same chunk"
    assert torch.equal(policy.act(obs, greedy=True), policy.act(obs, greedy=True)), "greedy is deterministic"
    two = policy.act({key: x[[2, 0]] for key, x in obs.items()}, generator=RowNoise([3, 1], [5, 0]))
    # The noise is the same bit for bit; matrix products may round otherwise for another number of rows.
    torch.testing.assert_close(two, chunk[[2, 0]], rtol=0, atol=1e-5)
    start = torch.randn(4, *policy.spec.chunk_shape, generator=torch.Generator().manual_seed(0))
    a, b = (policy.act(obs, noise=start, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(a, b)
    assert (a - policy.act(obs, noise=-start, generator=torch.Generator().manual_seed(1))).abs().max() > 0
    prefix = torch.full((4, 2, 3), 0.125)
    assert torch.equal(policy.act(obs, prefix=prefix, generator=torch.Generator())[:, :2], prefix)
    assert policy.spec.noise_shape == policy.spec.chunk_shape, "what latent methods steer"
    for wrong in ((1, 6, 3), (4, 1, 3), (4, 6, 1), (4, 3, 6)):
        with pytest.raises(BurnishError, match="the actions have shape"):
            policy.bc_loss(obs, torch.zeros(wrong), generator=torch.Generator())
    for wrong in ((1, 2, 3), (4, 2, 1), (4, 7, 3)):
        with pytest.raises(BurnishError, match="the prefix has shape"):
            policy.act(obs, prefix=torch.zeros(wrong))
    loss = policy.bc_loss(obs, chunk.detach(), mask=torch.ones(4, 6, dtype=torch.bool), generator=torch.Generator())
    assert loss.shape == (4,) and loss.isfinite().all()
    with pytest.raises(BurnishError, match=r"'state' has shape"):
        policy.act({**obs, "state": obs["state"][:, 0]})


@pytest.mark.parametrize("choice", CHOICES)
def test_every_parameter_is_trained_and_no_buffer_moves(choice):
    policy = make(choice)
    before = {name: x.clone() for name, x in policy.named_buffers()}
    loss = policy.bc_loss(
        observe(8, choice=choice), torch.rand(8, 6, 3) * 2 - 1, generator=torch.Generator().manual_seed(0)
    )
    loss.mean().backward()
    idle = {name for name, p in policy.named_parameters() if p.grad is None or not p.grad.any()}
    if choice in VLA:  # the expert reads the keys of the last language layer, and nothing of what that layer makes
        inner, model = ("vla.", policy.vla) if choice == "bins" else ("", policy)
        text = f"{inner}model.vlm_with_expert.vlm.model.text_model."
        last, out = f"{text}layers.{model.config.language.layers - 1}.", "vla.model.action_out_proj"
        film = f"{text.replace('text', 'vision')}film"  # there are no words here
        assert all(name.startswith((last, f"{text}norm", f"{text}embed", film, out)) for name in idle)
        assert len(idle) == (12 if choice == "bins" else 10)  # nor does a head of tokens need the way back to numbers
        return
    # Least squares knows no spread.
    assert idle == ({"raw_std"} if choice == "least_squares" else set())
    assert all(torch.equal(x, before[name]) for name, x in policy.named_buffers())


@pytest.mark.parametrize("choice", CHOICES)
def test_round_trip_through_a_checkpoint_is_bitwise(choice, tmp_path):
    policy = make(choice, seed=3)
    for buffer in policy.buffers():
        buffer.copy_(torch.rand_like(buffer) + 0.5) if buffer.is_floating_point() else None
    checkpoint.save(tmp_path / "policy", config=describe(policy, {"data": "d"}), state=policy.state_dict())
    again, origin = load_policy(tmp_path / "policy")
    assert origin == {"data": "d"}
    assert again.spec == policy.spec and again.config == policy.config
    mine, theirs = policy.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_another_number_of_steps_is_remembered(tmp_path):
    policy = make("flow")
    policy.num_steps = 3
    checkpoint.save(tmp_path / "p", config=describe(policy), state=policy.state_dict())
    assert load_policy(tmp_path / "p")[0].num_steps == 3
    assert load_policy(tmp_path / "p", steps=7)[0].num_steps == 7
    with pytest.raises(BurnishError, match="goal_drop"):
        load_policy(tmp_path / "p", guidance=2.0)
    gaussian = make("gaussian")
    checkpoint.save(tmp_path / "g", config=describe(gaussian), state=gaussian.state_dict())
    with pytest.raises(BurnishError, match="single step"):
        load_policy(tmp_path / "g", steps=7)


FITTING = [
    ("unknown", "ee_delta"),  # a LeRobot set of others, and a world of ours
    ("velocity", "gym:Pendulum-v1"),  # recordings of docs/data.md, and a Gymnasium world
    ("gym:FetchReach-v3", "gym:FetchReachDense-v3"),  # twins
    (None, "ee_delta"),
    ("ee_delta", "ee_delta"),
]


@pytest.mark.parametrize(("ours", "theirs"), [*FITTING, ("ee_delta", "joint_target")])
def test_only_two_action_modes_that_say_something_can_misfit(ours, theirs):
    policy, world = dataclasses.replace(SPEC, action_mode=ours), EnvSpec(SPEC.inputs, SPEC.action, 20.0, theirs, 10)
    if (ours, theirs) in FITTING:
        return check_compatible(policy, world)
    with pytest.raises(BurnishError, match=r"ee_delta, but the environment with .*joint_target.*env\.action_mode=ee_d"):
        check_compatible(policy, world)


def test_silent_action_modes_excuse_no_other_dimension_and_no_other_rate():
    silent = dataclasses.replace(SPEC, action_mode="unknown")
    with pytest.raises(BurnishError, match="acts in 3 dimensions"):
        check_compatible(silent, EnvSpec(SPEC.inputs, ActionSpec((-1,), (1,)), 20.0, "unknown", 10))
    with pytest.raises(BurnishError, match="control_hz=20, but"):
        check_compatible(silent, EnvSpec(SPEC.inputs, SPEC.action, 10.0, "unknown", 10))


@pytest.mark.parametrize("kind", ["flow", "diffusion", "gaussian"])
def test_a_policy_that_dropped_goals_fits_a_world_without_goals_and_another_does_not(kind):
    data = {"goal_drop": 0.2} if kind == "gaussian" else {"net": {"goal_drop": 0.2}}
    free = build_policy(from_data(POLICIES[kind].config, data), SPEC)
    bound = build_policy(POLICIES[kind].config(), SPEC)
    shapes = {key: shape for key, shape in SPEC.inputs.shapes.items() if key != "goal"}
    world = EnvSpec(ObsSpec(shapes), SPEC.action, 20.0, "velocity", 10)
    check_compatible(free.spec, world)
    with pytest.raises(BurnishError, match="goal"):
        check_compatible(bound.spec, world)


@pytest.mark.parametrize("choice", ["flow", "diffusion", "gaussian"])
def test_in_evaluation_mode_a_loss_neither_shifts_images_nor_drops_goals(choice, monkeypatch):
    kind, _ = CHOICES[choice]
    data = {"goal_drop": 0.9} if kind == "gaussian" else {"net": {"goal_drop": 0.9}}
    policy = build_policy(from_data(POLICIES[kind].config, data), SPEC)
    encoder = policy.encoder if kind == "gaussian" else policy.net.encoder
    shifted, hidden = [], []
    join, parts = encoder.join, encoder.parts
    monkeypatch.setattr(encoder, "parts", lambda obs, augment=None: (shifted.append(augment), parts(obs))[1])
    monkeypatch.setattr(encoder, "join", lambda p, drop=None: (hidden.append(drop), join(p, drop=drop))[1])
    for training in (True, False):
        policy.train(training)
        shifted.clear()
        hidden.clear()
        policy.bc_loss(observe(64), torch.zeros(64, 6, 3), generator=torch.Generator().manual_seed(0))
        assert [source is not None for source in shifted] == [training]
        assert (hidden[0] is not None and bool(hidden[0].any())) == training


def test_the_seed_decides_the_weights_and_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = make("flow", 1), make("flow", 1), make("flow", 2)
    assert torch.equal(torch.rand(3), expected)
    weights = [torch.cat([p.flatten() for p in policy.parameters()]) for policy in (one, two, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"policy": "os.system"}, "no policy that this version knows"),
        ({"policy": ["flow"]}, "no policy that this version knows"),
        ({"config": {"stesp": 3}}, "no setting 'stesp'; did you mean 'steps'"),
        ({"config": {"steps": "many"}}, "policy.steps must be int"),
        ({"config": {"net": {"body": "rnn"}}}, "policy.net.body='rnn' is not a choice"),
        ({"config": {"steps": 0}}, "policy.steps=0 must lie between 1 and 1000"),
        ({"config": {"_target_": "os.system"}}, "no setting '_target_'"),
        ({"spec": {"horizon": 3}}, "specification is malformed"),
        ({"config": {"net": {"mlp": {"hidden": [8]}}}}, "do not fit its config.yaml"),
    ],
)
def test_a_checkpoint_that_asks_for_anything_else_is_refused(change, sentence, tmp_path):
    policy = make("flow")
    checkpoint.save(tmp_path / "p", config=describe(policy) | change, state=policy.state_dict())
    with pytest.raises(BurnishError, match=sentence) as refusal:
        load_policy(tmp_path / "p")
    assert "\n" not in str(refusal.value)


@dataclasses.dataclass
class Inner:
    width: int = 3
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])


class Colour(Enum):
    red = "red"


@dataclasses.dataclass
class Outer:
    rate: float = 0.5
    on: bool = False
    colour: Colour = Colour.red
    limit: float | None = None
    inner: Inner = dataclasses.field(default_factory=Inner)


def test_plain_data_round_trip_and_strict_types():
    value = Outer(rate=1e-300, limit=2.5, inner=Inner(7, ["b", "c"]))
    assert from_data(Outer, to_data(value)) == value
    assert from_data(Outer, {"rate": 2}).rate == 2.0 and isinstance(from_data(Outer, {"rate": 2}).rate, float)
    for wrong in (
        {"on": 1},
        {"rate": True},
        {"inner": {"width": 2.0}},
        {"inner": {"names": "abc"}},
        {"colour": "blue"},
    ):
        with pytest.raises(BurnishError):
            from_data(Outer, wrong)


def test_a_config_of_no_policy_is_refused():
    with pytest.raises(BurnishError, match="not the configuration of a policy"):
        policy_name(Inner())
