"""The round trip of a policy: LeRobot trains it, Burnish refines it, LeRobot plays the result.

    python benchmarks/lerobot_round_trip.py [--quick]

LeRobot lives in an environment of its own, which a full run makes; there it trains an ACT and a diffusion policy on
recordings of `reach` that Burnish collects, loads what Burnish exports, and evaluates it with `lerobot-eval`. ACT is
corrected by a residual (`residual_ppo`) and comes back as a plug-in policy; diffusion is refined by `dppo` and comes
back as a checkpoint of LeRobot's own. Every station plays the same episodes, by their seeds.

RESULT: the success of each policy as LeRobot trained it and plays it, as Burnish plays it, refined, and refined as
LeRobot plays it; ``parity``, the largest difference between the actions of LeRobot and ours, in shares of half their
range, on recorded observations and the same noise, of the two checkpoints and of the one that came back; and
``act_differ``, the episodes of ACT, which draws no noise, that ended otherwise in LeRobot's evaluation than in ours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lerobot_worlds import TASK, InTwoParts
from measure import machine, markdown, options, page, publish, table
from safetensors.torch import load_file, save_file

from burnish.finetune.api import load, refine, save
from burnish.policies.controllers import controller_for
from burnish.policies.core.scale import Scale
from burnish.policies.core.seed import derive
from burnish.policies.core.spec import ActionSpec
from burnish.policies.data.lerobot import write_lerobot
from burnish.policies.data.lerobot_layout import column_of
from burnish.policies.lerobot.export import export
from burnish.policies.measure.evaluate import evaluate
from burnish.policies.measure.statistics import wilson
from burnish.sim.build import seen_by
from burnish.sim.collect import collect
from burnish.sim.experts import make_expert

ROOT = Path(__file__).resolve().parents[1]
TORCH, LEROBOT, VISION = "torch==2.13.0", "lerobot==0.4.4", "torchvision==0.28.0"
HOME = Path.home() / ".cache" / "burnish" / f"{LEROBOT.replace('==', '-')}-{TORCH.replace('==', '-')}"
# LeRobot 0.4.4 asks for an older torch, and for more than these need of it.
NEEDS = ["numpy<2.3", "draccus==0.10.0", "huggingface_hub<0.36", "datasets==4.1.1", "av==15.1.0", "diffusers<0.40"]
NEEDS += ["einops", "deepdiff", "pyserial", "termcolor", "jsonlines", "packaging", "accelerate", "imageio", "pandas"]
NEEDS += ["opencv-python-headless", "gymnasium", "mujoco", "setuptools", "safetensors", "omegaconf", "hydra-core"]
SEED = 1000  # of the first episode of every evaluation
WORLDS = 25
ACT = ["type=act", "dim_model=64", "n_heads=4", "dim_feedforward=128", "n_encoder_layers=2", "n_vae_encoder_layers=2"]
ACT += ["chunk_size=8", "n_action_steps=4", "optimizer_lr=1e-3", "latent_dim=8"]
DIFFUSION = ["type=diffusion", "down_dims=[32,64]", "horizon=8", "n_action_steps=4", "noise_scheduler_type=DDIM"]
DIFFUSION += ["num_inference_steps=10", "optimizer_lr=1e-3", "scheduler_warmup_steps=20", "drop_n_last_frames=3"]
KINDS = {"act": ACT, "diffusion": DIFFUSION}


@dataclass(frozen=True)
class Effort:
    recorded: int  # episodes
    steps: int  # of each training
    played: int  # episodes of each evaluation
    act: dict[str, Any]  # settings of the residual
    diffusion: dict[str, Any]  # settings of DPPO


RESIDUAL = {"method": "residual_ppo", "bound": 0.3, "discount": {"gamma": 0.98, "per": "step"}}
DPPO = {"method": "dppo", "trained_steps": 10, "min_std": 0.03, "eta": 1.0}
FULL = Effort(
    recorded=50,
    steps=800,
    played=100,
    act={**RESIDUAL, "total": 60_000, "worlds": WORLDS, "loop": {"decisions_per_update": 192}},
    diffusion={**DPPO, "total": 2_400, "worlds": WORLDS, "loop": {"decisions_per_update": 24}},
)
QUICK = Effort(
    recorded=4,
    steps=10,
    played=4,
    act={**RESIDUAL, "total": 100, "worlds": 4, "loop": {"decisions_per_update": 24}},
    diffusion={**DPPO, "total": 16, "worlds": 4, "loop": {"decisions_per_update": 4}},
)


def install() -> None:
    """Where it is missing, LeRobot's environment. torchvision is there for its networks: it is built for another torch,
    so the file that describes its compiled operators to torch is emptied. None of them is called."""
    finished = HOME / "installed"  # an installation that was broken off has no such file
    if finished.exists():
        return
    shutil.rmtree(HOME, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
    for words in ([TORCH], NEEDS, ["--no-deps", LEROBOT, VISION]):
        subprocess.run([HOME / "bin/python", "-m", "pip", "install", "--quiet", *words], check=True)
    next(HOME.glob("lib/*/site-packages/torchvision/_meta_registrations.py")).write_text("")
    finished.touch()


def install_plugin(plugin: Path) -> None:
    """The Burnish of this tree, and the package by which LeRobot finds its policies."""
    pip = [HOME / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--force-reinstall", ROOT, plugin], check=True)


def in_lerobot(folder: Path, *jobs: list[Any]) -> None:
    command = [HOME / "bin/python", ROOT / "benchmarks" / "lerobot_worker.py", json.dumps(jobs, default=str)]
    with open(folder / "lerobot.log", "a", encoding="utf-8") as log:
        status = subprocess.run(command, stdout=log, stderr=log, cwd=folder, check=False).returncode
    if status:
        raise RuntimeError(f"LeRobot failed: {(folder / 'lerobot.log').read_text()[-1500:]}")


def training(name: str, data: Path, out: Path, effort: Effort) -> list[Any]:
    said = ["push_to_hub=false", "device=cpu", *KINDS[name]]
    return [
        *("train", "--dataset.repo_id=burnish/reach", f"--dataset.root={data}", f"--output_dir={out}"),
        *(f"--steps={effort.steps}", f"--save_freq={effort.steps}", "--batch_size=64", "--num_workers=0"),
        *("--wandb.enable=false", "--eval_freq=0", "--seed=1", *(f"--policy.{setting}" for setting in said)),
    ]


def evaluation(policy: Path, out: Path, effort: Effort) -> list[Any]:
    size = min(effort.played, WORLDS)
    return [
        *("eval", f"--policy.path={policy}", "--policy.device=cpu", "--env.type=burnish", f"--output_dir={out}"),
        *(f"--eval.n_episodes={effort.played}", f"--eval.batch_size={size}", f"--seed={SEED}"),
    ]


def read_evaluation(out: Path) -> list[bool]:
    found = json.loads((out / "eval_info.json").read_text())
    return [bool(x) for x in found["per_task"][0]["metrics"]["successes"]]


def played(policy: Any, effort: Effort) -> list[bool]:
    view = seen_by(policy.spec, InTwoParts(min(effort.played, WORLDS)))
    seeds = list(range(SEED, SEED + effort.played))
    success = evaluate(view, controller_for(policy, view.num_envs), seeds).success
    assert success is not None, "the task says what success is"
    return [bool(x) for x in success]


@torch.no_grad()
def actions(policy: Any, episodes: Any, folder: Path, name: str) -> tuple[list[Any], Any]:
    """The job that asks LeRobot for its actions, and a function that says how far ours are from them."""
    history, source = policy.spec.history, torch.Generator().manual_seed(0)
    whole = {
        key: torch.cat([x.obs[key][: history + 3].unfold(0, history, 1).movedim(-1, 1) for x in episodes])
        for key in policy.spec.obs.shapes
    }
    rows = len(next(iter(whole.values())))
    noise = torch.randn(rows, *policy.spec.chunk_shape, generator=source) if name == "diffusion" else None
    given = {column_of(key): x.contiguous() for key, x in whole.items()}
    save_file(given | ({} if noise is None else {"noise": noise}), folder / f"{name}_inputs.safetensors")
    obs = whole if history > 1 else {key: x[:, 0] for key, x in whole.items()}
    limits: ActionSpec = policy.spec.action
    ours = Scale(limits).to_actuator(policy.spec.executed(policy.act(obs, noise=noise)))
    half = (torch.tensor(limits.high) - torch.tensor(limits.low)) / 2

    def apart(outputs: Path) -> float:
        theirs = load_file(outputs)["chunk"].clamp(torch.tensor(limits.low), torch.tensor(limits.high))
        return float(((theirs - ours) / half).abs().max())

    return ["act", folder / f"{name}_inputs.safetensors"], apart


def main() -> None:
    chosen = options(__doc__).parse_args()
    torch.set_num_threads(1)
    effort, name = (QUICK, "lerobot_round_trip_quick") if chosen.quick else (FULL, "lerobot_round_trip")
    if chosen.quick and not (HOME / "installed").exists():
        raise SystemExit(f"there is no LeRobot in {HOME}; a run without --quick makes it")
    install()
    folder = HOME.parent / name  # of recordings, checkpoints and LeRobot's log
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()

    def note(policy: str, station: str, successes: list[bool]) -> None:
        low, high = wilson(sum(successes), len(successes))
        minutes = (time.perf_counter() - began) / 60
        rows.append({"policy": policy, "station": station, "episodes": len(successes), "minutes": minutes})
        rows[-1] |= {"success": sum(successes) / len(successes), "success_low": low, "success_high": high}
        sys.stderr.write(f"{policy} {station}: {rows[-1]['success']:.3f}\n")

    world = InTwoParts(min(effort.recorded, WORLDS))
    expert = make_expert(TASK, world.num_envs, "noisy", env=world.env)
    data = collect(world, expert, [derive(SEED, "recorded", i) for i in range(effort.recorded)])
    write_lerobot(data, folder / "data")
    kept = {kind: folder / kind / "checkpoints" / f"{effort.steps:06d}" / "pretrained_model" for kind in KINDS}
    in_lerobot(folder, *(training(kind, folder / "data", folder / kind, effort) for kind in KINDS))

    bases = {kind: load(path) for kind, path in kept.items()}
    asked, jobs = {}, []
    for kind, base in bases.items():
        (verb, inputs), asked[kind] = actions(base, data.episodes[:20], folder, kind)
        jobs += [[verb, kept[kind], inputs, folder / f"{kind}_outputs"]]
        jobs += [evaluation(kept[kind], folder / f"{kind}_lerobot", effort)]
    in_lerobot(folder, *jobs)
    parity = [apart(folder / f"{kind}_outputs") for kind, apart in asked.items()]

    jobs, back = [], {kind: folder / f"{kind}_back" for kind in KINDS}
    results: dict[str, list[bool]] = {}
    for kind, base in bases.items():
        results[kind] = read_evaluation(folder / f"{kind}_lerobot")
        note(kind, "lerobot", results[kind])
        ours = played(base, effort)
        note(kind, "burnish", ours)
        results[f"{kind} here"] = ours
        settings = getattr(effort, kind)
        refined = refine(base, InTwoParts(settings["worlds"]), seed=1, eval={"episodes": 0}, **settings).policy
        save(refined, folder / f"{kind}_refined")
        note(kind, "refined", played(refined, effort))
        sys.stderr.write(f"{kind}: {export(refined, {}, back[kind])}\n")
        if kind == "diffusion":
            (verb, inputs), asked["back"] = actions(refined, data.episodes[:20], folder, kind)
            jobs += [[verb, back[kind], inputs, folder / "back_outputs"]]
        jobs += [evaluation(back[kind], folder / f"{kind}_back_lerobot", effort)]
    install_plugin(back["act"] / "plugin")
    in_lerobot(folder, *jobs)
    parity.append(asked["back"](folder / "back_outputs"))
    for kind in KINDS:
        note(kind, "back", read_evaluation(folder / f"{kind}_back_lerobot"))

    result = {
        "parity": max(parity),
        "act_differ": sum(a != b for a, b in zip(results["act"], results["act here"], strict=True)),
    }
    result |= {f"{row['policy']}_{row['station']}": row["success"] for row in rows}
    columns = {"policy": "", "station": "", "episodes": "", "success": ".3f", "success_low": ".3f"}
    columns |= {"success_high": ".3f", "minutes": ".1f"}
    about = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "lerobot": LEROBOT, "parity": parity}
    path = chosen.out / f"{name}.json"
    publish(path, {**about, "rows": rows}, table(rows, columns), result)
    page(path, markdown(rows, columns))


if __name__ == "__main__":
    main()
