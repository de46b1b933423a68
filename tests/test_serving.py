"""``burnish serve``: what is served is the policy, to openpi's clients and to ours, and the verbs work on top of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from verb_lab import imitating, refused
from websockets.sync.client import connect as dial

from burnish.policies.build import build_policy, load_policy
from burnish.policies.cli.cli import main
from burnish.policies.compose import Residual
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import Scale
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import EnvSpec, ObsSpec, PolicySpec
from burnish.policies.external.remote import RemoteConfig, RemotePolicy
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.runs.run import read_metrics
from burnish.real_robot.serving.listening import ServerConfig
from burnish.real_robot.serving.server import PolicyServer
from openpi_lab import content, frame
from server_lab import LIMITS, SPEC, flow, served

WORLD = EnvSpec(SPEC.obs, LIMITS, 10.0, "test", 20)
OBS = {"state": torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))}


def test_a_client_of_ours_has_the_policy_itself_but_for_what_lies_before_now():
    policy = flow()
    with served(policy) as server:
        client = RemotePolicy(RemoteConfig(server.url), WORLD)
        assert client.spec == replace(policy.spec, horizon=4, start=0) and client.spec.noise_shape == (5, 2)
        ours, theirs = (p.act(OBS, generator=RowNoise(range(4), [3] * 4)) for p in (policy, client))
        torch.testing.assert_close(policy.spec.executed(ours), client.spec.executed(theirs))
        torch.testing.assert_close(ours[:, 1:], theirs)
        other = client.act(OBS, generator=RowNoise(range(4), [4] * 4))
        assert not torch.allclose(theirs, other), "control: other noise, other actions"
        torch.testing.assert_close(client.act(OBS, greedy=True), policy.act(OBS, greedy=True)[:, 1:])


def test_a_plain_openpi_client_is_served_in_the_units_of_the_actuators():
    """One observation and no batch; the frames are made and read by other code than ours."""
    policy = build_policy(GaussianConfig(hidden=[8], init_std=1e-4, min_std=1e-5), replace(SPEC, history=1))
    with served(policy) as server, dial(server.url, compression=None) as socket:
        metadata = content(socket.recv())
        assert set(metadata["extensions"]) == {"batch", "noise", "seed", "reset", "obs_seq"}
        assert metadata["policy_spec"]["horizon"] == 4
        socket.send(frame({"state": np.array([0.1, 0.2, 0.3]), "prompt": "nothing to us"}))
        reply = content(socket.recv())
        expected = policy.act({"state": torch.tensor([[0.1, 0.2, 0.3]])}, greedy=True)[0, 1:]
        np.testing.assert_allclose(reply["actions"], Scale(LIMITS).to_actuator(expected.detach()), atol=2e-3)
        assert reply["actions"].dtype == np.float32 and reply["server_timing"]["infer_ms"] > 0


def test_a_client_that_says_observation_state_is_served_where_keys_tells_which_that_is():
    policy, chunks = build_policy(GaussianConfig(hidden=[8]), replace(SPEC, history=1)), []
    for name, keys in (("observation/state", {"state": "observation/state"}), ("state", {})):
        with served(policy, keys=keys) as server, dial(server.url, compression=None) as socket:
            socket.recv()
            socket.send(frame({name: np.array([0.1, 0.2, 0.3]), "seed": 5, "prompt": "pick"}))
            chunks.append(content(socket.recv())["actions"])
    np.testing.assert_array_equal(*chunks)


def test_pictures_come_with_their_colours_last():
    spec = PolicySpec(ObsSpec({"image.top": (3, 16, 20)}), LIMITS, 1, 1)
    seen = []

    class Eye:
        def __init__(self):
            self.spec = spec

        def act(self, obs, **given):
            seen.append(obs["image.top"])
            return torch.zeros(len(seen[-1]), 1, 2)

    picture = torch.randint(0, 256, (2, 3, 16, 20), dtype=torch.uint8)
    with served(Eye()) as server:
        assert server.metadata["extensions"] == ["batch", "seed", "reset", "obs_seq"]
        RemotePolicy(RemoteConfig(server.url), replace(WORLD, obs=spec.obs)).act({"image.top": picture})
    assert torch.equal(seen[-1], picture)


def test_draws_of_a_policy_without_noise_follow_the_seed_of_their_row():
    class Drawing:
        spec = PolicySpec(ObsSpec({"state": (3,)}), LIMITS, 1, 1)

        def act(self, obs, *, generator=None, **given):
            rows = len(obs["state"])
            drawn = torch.rand(rows, 2) if generator is None else generator.uniform((rows, 2))
            return (2 * drawn - 1).float()[:, None]

    with served(Drawing()) as server:
        client = RemotePolicy(RemoteConfig(server.url), WORLD)
        obs = {"state": torch.zeros(3, 3)}
        one, two = (client.act(obs, generator=RowNoise([5, 6, 7], [0] * 3)) for _ in range(2))
        assert torch.equal(one, two) and not torch.equal(one, client.act(obs, generator=RowNoise([5, 6, 7], [1] * 3)))
        assert torch.equal(client.act({"state": obs["state"][1:2]}, generator=RowNoise([6], [0])), one[1:2])


def test_what_has_no_chunk_to_give_is_refused_before_anybody_asks():
    spec = replace(SPEC, history=1)
    net = build_policy(GaussianConfig(hidden=[8]), replace(spec, obs=ObsSpec({"state": (3,), "base_action": (2,)})))
    with pytest.raises(BurnishError, match="no chunk to give; `burnish distill teachers=FOLDER` makes"):
        PolicyServer(Residual(flow(spec), net, 0.1, "step"), ServerConfig(port=0))


def test_a_served_refinement_is_shown_what_its_agent_sees_and_its_base_does_not():
    seen = {"state": (3,), "environment_state": (2,)}
    net = build_policy(
        GaussianConfig(hidden=[8]), PolicySpec(ObsSpec({**seen, "base_action": (2, 2)}), LIMITS, 2, 2, history=2)
    )
    policy = Residual(flow(), net, 0.5, "chunk").eval()
    with served(policy) as server:
        client = RemotePolicy(RemoteConfig(server.url), replace(WORLD, obs=ObsSpec(seen).with_history(2)))
        assert client.spec.obs.shapes == seen
        obs = {**OBS, "environment_state": torch.randn(4, 2, 2, generator=torch.Generator().manual_seed(1))}
        torch.testing.assert_close(client.act(obs, greedy=True), policy.act(obs, greedy=True)[:, 1:])


# ---- the verbs ----

EVALUATION = ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2"]
WORDS = ["env=point_reach", "env.max_steps=12"]
FEW = ["worlds=2", "total=16", "log_every=4", "save_every=8", "method.loop.warmup=8", "method.loop.batch=8"]
NETS = ["critic.hidden=[8]", "critic.members=2", "agent.hidden=[8]"]
METHODS = {
    "residual_td3": [f"method.td3.{net}" for net in NETS] + ["method.loop.initial_updates=1"],
    "dsrl": [f"method.sac.{net}" for net in NETS] + ["method.loop.updates_per_decision=0.5"],
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A flow that imitates a little."""
    return imitating(tmp_path_factory.mktemp("lab"), *EVALUATION, name="flow")


