"""LeRobot's checkpoints: the same actions as LeRobot's own code gives, and a refusal where that is not certain.

`tests/lerobot_policies` holds three small policies that LeRobot 0.4.4 made and saved, each with `recorded.safetensors`:
observations, the noise of the generation and of each of its steps, and LeRobot's actions in units of the data.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from burnish.finetune.api import load, refine, save
from burnish.policies import chain
from burnish.policies.build import build_policy, load_policy
from burnish.policies.controllers import controller_for
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import Scale
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.core.wrapper import Wrapper
from burnish.policies.data.lerobot_layout import key_of
from burnish.policies.lerobot.checkpoint import fingerprint
from burnish.policies.lerobot.diffusion import LeRobotDiffusionConfig, LeRobotNetConfig, VisionBackboneConfig
from burnish.policies.lerobot.features import Feature, Kind
from burnish.policies.lerobot.scaling import Normalization
from burnish.policies.nets.resnet import Norm, resnet
from burnish.sim.collect import stream
from burnish.sim.point_reach import PointReach, PointReachConfig

STORED = Path(__file__).parent / "lerobot_policies"
NAMES = ["diffusion_ddpm", "diffusion_ddim", "act"]
CLOSE = 1e-5  # of actions around 1: sums of some hundred float32 products in another order


class AsLeRobot(Wrapper):
    """A point in space that goes to a goal, observed under LeRobot's names and with its shapes."""

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        super().__init__(PointReach(num_envs, PointReachConfig(dim=3, max_steps=12), seed=seed))
        obs = ObsSpec({"state": (4,), "environment_state": (6,)})
        self.spec = replace(self.env.spec, obs=obs, control_hz=10.0, action_mode="")

    def reset(self, mask=None, seeds=None):
        return self._seen(self.env.reset(mask, seeds))

    def step(self, action, active=None):
        step = self.env.step(action.clamp(-1, 1), active)
        return step._replace(obs=self._seen(step.obs))

    def _seen(self, obs):
        pad = torch.nn.functional.pad
        return {"state": pad(obs["state"], (0, 1)), "environment_state": pad(obs["goal"], (0, 3))}


def recorded(name):
    """(observations here, noise, noise of each step, actions) of a stored policy."""
    data = load_file(STORED / name / "recorded.safetensors")
    obs = {key_of(key, image=False): x for key, x in data.items() if key.startswith("observation.")}
    if name == "act":
        obs = {key: x[:, 0] for key, x in obs.items()}
    return obs, data.get("noise"), data.get("draws"), data["chunk"]


def chunk_of(policy, name, monkeypatch):
    obs, noise, draws, _ = recorded(name)
    if draws is not None:
        steps = iter(draws)
        monkeypatch.setattr(chain, "normal", lambda *args, **kwargs: next(steps))
    with torch.no_grad():
        return Scale(policy.spec.action).to_actuator(policy.act(obs, noise=noise))


@pytest.fixture
def copy(tmp_path):
    """A copy of a stored policy, to be changed."""

    def made(name="diffusion_ddpm"):
        return Path(shutil.copytree(STORED / name, tmp_path / name))

    return made


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_those_of_lerobot(name, monkeypatch):
    policy, _ = load_policy(STORED / name)
    expected = recorded(name)[3]
    assert (chunk_of(policy, name, monkeypatch) - expected).abs().max() < CLOSE
    scaling = next(module for key, module in policy.named_modules() if key.endswith("state") and "inputs" in key)
    scaling.second += 0.1  # the control: another statistic, other actions
    assert (chunk_of(policy, name, monkeypatch) - expected).abs().max() > 10 * CLOSE


