"""The half of `lerobot_round_trip.py` that LeRobot's own environment runs: its loader, its training, its evaluation.

act FOLDER INPUTS OUTPUTS      actions of a policy for observations, noise and noise of each step, as safetensors
train ARGUMENTS                lerobot-train
eval ARGUMENTS                 lerobot-eval, which knows the environments of the round trip
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lerobot_worlds  # noqa: F401  # which registers the environment
import torch
from safetensors.torch import load_file, save_file


def act(folder: str, inputs: str, outputs: str) -> None:
    """Observations are (B, history, ...); the answer is (B, n, A), in units of the data."""
    from lerobot.configs.policies import PreTrainedConfig  # pyright: ignore[reportMissingImports]
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors  # pyright: ignore[reportMissingImports]
    from lerobot.utils.import_utils import register_third_party_plugins  # pyright: ignore[reportMissingImports]

    register_third_party_plugins()
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
    before, behind = make_pre_post_processors(config, pretrained_path=folder)
    given = load_file(inputs)
    noise = given.pop("noise", None)
    seen: dict[str, Any] = {name: x.flatten(0, 1) for name, x in given.items()}
    count, history = next(iter(given.values())).shape[:2]
    seen = {name: x for name, x in before(seen).items() if name in given}
    seen = {name: x.unflatten(0, (count, history)) for name, x in seen.items()}
    with torch.inference_mode():
        if config.type == "diffusion":
            chunk = policy.diffusion.generate_actions(seen, noise=noise)
        else:
            chunk = policy.predict_action_chunk({name: x[:, -1] for name, x in seen.items()})
    save_file({"chunk": behind(chunk)[:, : config.n_action_steps].contiguous()}, outputs)


def main() -> None:
    torch.set_num_threads(1)
    from lerobot.scripts import lerobot_eval, lerobot_train  # pyright: ignore[reportMissingImports]

    for verb, *words in json.loads(sys.argv[1]):
        sys.argv = [f"lerobot-{verb}", *words]
        if verb == "act":
            act(*words)
        else:
            {"train": lerobot_train, "eval": lerobot_eval}[verb].main()


if __name__ == "__main__":
    main()
