"""The authors' own loop of DPPO, for `onpolicy_speed.py`: one iteration on the hopper, in worlds that cost nothing.

It is a clone of github.com/irom-princeton/dppo, which is imported as it is (it needs einops). Its agent asks
for simulators that do not fit beside ours, and for an account at a service; it gets still worlds and silence instead.
Networks, chains, batches and passes are those of its `cfg/gym/finetune/hopper-v2/ft_ppo_diffusion_mlp.yaml`, weights
are random. It stops an update at a divergence of 1, which random weights may reach; here it makes all passes, as ours.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

WORLDS, CHUNK, STATE, ACTION = 40, 4, 11, 3


class StillWorlds:
    """Their vectorised environment: random observations, and no end."""

    def __init__(self) -> None:
        self._dice = np.random.default_rng(0)

    def reset(self) -> dict[str, Any]:
        return {"state": self._dice.standard_normal((WORLDS, 1, STATE))}

    def step(self, action: Any) -> tuple[Any, ...]:
        never = np.zeros(WORLDS, dtype=bool)
        return self.reset(), self._dice.standard_normal(WORLDS), never, never.copy(), [{}] * WORLDS


def agent(decisions: int, device: torch.device) -> Any:
    """Their agent at its settings for the hopper, with ``decisions`` of each world in an iteration."""
    theirs: Any = importlib.import_module("agent.finetune.train_ppo_diffusion_agent").TrainPPODiffusionAgent
    network: Any = importlib.import_module("model.diffusion.mlp_diffusion").DiffusionMLP
    critic: Any = importlib.import_module("model.common.critic").CriticObs
    policy: Any = importlib.import_module("model.diffusion.diffusion_ppo").PPODiffusion
    scheduler: Any = importlib.import_module("util.scheduler").CosineAnnealingWarmupRestarts
    scaler: Any = importlib.import_module("util.reward_scaling").RunningRewardScaler
    body = {"mlp_dims": [512] * 3, "activation_type": "ReLU", "residual_style": True, "cond_dim": STATE}
    judge = {"mlp_dims": [256] * 3, "activation_type": "Mish", "residual_style": True, "cond_dim": STATE}
    model = policy(
        actor=network(time_dim=16, horizon_steps=CHUNK, action_dim=ACTION, **body),
        critic=critic(**judge),
        gamma_denoising=0.99,
        clip_ploss_coef=0.01,
        clip_ploss_coef_base=0.01,
        clip_ploss_coef_rate=3,
        randn_clip_value=3,
        min_sampling_denoising_std=0.1,
        min_logprob_denoising_std=0.1,
        ft_denoising_steps=10,
        horizon_steps=CHUNK,
        obs_dim=STATE,
        action_dim=ACTION,
        denoising_steps=20,
        device=str(device),
    )
    made = theirs.__new__(theirs)
    venv = StillWorlds()
    actor_optimizer = torch.optim.AdamW(model.actor_ft.parameters(), lr=1e-4, weight_decay=0)
    critic_optimizer = torch.optim.AdamW(model.critic.parameters(), lr=1e-3, weight_decay=0)
    cycle = {"first_cycle_steps": 1000, "cycle_mult": 1.0, "warmup_steps": 10, "gamma": 1.0}
    facts: dict[str, Any] = {
        **{"device": str(device), "model": model, "venv": venv, "reset_env_all": lambda **options: venv.reset()},
        **{"itr": 0, "n_train_itr": 1, "n_steps": decisions, "n_envs": WORLDS, "n_cond_step": 1, "obs_dim": STATE},
        **{"action_dim": ACTION, "act_steps": CHUNK, "horizon_steps": CHUNK, "reward_horizon": CHUNK},
        **{"val_freq": 10, "force_train": True, "reset_at_iteration": True, "save_full_observations": False},
        **{"render_freq": 1, "render_video": False, "n_render": 0, "traj_plotter": None, "save_trajs": False},
        **{"furniture_sparse_reward": False, "best_reward_threshold_for_success": 3, "use_wandb": False},
        **{"log_freq": 1, "save_model_freq": 100, "save_model": lambda: None, "result_path": os.devnull},
        **{"batch_size": 50_000, "logprob_batch_size": 10_000, "update_epochs": 5, "target_kl": None},
        **{"gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0, "vf_coef": 0.5, "max_grad_norm": None},
        **{"n_critic_warmup_itr": 0, "learn_eta": False, "use_bc_loss": False, "bc_loss_coeff": 0},
        **{"reward_scale_running": True, "running_reward_scaler": scaler(WORLDS), "reward_scale_const": 1.0},
        **{"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer},
        "actor_lr_scheduler": scheduler(actor_optimizer, max_lr=1e-4, min_lr=1e-4, **cycle),
        "critic_lr_scheduler": scheduler(critic_optimizer, max_lr=1e-3, min_lr=1e-3, **cycle),
    }
    for name, value in facts.items():
        setattr(made, name, value)
    return made


@contextlib.contextmanager
def at_home(folder: Path) -> Iterator[None]:
    """Its modules are found, what it asks for beyond them is empty, and its progress is not printed."""
    stubs: dict[str, Any] = {name: ModuleType(name) for name in ("wandb", "env", "env.gym_utils")}
    stubs["env.gym_utils"].make_async = None
    sys.modules.update(stubs)
    sys.path.insert(0, str(folder))
    try:
        with tempfile.TemporaryFile("w") as away, contextlib.redirect_stdout(away):
            yield
    finally:
        sys.path.remove(str(folder))
        for name in stubs:
            del sys.modules[name]


def iteration_s(folder: Path, decisions: int, device: torch.device) -> float:
    """Seconds of one iteration, behind a short one."""
    with at_home(folder):
        for length in (4, decisions):
            made = agent(length, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            made.run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            spent = time.perf_counter() - begin
    return spent