def tried(run):
    return [line["eval/return_mean"] for line in read_metrics(run) if "eval/return_mean" in line]


@pytest.mark.parametrize("method", [pytest.param("residual_td3", marks=pytest.mark.slow), "dsrl"])
def test_a_served_base_is_refined_and_found_again_by_the_verbs(lab, tmp_path, capsys, method):
    """In one process and over the wire, the base tries equally well and the same command makes the same kind of run."""
    policy, _ = load_policy(lab / "flow")
    words = ["finetune", f"method={method}", *FEW, *METHODS[method], *EVALUATION]
    with served(policy) as server:
        base = ["policy=remote", f"policy.url={server.url}"]
        assert main([*words, *base, *WORDS, f"out={tmp_path}/run"]) == 0
        assert main(["evaluate", f"policy.path={tmp_path}/run", *EVALUATION]) == 0
        assert main(["evaluate", *base, *WORDS, f"against={tmp_path}/run", *EVALUATION]) == 0
        assert "exact McNemar" in capsys.readouterr().out
        other = f"against={{policy: remote, url: {server.url}}}"
        assert main(["evaluate", f"policy.path={tmp_path}/run", other, *WORDS, *EVALUATION]) == 0
        assert f"{server.url}: success" in capsys.readouterr().out
        # What was refined on top of it can be refined in its turn.
        if method == "dsrl":
            assert main([*words, f"policy.path={tmp_path}/run", f"out={tmp_path}/again"]) == 0
    assert "no policy server answers" in refused(capsys, "evaluate", f"policy.path={tmp_path}/run", *EVALUATION)
    with served(policy) as server:
        moved = f"policy.base={server.url}"
        assert main(["evaluate", f"policy.path={tmp_path}/run", moved, *EVALUATION]) == 0
        resumed = [*words, "policy=remote", f"policy.url={server.url}", *WORDS, "total=24", "resume=true"]
        assert "total" in refused(capsys, *resumed, f"out={tmp_path}/run")
        assert main([*(word for word in resumed if word != "total=24"), f"out={tmp_path}/run"]) == 0
    assert main([*words, f"policy.path={lab}/flow", *WORDS, f"out={tmp_path}/local"]) == 0
    assert tried(tmp_path / "run")[0] == pytest.approx(tried(tmp_path / "local")[0], rel=1e-4)


