"""`burnish improve`: the race finds a hidden best, drops what fails, keeps to its budget, and never delivers worse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from race_lab import Skilled, Toy, flat, played
from verb_lab import imitating, refused

from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.finetune.doctor.__main__ import described, random_observations, steering
from burnish.finetune.improve.__main__ import ImproveConfig, OfWorlds
from burnish.finetune.improve.race import EVALUATIONS, RACE, Budget, Race, Stopped
from burnish.finetune.improve.shares import LOOKS, next_share, survivors
from burnish.finetune.probe import Steerability
from burnish.finetune.refinement import carry_out, refinement
from burnish.policies.best import mean
from burnish.policies.build import CheckpointConfig, load_policy
from burnish.policies.cli.cli import compose, main, to_object
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.diffusion import Sampler
from burnish.policies.measure.evaluate import Evaluation, evaluation_seeds
from server_lab import served


def test_shares_add_up_and_half_of_the_budget_is_the_winners():
    for names in (["a"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d", "e"]):
        scores: dict[str, list[float]] = {}
        spent, left = dict.fromkeys(names, 0.0), 1.0
        while share := next_share(names, scores):
            amount = left * share.part
            left, spent[share.entrant] = left - amount, spent[share.entrant] + amount
            scores.setdefault(share.entrant, []).append(float(names.index(share.entrant)))
        assert left == pytest.approx(0) and max(spent, key=lambda name: spent[name]) == names[-1]
        rounds = survivors(len(names))[:-1]
        alone = 0.5 + 0.5 * len(rounds) / sum(rounds) if rounds else 1.0
        assert spent[names[-1]] == pytest.approx(alone)
        assert sum(map(len, scores.values())) == sum(rounds) + LOOKS


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_best_is_found_wherever_it_stands(tmp_path, best):
    curves = {f"m{i}": flat(0.8 if i == best else 0.4) for i in range(3)}
    found = played(tmp_path, Toy(curves), list(curves), steps=2000)
    assert found.record.chosen == f"m{best}" and found.record.delivered is True


def test_nothing_better_is_delivered_as_the_base():
    """Negative control: entrants with the skill of the base, or less. By chance one race in forty delivers (the 95 %
    interval of one policy, one side); of 60 races, more than 5 have a chance of less than 1 in 200."""
    delivered = 0
    for seed in range(60):
        toy = Toy({"same": flat(0.3), "worse": flat(0.1)}, seed)
        budget = Budget(steps=200, episodes=16, confirm=64)
        found = OutOfSight(Path("nowhere"), Skilled("base", 0.3), budget, toy, toy.stop, lambda toy=toy: toy.now)
        found.free()
        found.run(list(toy.curves))
        found.confirm()
        delivered += bool(found.record.delivered)
    assert delivered <= 5


class OutOfSight(Race):
    """Kept in memory: sixty races of files would take seconds."""

    def __init__(self, *given):
        super().__init__(*given)
        self.kept: dict[tuple[str, str], Evaluation] = {}
        self.trainer.save = lambda policy, path: self.policies.__setitem__(path.name, policy)  # type: ignore[method-assign]
        self.trainer.load = lambda path: self.policies[path.name]  # type: ignore[method-assign]
        self.policies: dict[str, Any] = {}

    def evaluated(self, name, stream, policy=None):
        if (stream, name) not in self.kept:
            made = self.policy(name) if policy is None else policy
            self.kept[stream, name] = self.trainer.play(made, stream, self.episodes(stream))
        return self.kept[stream, name]

    def _write(self):
        pass


def test_an_entrant_that_fails_costs_no_other(tmp_path):
    def breaks(steps):
        if steps > 50:
            raise RuntimeError("nan")
        return 0.1

    toy = Toy({"broken": breaks, "good": flat(0.7)})
    found = played(tmp_path, toy, ["broken", "good"], steps=1000)
    assert found.record.failed == {"broken": "nan"} and found.record.chosen == "good"
    assert found.record.lost == {"broken": 50} and 1000 <= found.trained_steps() <= 1010, "the rest is for the others"
    toy = Toy({"broken": breaks})
    found = played(tmp_path / "alone", toy, ["broken"], steps=1000)
    assert found.record.chosen == "base" and found.record.delivered is False


def test_the_confirmation_plays_the_one_choice_and_the_base_once_each(tmp_path):
    toy = Toy({"a": flat(0.5), "b": flat(0.6)})
    found = played(tmp_path, toy, ["a", "b"], steps=500)
    assert [name for stream, name in toy.played if stream == "confirm"] == [found.record.chosen, "base"]
    seeds = {
        stream: set(evaluation_seeds(256, stream=stream)) for stream in ("select", "playoff", "confirm", "evaluate")
    }
    assert len(set.union(*seeds.values())) == 4 * 256


@pytest.mark.parametrize("after", [1, 2, 4, 7, 9])
def test_a_race_that_was_stopped_ends_as_if_it_had_not_been(tmp_path, after):
    curves = {"a": lambda steps: 0.3 + steps / 5000, "b": flat(0.4), "c": flat(0.2)}
    whole = played(tmp_path / "whole", Toy(curves), list(curves), steps=1000)
    toy = Toy(curves, stop_after=after)
    with pytest.raises(Stopped):
        played(tmp_path / "cut", toy, list(curves), steps=1000)
    again = played(tmp_path / "cut", Toy(curves, steps=toy.steps), list(curves), steps=1000)
    told = [{key: x for key, x in share.items() if key != "seconds"} for share in again.record.shares]
    assert told == [{key: x for key, x in share.items() if key != "seconds"} for share in whole.record.shares]
    assert (again.record.chosen, again.record.delivered) == (whole.record.chosen, whole.record.delivered)
    assert json.loads((tmp_path / "cut" / RACE).read_text())["chosen"] == whole.record.chosen


def test_a_share_that_was_lost_as_it_ended_is_scored_anew(tmp_path, monkeypatch):
    """Killed between the evaluation and the record. By minutes the next sitting trains the entrant on."""
    toy, alone = Toy({"a": lambda steps: 0.2 + steps / 500}), ["a"]

    def killed(policy, path):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(toy, "save", killed)
        with pytest.raises(SystemExit):
            played(tmp_path, toy, alone, minutes=2)
    (left,) = (tmp_path / EVALUATIONS).glob("select-a-*.json")
    before = mean(Evaluation.load(left))
    found = played(tmp_path, toy, alone, minutes=2)
    share = found.record.shares[0]
    assert share["score"] == mean(Evaluation.load(left)) > before, "the score is that of the policy that was trained on"


# ---- the verbs ----

SMALL = ["eval.episodes=4", "eval.worlds=4", "eval.confirm=8", "threads=1"]


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    words = ["chunk.execute=4", "eval.episodes=1", "eval.worlds=1", "eval.confirm=1"]
    return imitating(tmp_path_factory.mktemp("lab"), *words) / "bc"


def test_a_policy_is_improved_from_the_command_line(flow, tmp_path, capsys):
    (tmp_path / "quick.yaml").write_text(
        "defaults: [override /method: residual_ppo]\nworlds: 2\n"
        "method: {loop: {decisions_per_update: 10}, agent: {hidden: [8]}}\n"
    )
    out = tmp_path / "improved"
    words = [f"policy.path={flow}", f"methods={tmp_path}/quick.yaml,rlpd", "steps=60", f"out={out}", *SMALL]
    assert main(["improve", *words]) == 0
    said = capsys.readouterr().out
    assert "rlpd does not fit: it needs a policy that is a Gaussian squashed by tanh" in said
    assert "quick" in (out / "improve.md").read_text() and "steps of training" in said
    policy, origin = load_policy(out)
    assert origin["env"]["name"] == "point_reach" and policy.spec.action.dim == 2
    assert sum(x["steps"] for x in json.loads((out / RACE).read_text())["shares"]) >= 60
    assert main(["improve", *words]) == 2 and "resume=true" in capsys.readouterr().err
    before = (out / RACE).read_text()
    assert main(["improve", *words, "resume=true"]) == 0
    assert json.loads((out / RACE).read_text())["shares"] == json.loads(before)["shares"]
    assert main(["improve", *words, "seed=3", "resume=true"]) == 2 and "another seed" in capsys.readouterr().err


STUDIOUS = (
    "defaults: [override /method: residual_td3]\nworlds: 2\nmethod: {loop: {warmup: 8, initial_updates: 100_000}}\n"
)


def test_initial_updates_that_take_longer_than_a_share_are_told_before_anything_is_trained(flow, tmp_path, capsys):
    (tmp_path / "studious.yaml").write_text(STUDIOUS)
    words = [f"policy.path={flow}", *SMALL, f"methods={tmp_path}/studious.yaml", "minutes=0.2", f"out={tmp_path}/x"]
    assert main(["improve", *words]) == 2
    said = capsys.readouterr()
    assert "studious is not raced: its warm-up and its initial updates take " in said.out
    assert "minutes=0.2 leave no method that fits the time to learn; raise minutes" in said.err
    assert json.loads((tmp_path / "x" / RACE).read_text())["shares"] == []


LAZY = (
    "defaults: [override /method: residual_td3]\nworlds: 2\n"
    "method: {loop: {warmup: 40, batch: 8}, td3: {agent: {hidden: [8]}, critic: {hidden: [8]}}}\n"
)


def test_a_method_that_would_only_warm_up_is_not_raced(flow, tmp_path, capsys):
    settings = "worlds: 2\nmethod: {loop: {decisions_per_update: 10}, agent: {hidden: [8]}}\n"
    (tmp_path / "quick.yaml").write_text(f"defaults: [override /method: residual_ppo]\n{settings}")
    (tmp_path / "lazy.yaml").write_text(LAZY)
    out, words = tmp_path / "improved", [f"policy.path={flow}", *SMALL]
    two = f"methods={tmp_path}/quick.yaml,{tmp_path}/lazy.yaml"
    assert main(["improve", *words, two, "steps=80", f"out={out}"]) == 0
    said = capsys.readouterr()
    assert "lazy is not raced: its warm-up takes 40 steps and its first share is 20; raise steps" in said.out
    assert "nothing was saved" not in said.err, "a race begins each run as one to resume"
    assert {x["entrant"] for x in json.loads((out / RACE).read_text())["shares"]} == {"quick"}
    assert "its first share is 20" in (out / "improve.md").read_text()
    alone = [*words, f"methods={tmp_path}/lazy.yaml", f"out={tmp_path}/none"]
    assert main(["improve", *alone, "steps=40"]) == 2
    said = capsys.readouterr()
    assert "steps=40 end within the warm-up of every method that fits (lazy 40 control steps)" in said.err
    assert not said.out and not (tmp_path / "none").exists()


def test_a_run_that_pauses_is_the_run_that_does_not(flow, tmp_path):
    words = [f"policy.path={flow}", "method=residual_ppo", "worlds=2", "total=48", "eval.episodes=0", "resume=true"]
    words += ["method.loop.decisions_per_update=4", "method.agent.hidden=[8]", "threads=1"]
    pauses = 0
    for name in ("whole", "paused"):
        config = to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], [*words, f"out={tmp_path}/{name}"]))
        while not (tmp_path / name / "checkpoints" / "00000006").is_dir():  # 6 iterations of 8 decisions
            work, loop = refinement(config, tried=False)
            assert carry_out(config, work, loop, pause=(lambda: True) if name == "paused" else None) == 0
            pauses += name == "paused"
    whole, paused = (load_policy(tmp_path / name)[0].state_dict() for name in ("whole", "paused"))
    assert pauses == 6 and all(torch.equal(x, paused[key]) for key, x in whole.items())


def test_a_base_of_another_program_that_is_delivered_stays_where_it_is(flow, tmp_path, capsys):
    """No entrant fits, so the base is what there is."""
    with served(load_policy(flow)[0]) as server:
        url = server.url
        words = [
            "policy=remote",
            f"policy.url={server.url}",
            "env=point_reach",
            "methods=rlpd",
            "steps=60",
            f"out={tmp_path}/out",
        ]
        assert main(["improve", *words, *SMALL]) == 0
    said = capsys.readouterr().out
    assert "out has no policy/: the base is delivered" in said and f"policy: {url}" in said
    assert not (tmp_path / "out" / "policy").exists()


@pytest.mark.parametrize("sampler", [Sampler.ddpm, Sampler.ddim])
def test_a_diffusion_that_draws_its_own_noise_is_told_of_the_sampler_that_draws_none(sampler):
    path = str(Path(__file__).parent / "lerobot_policies" / "diffusion_ddpm")
    chosen = CheckpointConfig(path, sampler=sampler)
    base, device = load_policy(path, sampler=sampler)[0], torch.device("cpu")
    trainer = OfWorlds(ImproveConfig(chosen, steps=100_000, methods=["dsrl", "rlpd"]), base, {}, device)
    dsrl, rlpd = trainer.fits(random_observations(base.spec, 16, device))
    assert dsrl.fits is (sampler is Sampler.ddim) and not rlpd.fits
    assert dsrl.reason.endswith("policy.sampler=ddim draws none") is not dsrl.fits
    assert "policy.sampler" not in rlpd.reason


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "one budget"),
        (["steps=5", "minutes=1"], "one budget"),
        (["steps=5"], "must name the policy"),
        (["steps=5", "policy.path=nowhere"], "nowhere"),
        (["steps=5", "eval.greedy=true"], "noise 0 takes part"),
        (["steps=90000", "policy.path={flow}", "methods=dsrl,residul_ppo"], "did you mean 'residual_ppo'"),
        (["steps=90000", "policy.path={flow}", "methods=dsrl,dsrl"], "has the name of another row"),
        (["steps=90000", "policy.path={flow}", "env=hopper"], "the policy needs the observations"),
        (["steps=90000", "policy.path={flow}", "methods={flow}/../typo.yaml"], "the settings of typo in methods= are"),
    ],
)
def test_what_cannot_be_raced_is_refused_in_one_sentence(words, told, flow, capsys, tmp_path):
    (flow.parent / "typo.yaml").write_text("defaults: [override /method: residual_ppo]\nmethod: {bond: 1}\n")
    words = [word.format(flow=flow) for word in words]
    assert told in refused(capsys, "improve", *words, f"out={tmp_path}/x") and not (tmp_path / "x").exists()


def test_a_folder_with_other_things_is_left_alone(flow, tmp_path, capsys):
    """A folder called policy/ would be overwritten by what is delivered."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine").write_text("precious")
    for words in (["improve", f"policy.path={flow}"], ["compare", f"base={flow}", "budget=99", "methods=residual_ppo"]):
        more = ["steps=99"] if words[0] == "improve" else []
        assert main([*words, *more, f"out={tmp_path}"]) == 2
        assert "is not empty and holds no " in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["policy", "mine"]


