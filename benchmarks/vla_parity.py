"""SmolVLA here against LeRobot's own: equal weights, equal noise, equal actions, in both directions.

    python benchmarks/vla_parity.py [--quick] [--venv FOLDER]

LeRobot 0.4.4 makes a tiny SmolVLA with random weights (two cameras of different shapes, instructions of different
lengths), saves it with its processors, and records actions and a training loss. Our reader loads that folder and must
give the same; then our writer's folder is loaded by LeRobot and must give the same again. Nothing comes from a hub: the
sizes of the vision-language model are given by hand, and its tokenizer is made of a few words.

``--venv`` is LeRobot's environment with transformers, which is made from the package index (about 3 GB) where it is
missing; with ``--quick``, which measures all there is, it must be there.

RESULT: ``vla_actions``, the largest difference of an action, in degrees of a robot whose joints move by some tens;
``vla_spread``, the deviation of actions; ``vla_loss``, the largest relative difference of the loss of a row;
``vla_back``, of an action of our folder as LeRobot plays it; ``vla_tensors``, the weights that were read and written,
bitwise equal.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measure import machine, options, publish, table
from safetensors.torch import load_file

from burnish.policies.build import SmolVLALoadConfig, loaded
from burnish.policies.chain import masked_mean
from burnish.policies.core.scale import Scale
from burnish.policies.core.tree import rows
from burnish.policies.vla.lerobot import write

PACKAGES = ["lerobot==0.4.4", "transformers>=4.57.1,<5", "num2words", "accelerate"]
HOME = Path.home() / ".cache" / "burnish" / "lerobot-0.4.4-smolvla"
WORKER = Path(__file__).with_name("vla_worker.py")


def ours(folder: Path) -> dict[str, float]:
    """Load theirs, compare, and write it again."""
    policy, _ = loaded(SmolVLALoadConfig(str(folder / "theirs"), late=True))
    batch, recorded = load_file(folder / "inputs.safetensors"), load_file(folder / "recorded.safetensors")
    obs = {"state": batch["observation.state"]}
    obs |= {f"image.{name}": batch[f"observation.images.{name}"] for name in ("front", "wrist")}
    tokens = recorded["tokens"].masked_fill(recorded["told"] == 0, -1)
    length = policy.spec.obs.shapes["tokens"][0]
    obs["tokens"] = torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]), value=-1)
    scale = Scale(policy.spec.action)
    with torch.no_grad():
        chunk = scale.to_actuator(policy.act(obs, noise=batch["noise"]))
        data = policy.in_chain(scale.to_unit(batch["action"]))
        x = torch.lerp(data, batch["noise"], rows(batch["time"], data))
        found = policy.velocity(x, 1 - batch["time"].double(), 0.0, policy.encode(obs))
        loss = masked_mean((found - (data - batch["noise"])).square(), None)
    write(policy, folder / "ours")
    old, new = (load_file(folder / name / "model.safetensors") for name in ("theirs", "ours"))
    same = sum(name in new and torch.equal(x, new[name]) for name, x in old.items())
    assert same == len(old) == len(new), "the same weights, bitwise"
    return {
        "vla_actions": float((chunk - recorded["chunk"]).abs().max()),
        "vla_loss": float(((loss - recorded["loss"]) / recorded["loss"]).abs().max()),
        "vla_spread": float(recorded["chunk"].std()),
        "vla_tensors": same,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--venv", type=Path, default=HOME, help="LeRobot's environment (default: %(default)s)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    python = chosen.venv / "bin" / "python"
    if not python.exists():
        if chosen.quick:
            raise SystemExit(f"there is no LeRobot in {chosen.venv}; a run without --quick makes it")
        subprocess.run([sys.executable, "-m", "venv", chosen.venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([python, WORKER, folder, "make"], check=True)
        result = ours(folder)
        subprocess.run([python, WORKER, folder, "again"], check=True)
        first, second = (load_file(folder / f"recorded{end}.safetensors")["chunk"] for end in ("", "_again"))
    result["vla_back"] = float((first - second).abs().max())
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "packages": PACKAGES}
    file = chosen.out / ("vla_parity_quick.json" if chosen.quick else "vla_parity.json")
    publish(file, report, table([result], dict.fromkeys(result, ".3g")), result)


if __name__ == "__main__":
    main()