@pytest.mark.parametrize("name", NAMES)
def test_it_is_saved_and_found_again_without_the_folder(name, tmp_path, monkeypatch):
    save(load(STORED / name), tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert (chunk_of(again, name, monkeypatch) - recorded(name)[3]).abs().max() < CLOSE


def older(folder):
    """As before LeRobot 0.4: no processors, and the statistics among the weights."""
    weights = load_file(folder / "model.safetensors")
    kept = load_file(next(folder.glob("policy_preprocessor*.safetensors")))
    for key, x in kept.items():
        feature, _, statistic = key.rpartition(".")
        group = "unnormalize_outputs" if feature == "action" else "normalize_inputs"
        weights[f"{group}.buffer_{feature.replace('.', '_')}.{statistic}"] = x
    for file in folder.glob("policy_*"):
        file.unlink()
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_statistics_among_the_weights_are_read_too(name, copy, monkeypatch):
    folder = copy(name)
    older(folder)
    policy, _ = load_policy(folder)
    assert (chunk_of(policy, name, monkeypatch) - recorded(name)[3]).abs().max() < CLOSE


def test_another_weight_or_statistic_is_another_policy(copy):
    folder = copy()
    before = fingerprint(folder)
    file = next(folder.glob("policy_postprocessor*.safetensors"))
    save_file({key: x + 0 for key, x in load_file(file).items()}, file)
    assert fingerprint(folder) == before, "the control: written anew, but the same"
    save_file({key: x + 1 for key, x in load_file(file).items()}, file)
    assert fingerprint(folder) != before


# ---- Refusals ----


def settings(**changes):
    def change(folder):
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(found | changes))

    return change


def processor(step, **changes):
    def change(folder):
        path = folder / "policy_preprocessor.json"
        found = json.loads(path.read_text())
        found["steps"][step] |= changes
        path.write_text(json.dumps(found))

    return change


def statistics(rename=lambda key: key, value=lambda x: x):
    def change(folder):
        for file in folder.glob("policy_*.safetensors"):
            found = {rename(key): value(x) for key, x in load_file(file).items()}
            save_file({key: x for key, x in found.items() if key}, file)

    return change


def weights(rename):
    def change(folder):
        file = folder / "model.safetensors"
        save_file({rename(key): x for key, x in load_file(file).items()}, file)

    return change


def without_processors(folder):
    for file in folder.glob("policy_*"):
        file.unlink()


def link(folder):
    (folder / "model.safetensors").rename(folder / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder / "elsewhere")


REFUSED = {
    "a setting that is not known": (settings(attention_sink=4), "attention_sink"),
    "another type": (settings(type="vqbet"), "vqbet"),
    "an adapter": (settings(use_peft=True), "use_peft"),
    "another normalisation": (settings(normalization_mapping={"STATE": "SQUASH"}), "SQUASH"),
    "a normalisation of its own in the processor": (
        settings(normalization_mapping={"STATE": "MEAN_STD", "ACTION": "MIN_MAX"}),
        "otherwise",
    ),
    "clipped outside [-1, 1]": (settings(clip_sample_range=2.0), "clips"),
    "not clipped": (settings(clip_sample=False), "clip_sample"),
    "another scheduler": (settings(noise_scheduler_type="EDM"), "EDM"),
    "a horizon of other weights": (settings(down_dims=[8, 32]), "do not fit"),
    "a setting that is not known, and off": (settings(attention_sink=False), "attention_sink"),
    "a word for a number": (settings(kernel_size="5"), "kernel"),
    "a number for a list": (settings(down_dims=8), "channels"),
    "a list for a word": (settings(noise_scheduler_type=["DDPM"]), "noise_scheduler_type"),
    "a list for the settings of a step": (processor(3, config=["eps"]), "malformed step"),
    "a list for its normalisation": (processor(3, config={"norm_map": []}), "malformed step"),
    "a picture without a camera": (
        settings(input_features={"observation.images.top": {"type": "VISUAL", "shape": [1, 8, 8]}}),
        "does not fit its type",
    ),
    "two outputs": (settings(output_features={}), "one vector 'action'"),
    "a step that changes numbers": (processor(1, registry_name="delta_action_processor"), "delta_action_processor"),
    "a renamed observation": (processor(0, config={"rename_map": ["observation.state"]}), "malformed rename_map"),
    "half precision": (processor(2, config={"float_dtype": "float16"}), "float16"),
    "a file elsewhere": (processor(3, state_file="../model.safetensors"), "names no file"),
    "no statistics": (without_processors, "needs its statistic"),
    "statistics under another name": (statistics(lambda key: key.replace("state", "joints")), "needs its statistic"),
    "a statistic that is missing": (statistics(lambda key: "" if key == "action.max" else key), "'max'"),
    "a statistic that is not finite": (statistics(value=lambda x: x / 0), "finite"),
    "weights under another name": (weights(lambda key: key.replace("unet", "net")), "do not fit"),
    "a link": (link, "no plain file"),
}


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused(change, sentence, copy):
    folder = copy()
    load_policy(folder)  # the control
    change(folder)
    with pytest.raises(BurnishError, match=sentence) as refusal:
        load_policy(folder)
    assert "\n" not in str(refusal.value)


