"""A refined policy on robots that are models, beside its success in simulation: the whole chain, the guard included.

    python benchmarks/rehearsal.py [--quick] [--policy] [--report]

The policy lies in `benchmarks/refined/insert`: imitated from 100 clumsy demonstrations by the recipe of `bases.py`, and
refined by `experiment=insert/dsrl`, seed 0; `--policy` makes it where it is missing (ten minutes of a core). It is
played on the same fresh seeds of the stream "rehearsal"

* in simulation,
* on the **twin**: a MuJoCo model behind the adapter, with set-points rounded to 12 bits per turn, noise of 0.3 mrad on
  measured angles, and 5 ms of latency either way,
* on the **emulated arm**: the driver of the SO-101, the unmodified SDK of its servos, an emulated bus that loses and
  bends one packet in a hundred, servos with their own profiles, and the same model behind them,

the last two on a virtual clock, so that a busy machine changes nothing. Success is judged by where the peg is, not by
where it was measured. RESULT: the three rates (``simulation``, ``twin``, ``emulated``) and the share of set-points that
the guard changed on the emulated arm (``guarded``).

At those limits (4 rad/s, 40 rad/s^2) the guard changes many set-points and costs no success. At a tenth of what drivers
of bus servos allow by default (2 and 10) it does. So a **gentle twin** is played twice: by the same policy, and by the
one in `benchmarks/refined/insert_guarded`, refined from the same base by the same command with the guard of that
twin active (`env.guard`). RESULT: ``gentle`` and ``gentle_refined``.

`--report` plays nothing: it writes the table of the JSON file that is there, and into docs/robots.md where that is the
committed one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from bases import demonstrations, imitated, world
from measure import RESULTS, embed, machine, markdown, options, page, publish, table

from burnish.policies.build import describe
from burnish.policies.runs.checkpoint import save
from burnish.policies.runs.run import find_policy
from burnish.sim.build import origin_of

HERE = Path(__file__).resolve().parent
REFINED, GUARDED = HERE / "refined" / "insert", HERE / "refined" / "insert_guarded"
GENTLE = {"velocity": 0.2, "acceleration": 1.0}  # rad/s and rad/s^2
ROBOTS = {
    "twin": {
        "robot": "twin",
        "robot.device.quantum": 0.001534,
        "robot.device.noise_rad": 0.0003,
        "robot.device.command_latency_s": 0.005,
        "robot.device.state_latency_s": 0.005,
    },
    "emulated": {"robot": "so101_emulated", "robot.loss": 0.01, "robot.corruption": 0.01},
    "gentle": {
        "robot": "twin",
        **{f"robot.device.{name}": value for name, value in GENTLE.items()},
        "safety.blend_s": 0,  # an episode has 3 s, and the limits are those of a gentle start already
    },
}
KINDS = ("acceleration", "braking", "velocity", "position")
COLUMNS = {"robot": "", "episodes": "d", "success_rate": ".3f", "success_low": ".3f", "success_high": ".3f"}
COLUMNS |= {"length_mean": ".1f", "ticks": "d", "guarded": ".2f"}
ROBOTS_PAGE = HERE.parent / "docs" / "robots.md"


def make_policy() -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        config = world("insert")
        policy = imitated(demonstrations(config, "clumsy", 100), None, seed=2)
        save(base / "policy", config=describe(policy, {"env": origin_of(config)}), state=policy.state_dict())
        guard = ["env=insert", *(f"env.guard.{name}={value}" for name, value in GENTLE.items())]
        for target, words in ((REFINED, []), (GUARDED, guard)):
            if target.exists():
                continue
            run = Path(folder, target.name)
            subprocess.run([sys.executable, "-m", "burnish.finetune", "finetune", f"policy.path={base}",
                            "experiment=insert/dsrl", "seed=0", f"out={run}", "threads=1", *words],
                           check=True)  # fmt: skip
            target.mkdir(parents=True)
            shutil.copytree(find_policy(run).path, target / "policy")


def played(name: str, policy: Path, episodes: int, compare: bool) -> dict:
    """``burnish deploy``, as anybody calls it."""
    with tempfile.TemporaryDirectory() as out:
        words = [f"{key}={value}" for key, value in ROBOTS[name].items()]
        words += [f"policy.path={policy}", "realtime=false", f"episodes={episodes}", "seed=2", f"out={out}"]
        words += [f"compare={str(compare).lower()}"]
        subprocess.run([sys.executable, "-m", "burnish.real_robot", "deploy", *words], check=True, stdout=sys.stderr)
        return json.loads(Path(out, "deploy.json").read_text())


def written(path: Path, rows: list[dict]) -> None:
    page(path, markdown(rows, COLUMNS))
    if path == RESULTS / "rehearsal.json":
        embed(ROBOTS_PAGE, "rehearsal", markdown(rows, COLUMNS))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--policy", action="store_true", help="make the policy where it is missing, and nothing else")
    parser.add_argument("--report", action="store_true", help="only write the table of the JSON file that is there")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    path = chosen.out / ("rehearsal_quick.json" if chosen.quick else "rehearsal.json")
    if chosen.report:
        written(path, json.loads(path.read_text(encoding="utf-8"))["rows"])
        return
    if chosen.policy:
        if not (REFINED.exists() and GUARDED.exists()):
            make_policy()
        return
    episodes = 5 if chosen.quick else 200
    found = {name: played(name, REFINED, episodes, compare=name == "twin") for name in ROBOTS}
    found["gentle_refined"] = played("gentle", GUARDED, episodes, compare=False)
    rows = [{"robot": "simulation", **found["twin"]["simulation"], "ticks": 0, "guarded": 0.0}]
    for name, data in found.items():
        ticks = sum(report["timing"]["ticks"] for report in data["reports"])
        changed = sum(max(report["counts"].get(kind, 0) for kind in KINDS) for report in data["reports"])
        rows.append({"robot": name, **data["robot"], "ticks": ticks, "guarded": changed / ticks})
    result = {row["robot"]: row["success_rate"] for row in rows} | {
        "guarded": next(row["guarded"] for row in rows if row["robot"] == "emulated")
    }
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(path, report, table(rows, COLUMNS), result)
    written(path, rows)


if __name__ == "__main__":
    main()