def test_names_are_translated_on_the_command_line(lab, capsys):
    policy, _ = load_policy(lab / "flow")
    with served(policy) as server:
        words = ["evaluate", "policy=remote", f"policy.url={server.url}", *WORDS, *EVALUATION]
        assert main([*words, "policy.keys={state:state,goal:goal}"]) == 0
        assert "names ['observation/state']" in refused(capsys, *words, "policy.keys={state:observation/state}")
        assert "no setting 'policy.kys'" in refused(capsys, *words, "policy.kys={state:state}")
    assert main(["evaluate", "policy=remote", "--help"]) == 0
    assert "policy.keys={}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["evaluate", "policy=remote", "policy.url=ws://127.0.0.1:9"], "give env=..."),
        (["evaluate", "policy=remote", "policy.url=ws://127.0.0.1:9", *WORDS], "no policy server answers"),
        (["evaluate", "policy=remote", "policy.url=host", *WORDS], "write ws://host:port"),
        (["evaluate", "policy=remote", *WORDS], "policy.url=... must be given"),
        (["finetune", "policy=remote", "policy.url=ws://a:1", "method=dppo"], "give env=..."),
        (
            ["offline", "policy=remote", "policy.url=ws://a:1", "method=iql", "data=x"],
            "this choice of policy is not for this verb",
        ),
        (["serve"], "policy.path=... must be given"),
        (["serve", "policy.path=x", "port=99999"], "port=99999"),
        (["serve", "policy.path=nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, capsys):
    assert sentence in refused(capsys, *words)


def test_a_place_is_given_only_to_what_has_one(lab, capsys):
    message = refused(capsys, "evaluate", f"policy.path={lab}/flow", "policy.base=ws://127.0.0.1:9")
    assert "refines none" in message


def test_settings_of_a_checkpoint_choose_it_where_others_could_be_chosen(lab, capsys):
    assert "is not a checkpoint" in refused(capsys, "finetune", "policy.path=nowhere", "method=dsrl")
    assert "choose policy=... first" in refused(capsys, "finetune", "policy.url=ws://a:1", "method=dsrl")


def test_a_method_that_needs_more_than_actions_says_so(lab, tmp_path, capsys):
    policy, _ = load_policy(lab / "flow")
    with served(policy) as server:
        words = ["policy=remote", f"policy.url={server.url}", *WORDS, f"out={tmp_path}/run", "method.trained_steps=2"]
        message = refused(capsys, "finetune", "method=dppo", *words)
    assert "the one given is a RemotePolicy" in message and "method=residual_td3" in message