def test_limits_of_another_shape_are_refused(copy):
    """ACT is clipped to the smallest and largest action of its data, which its normalisation does not use."""
    folder = copy("act")
    load_policy(folder)  # the control
    for file in folder.glob("policy_*.safetensors"):
        found = load_file(file)
        save_file({key: x[:1] if key == "action.max" else x for key, x in found.items()}, file)
    with pytest.raises(BurnishError, match="finite numbers"):
        load_policy(folder)


def test_temporal_ensembling_is_refused(copy):
    folder = copy("act")
    settings(temporal_ensemble_coeff=0.01)(folder)
    with pytest.raises(BurnishError, match="temporal_ensemble_coeff"):
        load_policy(folder)


def test_other_names_of_observations(monkeypatch):
    policy, _ = load_policy(STORED / "act", keys={"state": "environment_state", "environment_state": "state"})
    obs, _, _, expected = recorded("act")
    swapped = {"state": obs["environment_state"], "environment_state": obs["state"]}
    with torch.no_grad():
        chunk = Scale(policy.spec.action).to_actuator(policy.act(swapped))
    assert (chunk - expected).abs().max() < CLOSE
    for keys, sentence in (
        ({"image.front": "image.top"}, "has no observation"),
        ({"image.front": "state"}, "pictures"),
        ({"environment_state": "state"}, "each observation once"),
    ):
        with pytest.raises(BurnishError, match=sentence):
            load_policy(STORED / "act", keys=keys)


# ---- Cameras ----


# Parameters of torchvision's networks without their last layer: its published counts less those of 1000 classes.
PUBLISHED = {
    "resnet18": 11_689_512 - 513_000,
    "resnet34": 21_797_672 - 513_000,
    "resnet50": 25_557_032 - 2_049_000,
    "resnet101": 44_549_160 - 2_049_000,
    "resnet152": 60_192_808 - 2_049_000,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_residual_networks_have_the_published_sizes(name):
    with torch.device("meta"):
        layers, channels = resnet(name, Norm.batch)
    assert sum(x.numel() for layer in layers.values() for x in layer.parameters()) == PUBLISHED[name]
    assert channels == (512 if name in ("resnet18", "resnet34") else 2048)


@pytest.mark.parametrize(("separate", "random"), [(True, True), (False, True), (True, False)])
def test_pictures_are_cropped_and_encoded_per_camera(separate, random, tmp_path):
    torch.manual_seed(0)
    vision = VisionBackboneConfig(crop=[32, 36], keypoints=4, separate=separate, random_crop=random)
    net = LeRobotNetConfig(
        [Feature(f"image.{x}", Kind.visual, Normalization.identity) for x in ("b", "a")]
        + [Feature("state", Kind.state, Normalization.identity)],
        channels=[8, 16],
        time_dim=8,
        vision=vision,
    )
    obs_spec = ObsSpec({"image.a": (3, 40, 48), "image.b": (3, 40, 48), "state": (2,)})
    spec = PolicySpec(obs_spec, ActionSpec((-1.0,) * 2, (1.0,) * 2), 8, 4, start=1, history=2)
    policy = build_policy(LeRobotDiffusionConfig(train_steps=4, steps=2, net=net), spec).eval()
    obs = {key: torch.randint(0, 256, (2, 2, 3, 40, 48), dtype=torch.uint8) for key in ("image.a", "image.b")}
    obs["state"] = torch.rand(2, 2, 2)
    with torch.no_grad():
        seen = policy.encode(obs).given
        border = {**obs, "image.a": obs["image.a"].clone()}
        border["image.a"][..., :4, :] = 0  # the crop leaves out four rows above
        assert torch.equal(seen, policy.encode(border).given)
        border["image.a"][..., 4:8, :] = 0
        assert not torch.equal(seen, policy.encode(border).given)
        policy.net.train()
        drawn = [policy.net.encode(obs, augment=torch.Generator().manual_seed(k)).given for k in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2]) is not random
    assert seen.shape == (2, 2 * (2 + 2 * 2 * vision.keypoints))
    save(policy, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "saved").encode(obs).given, seen)


