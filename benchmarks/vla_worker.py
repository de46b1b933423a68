"""LeRobot's side of vla_parity.py, run by LeRobot's Python: make, save and record a SmolVLA, or record one of ours.

python benchmarks/vla_worker.py FOLDER make|again
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

BATCH, CHUNK, DIM, ROWS = 5, 10, 6, 300
TASKS = ["go to the red disc", "lift", "put the blue cube on the green one", "touch the ball", "wait"]


def lerobots(folder: Path, again: bool) -> None:
    """Make, save and record; or, ``again``, load ours and record."""
    import torch
    import transformers  # pyright: ignore[reportMissingImports]
    from lerobot.configs.types import FeatureType, PolicyFeature  # pyright: ignore[reportMissingImports]
    from lerobot.policies.smolvla import smolvlm_with_expert  # pyright: ignore[reportMissingImports]
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig  # pyright: ignore[reportMissingImports]
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy  # pyright: ignore[reportMissingImports]
    from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors  # pyright: ignore[reportMissingImports]
    from lerobot.processor import PolicyProcessorPipeline, tokenizer_processor  # pyright: ignore[reportMissingImports]
    from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action  # pyright: ignore[reportMissingImports]
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


if __name__ == "__main__":
    lerobots(Path(sys.argv[1]), sys.argv[2] == "again")
