"""SmolVLA here against LeRobot's own: equal weights, equal noise, equal actions, in both directions.

LeRobot 0.4.4 makes a tiny SmolVLA with random weights (two cameras of different shapes, instructions of different
lengths), saves it with its processors, and records actions and a training loss. Our reader loads that folder and must
give the same; then our writer's folder is loaded by LeRobot and must give the same again. Nothing comes from a hub: the
sizes of the vision-language model are given by hand, and its tokenizer is made of a few words.

    python benchmarks/vla_parity.py --venv FOLDER

makes a virtual environment there, with LeRobot and transformers from the package index (about 3 GB), unless it exists.
RESULT: ``vla_actions`` the largest difference of an action, in degrees of a robot whose joints move by some tens;
``vla_loss`` of the loss of a row; ``vla_back`` of an action, of our folder as LeRobot plays it; ``vla_tensors`` the
weights that were read and written, bitwise equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ["lerobot==0.4.4", "transformers>=4.57.1,<5", "num2words", "accelerate"]
BATCH, CHUNK, DIM, ROWS = 5, 10, 6, 300
TASKS = ["go to the red disc", "lift", "put the blue cube on the green one", "touch the ball", "wait"]


def lerobots(folder: Path, again: bool) -> None:
    """In LeRobot's environment: make, save and record; or, ``again``, load ours and record."""
    import torch
    import transformers
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.smolvla import smolvlm_with_expert
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
    from lerobot.processor import PolicyProcessorPipeline, tokenizer_processor
    from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # The words, and nothing from a hub.
    words = sorted({word for task in TASKS for word in task.split()})
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[UNK]")
    tokenizer.fake_image_token_id, tokenizer.global_image_token_id = 1, 2

    class Answers:
        """The place of a class whose ``from_pretrained`` would ask the hub."""

        def __init__(self, answer):
            self.from_pretrained = lambda *args, **kwargs: answer

    sizes = transformers.SmolVLMConfig(
        vision_config={
            **{"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 200},
            **{"image_size": 64, "patch_size": 8},
        },
        text_config={
            **{"model_type": "llama", "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2},
            **{"head_dim": 64, "num_hidden_layers": 6, "intermediate_size": 384, "vocab_size": ROWS},
            **{"rms_norm_eps": 1e-5, "pad_token_id": 0, "rope_theta": 100000.0},
        },
        scale_factor=2,
        pad_token_id=0,
    )
    smolvlm_with_expert.AutoConfig = Answers(sizes)
    smolvlm_with_expert.AutoProcessor = Answers(argparse.Namespace(tokenizer=tokenizer))
    tokenizer_processor.AutoTokenizer = Answers(tokenizer)
    if again:
        policy = SmolVLAPolicy.from_pretrained(folder / "ours", strict=True)
        before = PolicyProcessorPipeline.from_pretrained(folder / "ours", config_filename="policy_preprocessor.json")
        behind = PolicyProcessorPipeline.from_pretrained(
            folder / "ours",
            config_filename="policy_postprocessor.json",
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        )
        batch = load_file(folder / "inputs.safetensors")
    else:
        cameras = {"observation.images.front": (3, 48, 64), "observation.images.wrist": (3, 80, 40)}
        inputs = {name: PolicyFeature(FeatureType.VISUAL, shape) for name, shape in cameras.items()}
        inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (DIM,))
        config = SmolVLAConfig(
            input_features=inputs,
            output_features={"action": PolicyFeature(FeatureType.ACTION, (DIM,))},
            chunk_size=CHUNK,
            n_action_steps=4,
            num_steps=4,
            num_vlm_layers=4,
            resize_imgs_with_padding=(64, 64),
            device="cpu",
            push_to_hub=False,
        )
        policy = SmolVLAPolicy(config)
        for parameter in policy.parameters():  # norms too, which begin at 1
            parameter.data += 0.02 * torch.randn_like(parameter)
        scale = {"mean": 40 * torch.randn(DIM), "std": 10 + 10 * torch.rand(DIM), "count": torch.tensor([9])}
        wide = {
            name: scale["mean"] + sign * 8 * scale["std"] for name, sign in (("min", -1), ("max", 1))
        }  # clips nothing
        before, behind = make_smolvla_pre_post_processors(
            config, {"observation.state": scale, "action": {**scale, **wide}}
        )
        policy.save_pretrained(folder / "theirs")
        before.save_pretrained(folder / "theirs")
        behind.save_pretrained(folder / "theirs")
        shapes = {name: (BATCH, *shape) for name, shape in cameras.items()}
        batch = {name: torch.randint(0, 256, shape, dtype=torch.uint8) for name, shape in shapes.items()}
        batch["observation.state"] = 40 * torch.randn(BATCH, DIM)
        batch["noise"] = torch.randn(BATCH, CHUNK, 32)
        batch["action"] = scale["mean"] + scale["std"] * torch.randn(BATCH, CHUNK, DIM)
        batch["time"] = torch.rand(BATCH)
        save_file(batch, folder / "inputs.safetensors")
    policy.eval()
    noise, action, time = (batch.pop(name) for name in ("noise", "action", "time"))
    seen = {name: x / 255 if x.dtype == torch.uint8 else x for name, x in batch.items()}
    ready = before({**seen, "action": action, "task": TASKS})
    with torch.no_grad():
        target = ready.pop("action")
        chunk = behind(policy.predict_action_chunk(dict(ready), noise=noise.clone()))
        loss, _ = policy.forward({**ready, "action": target}, noise=noise, time=time, reduction="none")
    found = {"chunk": chunk, "loss": loss, "tokens": ready["observation.language.tokens"]}
    found["told"] = ready["observation.language.attention_mask"].to(torch.uint8)
    save_file({name: x.contiguous() for name, x in found.items()}, folder / f"recorded{'_again' * again}.safetensors")


def ours(folder: Path) -> dict[str, float]:
    """Load theirs, compare, and write it again."""
    import torch
    from safetensors.torch import load_file

    from burnish.policies.build import SmolVLALoadConfig, loaded
    from burnish.policies.chain import masked_mean
    from burnish.policies.core.scale import Scale
    from burnish.policies.core.tree import rows
    from burnish.policies.vla.lerobot import write

    torch.set_num_threads(1)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--venv", default="/tmp/vla_parity", help="environment of LeRobot; made if it is not there")
    parser.add_argument("--role", choices=["make", "again"], help="what LeRobot's environment does")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.role:
        lerobots(options.folder, options.role == "again")
        return 0
    python = Path(options.venv) / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", options.venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call = [python, Path(__file__).resolve(), "--folder", folder, "--role"]
        subprocess.run([*call, "make"], check=True)
        result = ours(folder)
        subprocess.run([*call, "again"], check=True)
        from safetensors.torch import load_file

        first, second = (load_file(folder / f"recorded{end}.safetensors")["chunk"] for end in ("", "_again"))
        result["vla_back"] = float((first - second).abs().max())
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