# ---- Refinement ----

RUN = {"worlds": 2, "total": 24, "log_every": 4, "save_every": 8, "eval": {"episodes": 0}}
PPO = {"loop": {"decisions_per_update": 4}, "ppo": {"minibatch": 4, "epochs": 1}}
SAC = {"critic": {"hidden": [8], "members": 2}, "agent": {"hidden": [8]}}
DSRL = {"loop": {"warmup": 8, "batch": 8, "updates_per_decision": 0.5}, "sac": SAC}
TD3 = {"loop": DSRL["loop"], "td3": SAC}
METHODS = {"dppo": PPO | {"trained_steps": 5}, "dsrl": DSRL, "residual_ppo": PPO, "residual_td3": TD3}


@pytest.mark.parametrize(
    ("name", "method"), [("diffusion_ddpm", x) for x in METHODS] + [("act", x) for x in METHODS if x != "dppo"]
)
def test_it_is_refined(name, method, tmp_path):
    base = load(STORED / name, sampler="ddim" if (name, method) == ("diffusion_ddpm", "dsrl") else None)
    before = {key: x.clone() for key, x in base.state_dict().items()}
    refined = refine(base, AsLeRobot(2), method=method, **METHODS[method], **RUN)
    assert refined.finished
    assert all(torch.equal(x, before[key]) for key, x in base.state_dict().items()), "the base stays as it is"
    save(refined.policy, tmp_path / "refined")
    again = load(tmp_path / "refined").state_dict()
    assert all(torch.equal(x, again[key]) for key, x in refined.policy.state_dict().items())
    if method == "dppo":
        trained = {key.removeprefix("last."): x for key, x in refined.policy.state_dict().items() if "last." in key}
        assert any(not torch.equal(x, before[key]) for key, x in trained.items()), "its last steps have learnt"


def test_its_actions_are_recorded_in_units_of_the_world():
    policy, env, seeds = load(STORED / "act"), AsLeRobot(2), [1, 2]
    ticks = stream(env, controller_for(policy, 2), seeds, limits=policy.spec.action)
    first = next(episode for ready in ticks for episode in ready)
    with torch.no_grad():
        chunk = policy.act({key: x[:1] for key, x in first.obs.items()})
    expected = Scale(policy.spec.action).to_actuator(chunk[0, : policy.spec.execute]).clamp(-1, 1)
    assert torch.allclose(first.action[: policy.spec.execute], expected, atol=CLOSE)


def test_noise_that_its_sampler_adds_is_named_when_it_is_to_be_steered():
    with pytest.raises(BurnishError, match="use ddim"):
        refine(load(STORED / "diffusion_ddpm"), AsLeRobot(2), method="dsrl", **DSRL, **RUN)


def test_the_latent_of_act_is_zero_unless_it_is_chosen():
    policy, obs = load(STORED / "act"), recorded("act")[0]
    batch, shape = len(obs["state"]), policy.spec.noise_shape
    with torch.no_grad():
        plain = policy.act(obs)
        assert torch.equal(plain, policy.act(obs, noise=torch.zeros(batch, *shape)))
        assert torch.equal(plain, policy.act(obs, generator=torch.Generator().manual_seed(1)))
        assert not torch.equal(plain, policy.act(obs, noise=torch.ones(batch, *shape)))


@pytest.mark.parametrize("name", NAMES)
def test_imitation_goes_on(name):
    torch.manual_seed(0)
    policy, obs = load(STORED / name), recorded(name)[0]
    target = torch.rand(len(obs["state"]), *policy.spec.chunk_shape) * 0.2 + 0.4
    mask = torch.ones(target.shape[:2], dtype=torch.bool)
    mask[:, -2:] = False
    optimizer, losses = torch.optim.Adam(policy.parameters(), 3e-3), []
    policy.train()
    for _ in range(60):
        loss = policy.bc_loss(obs, target, mask=mask, generator=torch.Generator().manual_seed(0)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]  # three rows and one draw of the noise; without a gradient it stays
    padded = target.clone()
    padded[:, -2:] = 7.0
    same = [
        policy.eval().bc_loss(obs, x, mask=mask, generator=torch.Generator().manual_seed(0)) for x in (target, padded)
    ]
    if name == "act":  # a diffusion sees the padding beside what is real, as LeRobot's does
        assert torch.allclose(*same)