def test_a_policy_is_examined(flow, tmp_path, capsys):
    assert main(["doctor", f"policy.path={flow}", "worlds=4", f"out={tmp_path}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("is a FlowPolicy. It sees state (", "chunk of 8 actions, of which 4 are executed", "ms here"):
        assert words in said
    assert "4 episodes of point_reach" in said and "It can be steered by its noise" in said
    facts = json.loads((tmp_path / "doctor.json").read_text())
    fits = {row["method"]: row for row in facts["methods"]}
    assert fits["dsrl"]["fits"] and fits["residual_ppo"]["fits"] and not fits["dagger"]["raced"]
    assert "method.trained_steps=2" in fits["dppo"]["reason"], "its chain has two steps, and the default trains ten"
    assert not fits["gaussian_ppo"]["fits"] and "is a Gaussian" in fits["gaussian_ppo"]["reason"]
    assert facts["steerable"] is True and facts["decision_ms"] > 0


def test_noise_that_reaches_less_than_a_correction_is_called_faint():
    ones = torch.ones(2, 3)

    def said(reach):
        return steering(Steerability(ones / 100, reach * ones, 0.0, 1.5), "a guess")

    assert said(0.3).startswith("It can be steered by its noise: ")
    assert said(0.01).startswith("Its noise steers it faintly")


def test_rate_and_limits_of_its_world_stand_beside_those_of_a_policy():
    wide, narrow, obs = ActionSpec((-2.0,), (2.0,)), ActionSpec((-1.0,), (1.0,)), ObsSpec({"state": (2,)})
    base = SimpleNamespace(spec=PolicySpec(obs, wide, 4, 2))

    def said(*world):
        return " ".join(described("it", base, 10.0, *world))

    alone, narrower = said(), said(EnvSpec(obs, narrow, 20.0, "", 9))
    assert "at a rate that it does not say" in alone and "The world takes" not in alone
    assert "between -2 and 2" in narrower and "The world takes actions between -1 and 1: it clips" in narrower
    assert "at 20 ticks a second, those of the world" in narrower and "10% of the time" in narrower
    assert "The world takes" not in said(EnvSpec(obs, wide, 20.0, "", 9))


def test_a_policy_of_lerobot_is_examined_without_a_world(capsys, tmp_path):
    path = Path(__file__).parent / "lerobot_policies" / "diffusion_ddim"
    assert main(["doctor", f"policy.path={path}", "worlds=2", f"out={tmp_path}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "is a LeRobotDiffusion" in said and "random observations, because nothing says" in said
    assert json.loads((tmp_path / "doctor.json").read_text())["steerable"] is True
