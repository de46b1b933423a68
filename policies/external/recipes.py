"""Recipes of Python environments for policies of other libraries: ``burnish policies``."""

from __future__ import annotations

from ..cli.environments import CPU_TORCH, EnvironmentConfig, Environments, Recipe
from . import lerobot_server

GROUPS: dict[str, dict[str, dict[str, type]]] = {}

RECIPES: dict[str, Recipe] = {
    # LeRobot asks for an older torch, and for programs of robots and recordings that no policy needs; it runs its
    # policies with this torch, which Burnish has too. Policies with pictures need torchvision's networks.
    "lerobot": Recipe(
        "LeRobot 0.4.4 on the CPU: ACT, diffusion, VQ-BeT, TD-MPC, SmolVLA and others, for policy=lerobot",
        ("3.11",),
        (
            f"{CPU_TORCH} torchvision==0.28.0",
            "accelerate==1.15.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 anyio==4.16.0 "
            "attrs==26.1.0 av==15.1.0 certifi==2026.10.19.post1 charset-normalizer==3.5.2 cloudpickle==3.1.3 "
            "datasets==4.8.5 deepdiff==8.6.2 diffusers==0.35.2 dill==0.4.1 docopt==0.6.2 draccus==0.10.0 "
            "einops==0.8.2 Farama-Notifications==0.0.6 filelock==4.2.12 frozenlist==1.8.0 fsspec==2026.2.0 "
            "gymnasium==1.4.0 h11==0.16.0 hf-xet==1.8.0 httpcore==1.0.9 httpx==0.28.1 huggingface-hub==0.35.3 "
            "idna==3.20 ImageIO==2.38.1 importlib_metadata==10.2.0 Jinja2==3.1.6 jsonlines==4.0.0 lerobot==0.4.4 "
            "MarkupSafe==3.0.4 mergedeep==1.3.4 mpmath==1.3.0 multidict==7.2.1 multiprocess==0.70.19 "
            "mypy_extensions==1.2.0 networkx==3.6.1 num2words==0.5.14 numpy==2.2.6 "
            "opencv-python-headless==4.12.0.88 orderly-set==5.5.0 packaging==25.0 pandas==3.1.1 pillow==13.0.0 "
            "propcache==0.5.4 psutil==7.2.2 pyarrow==26.0.1 pyserial==3.5 python-dateutil==4.0.0 "
            "pyyaml-include==1.4.1 PyYAML==6.0.4 regex==2026.11.19 requests==2.34.2 safetensors==0.8.0 "
            "setuptools==84.2.1 sympy==1.14.0 termcolor==3.3.0 tokenizers==0.22.2 toml==0.10.2 tqdm==4.70.1 "
            "transformers==4.57.6 typing-inspect==0.9.0 typing_extensions==4.16.0 tzdata==2026.6 urllib3==2.8.0 "
            "xxhash==4.1.0 yarl==1.25.1 zipp==4.1.2",
        ),
        maker="probe",
        example="FOLDER_OR_HUB_ID",
        gigabytes=1.9,
    ),
}

ENVIRONMENTS = Environments("policies", RECIPES, lerobot_server.__file__, "policy={name} policy.path={example}")


def policies(config: EnvironmentConfig) -> int:
    """The list of Python environments for policies, printed, or one more made; exit status."""
    return ENVIRONMENTS.run(config)
