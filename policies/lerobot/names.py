"""Names in LeRobot's checkpoints, for reading them (`checkpoint.py`) and for writing them (`native.py`)."""

from __future__ import annotations

from typing import Any

CONFIG, WEIGHTS = "config.json", "model.safetensors"
BEFORE, BEHIND = (f"policy_{place}processor.json" for place in ("pre", "post"))
PLUGIN = "burnish"  # type of our plug-in policy in LeRobot, and the entry of its config.json that describes it
# Steps of processors whose effect on the numbers is known: none, or the normalisation.
STEPS = {
    BEFORE: ("rename_observations_processor", "to_batch_processor", "device_processor", "normalizer_processor"),
    BEHIND: ("unnormalizer_processor", "device_processor"),
}
NORMALISER = {BEFORE: "normalizer_processor", BEHIND: "unnormalizer_processor"}

# Names of settings, LeRobot's: ours. Those of diffusion policies belong to the chain, the U-Net or the image encoder.
CHAIN = {"num_train_timesteps": "train_steps", "beta_start": "beta_start", "beta_end": "beta_end"}
CHAIN |= {"clip_sample_range": "clip"}
UNET = {"kernel_size": "kernel", "n_groups": "groups", "diffusion_step_embed_dim": "time_dim"}
UNET |= {"use_film_scale_modulation": "film_scale", "down_dims": "channels"}
VISION = {"vision_backbone": "backbone", "spatial_softmax_num_keypoints": "keypoints"}
VISION |= {"use_separate_rgb_encoder_per_camera": "separate", "resize_shape": "resize", "crop_shape": "crop"}
VISION |= {"crop_is_random": "random_crop"}
SCHEDULES = {"squaredcos_cap_v2": "cosine", "linear": "linear", "scaled_linear": "scaled_linear"}
CHOICES: dict[str, tuple[str, dict[Any, str]]] = {
    "noise_scheduler_type": ("sampler", {"DDPM": "ddpm", "DDIM": "ddim"}),
    "beta_schedule": ("schedule", SCHEDULES),
    "prediction_type": ("prediction", {"epsilon": "eps", "sample": "sample"}),
}
ACT = {"vision_backbone": "backbone", "pre_norm": "pre_norm", "feedforward_activation": "activation"}
ACT |= {"dim_model": "width", "n_heads": "heads", "dim_feedforward": "feedforward", "dropout": "dropout"}
ACT |= {"n_encoder_layers": "encoder_layers", "n_decoder_layers": "decoder_layers", "kl_weight": "kl_weight"}
ACT |= {"use_vae": "vae", "latent_dim": "latent", "n_vae_encoder_layers": "vae_layers"}
DILATED = "replace_final_stride_with_dilation"
