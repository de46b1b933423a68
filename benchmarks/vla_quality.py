"""One small vision-language-action model before and after RL: success for each instruction, seen by cameras alone.

    python benchmarks/vla_quality.py [--quick] [--worlds ...] [--methods ...] [--seeds 0 1 2] [--jobs 1] [--report]

A base follows words, and errs in a way that RL can mend: `policy=tiny_vla` imitates an expert until it follows, then
for a while a clumsy one, who misses each colour in a direction of its own. On **tabletop**, the arm's own desk, it
touches and lifts three cubes within 48 ticks; on **discs** it goes to one of three. A base lies in `bases/`, and is
made where it is missing. From this one checkpoint each method refines it with each seed. The last policy, and not a
chosen one, plays `EPISODES` fresh episodes. The base plays the same ones, so that changes are paired (``base``, and
from noise 0 ``base_greedy``), and so does what further imitation of all its recordings makes of it
(``more_imitation``). Each also plays them **swapped**: every episode is told another instruction than the one that
counts, and who follows words fails.

RESULT, of the method with the largest mean change in its world: ``mean_change`` of success, mean over instructions and
seeds; ``worst_instruction``, the least change of one, mean over seeds; ``swap_control``, success with swapped words
after RL; of discs they are called ``discs_mean_change`` and so on. A world without runs has -inf.

A run leaves one JSON file in `results/vla_quality/`; runs that are there are not repeated.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, embed, machine, markdown, play_apart, publish, results_of, run_options, table
from refine_bases import fingerprint_of

from burnish.finetune import load, refine
from burnish.policies.__main__ import all_instructions
from burnish.policies.build import describe
from burnish.policies.cli.cli import main as burnish
from burnish.policies.controllers import controller_for
from burnish.policies.measure.by_instruction import by_instruction
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.policies.runs import checkpoint
from burnish.sim.build import raw_world, seen_by

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent / "docs" / "vla.md"
EPISODES = 450
IMITATION = ["experiment=tiny_vla", "eval.episodes=0", "threads=1"]
MORE = 1500  # updates of more imitation, which last about as long as a run


@dataclass(frozen=True)
class World:
    """A world, how its base is made, and what each method is told."""

    env: list[str]  # words that choose it
    key: str  # how its keys of RESULT begin
    stages: tuple[tuple[str, int, int], ...]  # of imitation: level of the expert, its episodes, updates on them
    methods: dict[str, dict[str, Any]]  # row of the table -> settings, and the method where it has another name
    sizes: tuple[str, ...] = ()  # words that choose those of the model


PER_CHUNK = {"gamma": 0.95, "per": "chunk"}
FLOW_SDE: dict[str, Any] = {
    "total": 12_000,
    "worlds": 100,
    "train": {"part": "head", "remember": "keys"},
    "discount": PER_CHUNK,
    "loop.decisions_per_update": 10,
    "ppo": {"minibatch": 250, "lr": 3e-4, "critic_lr": 1e-3},
}
DSRL: dict[str, Any] = {
    "total": 12_000,
    "worlds": 50,
    "rewards.shift": -1,
    "discount": PER_CHUNK,
    "loop": {"warmup": 1000, "updates_per_decision": 0.15},
    "sac.alpha": 0.02,
}
RECAP: dict[str, Any] = {  # the base does not know the words that RECAP adds to an instruction
    "total": 12_000,
    "worlds": 50,
    "worse": "left_out",
    "share": 0.4,
    "discount": PER_CHUNK,
    "head_start": 100,
    "actor_lr": 1e-4,
    "loop": {"warmup": 1000, "updates_per_decision": 0.1, "batch": 128},
}
RESIDUAL: dict[str, Any] = {  # a decision is a control tick here, and a chunk of 4 elsewhere
    "total": 48_000,
    "worlds": 100,
    "bound": 0.3,
    "discount": {"gamma": 0.98, "per": "step"},
    "loop.decisions_per_update": 40,
    "ppo": {"minibatch": 500, "lr": 3e-4},
}
# Sees the frozen model's output instead of its pictures.
DSRL_FEATURES: dict[str, Any] = {**DSRL, "method": "dsrl", "features": True}
METHODS = {"flow_sde": FLOW_SDE, "dsrl": DSRL, "dsrl_features": DSRL_FEATURES, "recap": RECAP, "residual_ppo": RESIDUAL}
# On the desk an episode lasts for up to 12 decisions, and a dense reward says how near success came.
LONGER = {"gamma": 0.98, "per": "chunk"}
AT_DESK: dict[str, dict[str, Any]] = {
    "flow_sde": {
        "total": 100_000,
        "worlds": 50,
        "train": {"part": "head", "remember": "keys"},
        "noise.level": 0.2,
        "discount": LONGER,
        "loop.decisions_per_update": 20,
        "ppo": {"minibatch": 250, "lr": 1e-4, "critic_lr": 1e-3, "critic_warmup": 2},
    },
    "dsrl_features": {
        "method": "dsrl",
        "features": True,
        "total": 32_000,
        "worlds": 16,
        "rewards.shift": -0.02,
        "discount": LONGER,
        "loop": {"warmup": 1000, "updates_per_decision": 0.3},
        "sac": {"alpha": 0.02, "backup_entropy": False},
    },
    "recap": RECAP,
    "residual_ppo": {
        "features": True,
        "total": 144_000,
        "worlds": 48,
        "bound": 0.3,
        "discount": {"gamma": 0.995, "per": "step"},
        "loop.decisions_per_update": 48,
        "ppo": {"minibatch": 500, "lr": 3e-4},
    },
}
DESK = ["env=tabletop_pixels", "env.cameras=[front]", "env.max_steps=48", "env.reward=dense"]
CUBES = [f"{skill} the {colour} cube" for skill in ("touch", "lift") for colour in ("red", "blue", "green")]
WORLDS = {
    "discs": World(["env=discs"], "vla_discs", (("clean", 1500, 1000), ("clumsy", 2000, 150)), METHODS),
    "tabletop": World(
        [*DESK, f"env.instructions={CUBES}", "worlds=16", "seed=1"],
        "vla",
        (("noisy", 2500, 6000), ("clumsy", 600, 200)),
        AT_DESK,
        ("policy.vision.side=64", "policy.vision.patch=8", "policy.vision.shuffle=2"),
    ),
}
FREE = ("base", "base_greedy", "more_imitation")
LESS = {"total": 40, "worlds": 4, "loop": {"warmup": 20, "batch": 8}}  # of DSRL, the one that is tried


def call(*words: str) -> None:
    if burnish([*words]):
        raise SystemExit(f"burnish {words[0]} failed")


def runs_of(name: str, quick: bool) -> Path:
    """The folder of recordings and stages, which are not kept."""
    return HERE.parent / "runs" / ("vla_quality_quick" if quick else "vla_quality") / name


def recordings_of(name: str, quick: bool) -> list[Path]:
    """Of each stage, made where they are missing."""
    found = []
    for level, episodes, _ in WORLDS[name].stages:
        found.append(runs_of(name, quick) / f"{level}_data")
        if not found[-1].exists():
            count = 20 if quick else episodes
            call("collect", *WORLDS[name].env, f"expert={level}", f"episodes={count}", f"out={found[-1]}")
    return found


def imitated(start: list[str], data: Path, steps: int, out: Path, seed: int = 0) -> Path:
    if not out.exists():
        call("pretrain", *start, *IMITATION, f"data={data}", f"train.steps={steps}", f"seed={seed}", f"out={out}")
    return out


def base_of(name: str, quick: bool) -> Path:
    """The folder of the base."""
    root = runs_of(name, quick)
    kept = (root / "base" if quick else HERE / "bases" / f"{name}_vla") / "policy"
    if kept.exists():
        return kept
    start, out = ["policy=tiny_vla", *WORLDS[name].sizes], root
    for (level, _, steps), data in zip(WORLDS[name].stages, recordings_of(name, quick), strict=True):
        out = imitated(start, data, 3 if quick else steps, root / level)
        start = going_on(out)
    made = load(out)
    checkpoint.save(kept, config=describe(made, {"env": made.origin["env"]}), state=made.state_dict())
    return kept


def going_on(policy: Path) -> list[str]:
    return ["policy=checkpoint", f"policy.path={policy}", "train.lr=3e-4", "train.warmup=20", "train.ema=0.98"]


def all_recordings(name: str, quick: bool) -> Path:
    """Those of all stages of the base, as one dataset."""
    whole = runs_of(name, quick) / "all_data"
    if not whole.exists():
        call("data", "merge", *map(str, recordings_of(name, quick)), f"out={whole}")
    return whole


def more_imitation(name: str, seed: int, quick: bool) -> Any:
    """The base after further imitation of all that it was made of."""
    start, out = going_on(base_of(name, quick)), runs_of(name, quick) / f"more-{seed}"
    return load(imitated(start, all_recordings(name, quick), 3 if quick else MORE, out, seed))


def played(policy: Any, seed: int, episodes: int, greedy: bool = False, swapped: bool = False) -> dict[str, float]:
    """Instruction -> success."""
    seeds = evaluation_seeds(episodes, base=seed + 1000)
    raw = raw_world(policy.origin["env"], 50, torch.device("cpu"))
    env = seen_by(policy.spec, raw, all_instructions(raw, seeds) if swapped else ())
    found = by_instruction(evaluate(env, controller_for(policy, env.num_envs, greedy=greedy), seeds))
    return {text: row["success_rate"] for text, row in found.items()}


def measured(name: str, method: str, seed: int, kept: Path, quick: bool) -> None:
    """One run, in a process of its own, written to ``kept``."""
    torch.set_num_threads(1)
    folder, began, total = base_of(name, quick), time.process_time(), 0
    policy = load(folder)
    if method == "more_imitation":
        policy = more_imitation(name, seed, quick)
    elif method not in FREE:
        settings = {**WORLDS[name].methods[method], **(LESS if quick else {})}
        total = settings["total"]
        run: dict[str, Any] = {"threads": 1, "eval.episodes": 0, "log_every": 2000}
        refined = refine(policy, seed=seed, on_log=say, **run, **{"method": method, **settings})
        if not refined.finished:
            raise SystemExit(f"{kept.stem} was stopped before its end, and is not kept")
        policy = refined.policy
    core_s, episodes = time.process_time() - began, 18 if quick else EPISODES
    greedy = method == "base_greedy"
    found = played(policy, seed, episodes, greedy)
    swapped = played(policy, seed, episodes, greedy, swapped=True)
    row = {
        "world": name,
        "method": method,
        "seed": seed,
        "decisions": total,
        "success": statistics.mean(found.values()),
        "worst": min(found.values()),
        "swapped": statistics.mean(swapped.values()),
        "core_s": core_s,
        "instructions": found,
        "instructions_swapped": swapped,
        "fingerprint": fingerprint_of(folder),
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(row) + "\n", encoding="utf-8")
    sys.stderr.write(f"{kept.stem}: {row['success']:.3f}, swapped {row['swapped']:.3f}\n")


def say(step: int, numbers: Any) -> None:
    kept = {key: round(float(x), 3) for key, x in numbers.items() if "success" in key or key.startswith("train/")}
    sys.stderr.write(f"{step} {kept}\n")


def summaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each world and method that has runs: means over the seeds, and the change of each instruction against the
    base on the same episodes."""
    found = []
    for name, method in dict.fromkeys((row["world"], row["method"]) for row in rows):
        own = [row for row in rows if (row["world"], row["method"]) == (name, method)]
        base = {row["seed"]: row for row in rows if (row["world"], row["method"]) == (name, "base")}
        pairs = [(row["instructions"], base[row["seed"]]["instructions"]) for row in own if row["seed"] in base]
        texts = sorted({text for after, before in pairs for text in after.keys() & before.keys()})
        each = [statistics.mean(a[text] - b[text] for a, b in pairs if text in a and text in b) for text in texts]
        means = {key: statistics.mean(row[key] for row in own) for key in ("decisions", "success", "swapped", "core_s")}
        counts = {"world": name, "method": method, "seeds": len(own)}
        change = {"change": statistics.mean(each), "least": min(each)} if each else {"change": None, "least": None}
        found.append({**counts, **means, **change})
    return found


