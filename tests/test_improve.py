"""`burnish improve`: the race finds a hidden best, drops what fails, keeps to its budget, and never delivers worse."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verb_lab import imitating, refused

from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.finetune.doctor.__main__ import steering
from burnish.finetune.improve.race import RACE, Budget, Race, Stopped, Trained
from burnish.finetune.improve.shares import LOOKS, next_share, survivors
from burnish.finetune.probe import Steerability
from burnish.finetune.refinement import carry_out, refinement
from burnish.policies.build import load_policy
from burnish.policies.cli.cli import compose, main, to_object
from burnish.policies.measure.evaluate import Evaluation, evaluation_seeds
from burnish.policies.runs.interrupt import Stop


@dataclass
class Skilled:
    """A policy that succeeds on a share of the seeds, on others than a policy with another name."""

    name: str
    skill: float
    spec: Any = field(default_factory=lambda: SimpleNamespace(noise_shape=None))


@dataclass
class Toy:
    """A trainer without worlds: ``curves`` tell the skill of an entrant after so many steps, an iteration is 10 steps
    or a second of its clock, and an episode takes 0.1 s."""

    curves: dict[str, Any]
    seed: int = 0
    played: list[tuple[str, str]] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    stop: Stop = field(default_factory=Stop)
    stop_after: int = 10**6  # evaluations
    start_s: dict[str, float] = field(default_factory=dict)  # entrant, or base -> what making its worlds takes

    def train(self, entrant, enough, begin=lambda: None):
        self.now += self.start_s.get(entrant, 0.0)
        begin()
        known = self.steps.get(entrant, 0)
        if known and enough(known):
            return Trained(Skilled(entrant, self.curves[entrant](known)), known)
        while True:
            self.steps[entrant] = steps = self.steps.get(entrant, 0) + 10
            self.now += 1
            skill = self.curves[entrant](steps)  # may raise
            if enough(steps):
                return Trained(Skilled(entrant, skill), steps)

    def play(self, policy, stream, episodes):
        self.played.append((stream, policy.name))
        self.now += 0.1 * episodes
        self.stop.requested = len(self.played) >= self.stop_after
        seeds = evaluation_seeds(episodes, stream=stream)
        # The luck of a seed is shared by all policies, but for a part: pairs help, and do not decide.
        common = [random.Random(f"{self.seed} {seed}").random() for seed in seeds]
        own = [random.Random(f"{self.seed} {seed} {policy.name}").random() for seed in seeds]
        won = [(a if i % 2 else b) < policy.skill for i, (a, b) in enumerate(zip(common, own, strict=True))]
        nothing = [False] * episodes
        return Evaluation(seeds, [float(x) for x in won], [5] * episodes, won, nothing, won, won)

    def save(self, policy, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([policy.name, policy.skill]))

    def load(self, path):
        return Skilled(*json.loads(Path(path).read_text()))


def race(out, toy, **budget):
    budget = Budget(**{"episodes": 64, "confirm": 256} | budget)
    return Race(out, Skilled("base", 0.3), budget, toy, toy.stop, lambda: toy.now, toy.start_s.get("base", 0.0))


def played(out, toy, names, **budget):
    toy.stop.requested = False
    found = race(out, toy, **budget)
    found.free()
    found.run(names)
    found.confirm()
    return found


def flat(skill):
    return lambda steps: skill


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


@pytest.mark.parametrize("budget", [{"steps": 1000}, {"minutes": 8}])
def test_the_budget_is_kept(tmp_path, budget):
    toy = Toy({name: flat(0.3 + 0.1 * i) for i, name in enumerate("abc")})
    found = played(tmp_path, toy, list("abc"), **budget)
    spent = sum(share["steps"] for share in found.record.shares)
    if "steps" in budget:
        assert 1000 <= spent <= 1010, "an iteration may end beyond it"
    else:
        assert 0.7 * 8 * 60 <= toy.now <= 8 * 60 and found.record.seconds == pytest.approx(toy.now)


def test_minutes_that_are_too_few_for_all_episodes_play_fewer(tmp_path):
    """256 episodes take 26 s here, and seven times that is more than a minute."""
    toy = Toy({"a": flat(0.9)})
    found = played(tmp_path, toy, ["a"], minutes=1)
    assert toy.now <= 60 and found.record.chosen == "a" and found.record.delivered is True


def test_an_entrant_plays_for_its_share_however_long_it_takes_to_start(tmp_path):
    """All play 10 steps a second. An entrant that starts slowly plays no less than one that does not."""
    curves = {"quick": flat(0.4), "slow": flat(0.7), "other": flat(0.5)}
    toy = Toy(curves, start_s={"base": 5.0, "slow": 9.0})
    found = played(tmp_path, toy, list(curves), minutes=5)
    first = {share["entrant"]: share for share in reversed(found.record.shares)}
    assert first["slow"]["steps"] >= first["quick"]["steps"] > 50 and first["slow"]["start_s"] == pytest.approx(9)
    assert first["slow"]["seconds"] == pytest.approx(first["slow"]["steps"] / 10)
    looks = [share["steps"] for share in found.record.shares if share["entrant"] == "slow"][-LOOKS:]
    assert min(looks) >= 50, "starts and evaluations come out of the total"
    assert toy.now <= 5 * 60 and found.record.chosen == "slow" and found.record.delivered is True


def test_evaluations_leave_a_small_budget_its_training(tmp_path):
    """64 episodes take 6.4 s, those of the race less; all starts and evaluations are paid before shares are cut."""
    curves = {"a": flat(0.9), "b": flat(0.2), "c": flat(0.4)}
    toy = Toy(curves, start_s={"base": 1.0, "a": 1.0, "b": 1.0, "c": 1.0})
    found = played(tmp_path, toy, list(curves), minutes=1.5)
    trained = [share["seconds"] for share in found.record.shares]
    assert len(trained) == sum(survivors(3)[:-1]) + LOOKS and toy.now <= 90


def test_entrants_that_would_not_learn_within_their_share_are_dropped_before_anything_is_played(tmp_path):
    """Of 1000 steps one of three plays 100 before it can be beaten, one of two 250, and one alone all."""
    toy = Toy({name: flat(0.6) for name in "abc"})
    found = race(tmp_path, toy, steps=1000)
    assert found.plan({"a": 99, "b": 99, "c": 99}) == ["a", "b", "c"] and found.record.dropped == {}
    found = race(tmp_path / "two", toy, steps=1000)
    found.free()
    assert found.plan({"a": 0, "b": 100, "c": 249}) == ["a", "b"]
    assert race(tmp_path / "two", toy, steps=1000).plan({"a": 0, "b": 100, "c": 249}) == ["a", "b"], (
        "it is written down"
    )
    assert "its warm-up takes 249 steps and its first share is 100; raise steps" in found.record.dropped["c"]
    assert race(tmp_path / "one", toy, steps=1000).plan({"a": 250, "b": 300}) == ["a"]
    assert race(tmp_path / "none", toy, steps=1000).plan({"a": 1000}) == []


def test_minutes_of_a_warm_up_are_told_by_the_speed_of_the_base(tmp_path):
    """An episode of 5 steps takes 0.1 s, so a learner's 1000 steps take 40 s."""
    toy = Toy({"a": flat(0.6), "b": flat(0.6)})
    for minutes, kept in ((5, ["a"]), (20, ["a", "b"])):
        found = race(tmp_path / str(minutes), toy, minutes=minutes)
        found.free()
        assert found.plan({"a": 0, "b": 1000}) == kept
        assert all(
            "its warm-up takes 40 s and its first share is" in why for why in (found.record.dropped or {}).values()
        )


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
    assert (
        "lazy is not raced: its warm-up takes 40 steps and its first share is 20; raise steps"
        in capsys.readouterr().out
    )
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
        return steering(Steerability(ones / 100, ones, reach * ones, 0.0, ones[:, 0], torch.arange(2), 1.5), "a guess")

    assert said(0.3).startswith("It can be steered by its noise: ")
    assert said(0.01).startswith("Its noise steers it faintly")


def test_a_policy_of_lerobot_is_examined_without_a_world(capsys, tmp_path):
    path = Path(__file__).parent / "lerobot_policies" / "diffusion_ddim"
    assert main(["doctor", f"policy.path={path}", "worlds=2", f"out={tmp_path}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "is a LeRobotDiffusion" in said and "random observations, because nothing says" in said
    assert json.loads((tmp_path / "doctor.json").read_text())["steerable"] is True