def result_of(world: str, found: list[dict[str, Any]]) -> dict[str, float]:
    """The three keys of RESULT of one world."""
    tried = [row for row in found if row["world"] == world and row["method"] not in FREE and row["change"] is not None]
    best = max(tried, key=lambda row: row["change"], default={})
    names = {"mean_change": "change", "worst_instruction": "least", "swap_control": "swapped"}
    return {f"{WORLDS[world].key}_{name}": best.get(key, float("-inf")) for name, key in names.items()}


def main() -> None:
    parser = run_options(__doc__)
    every = sorted({method for world in WORLDS.values() for method in world.methods})
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS), help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", choices=every, default=every, help="default: %(default)s")
    chosen = parser.parse_args()
    results = results_of("vla_quality", chosen)
    if chosen.quick:
        chosen.worlds, chosen.methods, chosen.seeds = ["discs"], ["dsrl"], [0]
    cases = [
        (w, m, s, results / f"{w}-{m}-{s}.json", chosen.quick)
        for s in chosen.seeds
        for w in chosen.worlds
        for m in (*FREE, *chosen.methods)
        if m in FREE or m in WORLDS[w].methods
    ]
    if not chosen.report:
        missing = [case for case in cases if not case[3].exists()]
        play_apart(base_of, [(w, chosen.quick) for w in chosen.worlds], 1)  # before several runs want it
        imitating = dict.fromkeys(w for w, m, *_ in missing if m == "more_imitation")
        play_apart(all_recordings, [(w, chosen.quick) for w in imitating], 1)
        play_apart(measured, missing, chosen.jobs)
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    found, result = summaries(rows), {}
    for world in WORLDS:
        result |= result_of(world, found)
    columns = {"world": "", "method": "", "seeds": "", "decisions": ",.0f", "success": ".3f", "change": "+.3f"}
    columns |= {"least": "+.3f", "swapped": ".3f", "core_s": ".0f"}
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "summaries": found, "rows": rows}
    publish(results.with_suffix(".json"), report, table(found, columns), result)
    if results.parent == RESULTS and not chosen.quick:
        embed(DOCUMENT, "vla_quality", markdown(found, columns))


if __name__ == "__main__":
    main()
