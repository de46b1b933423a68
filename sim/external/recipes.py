"""Recipes of Python environments for worlds that cannot live beside Burnish: ``burnish worlds``.

The maker of a recipe is the function of `side_worlds.py` that makes the world which env.id, the example here, names.
"""

from __future__ import annotations

from ...policies.cli.environments import CPU_TORCH, EnvironmentConfig, Environments, Recipe
from . import side_worlds

GROUPS: dict[str, dict[str, dict[str, type]]] = {}

RECIPES: dict[str, Recipe] = {
    # Planning crashes with NumPy 2 (ManiSkill's issues 1100 and 1359), and so does mplib 0.2.1.
    "maniskill-planner": Recipe(
        "ManiSkill 3 with its motion planner, which solves twelve tasks: demonstrations",
        ("3.11",),
        (
            CPU_TORCH,
            "numpy==1.26.4 absl-py==2.5.1 anyio==4.16.0 arm_pytorch_utilities==0.5.0 asttokens==3.0.2 "
            "certifi==2026.10.19.post1 charset-normalizer==3.5.2 click==8.5.1 cloudpickle==3.1.3 contourpy==1.3.3 "
            "cycler==0.12.1 dacite==1.9.2 defusedxml==0.7.1 docstring_parser==0.18.0 executing==2.3.0 "
            "Farama-Notifications==0.0.6 filelock==4.2.12 fonttools==4.68.0 fsspec==2026.9.0 gitdb==4.0.12 "
            "GitPython==3.2.1 gymnasium==1.4.0 h11==0.16.0 h5py==3.16.0 hf-xet==1.8.0 httpcore2==2.16.2 "
            "httpx2==2.16.2 huggingface_hub==2.4.0 idna==3.20 ImageIO==2.38.1 imageio-ffmpeg==0.8.1 "
            "importlib_resources==7.1.0 ipython==9.18.1 ipython_pygments_lexers==1.1.1 jedi==0.20.1 Jinja2==3.1.6 "
            "kiwisolver==1.5.1 lxml==6.1.3 mani_skill==3.0.1 MarkupSafe==3.0.4 matplotlib==3.11.2 "
            "matplotlib-inline==0.2.2 mplib==0.1.1 mpmath==1.3.0 networkx==3.6.1 nvidia-ml-py==13.615.71 "
            "opencv-python-headless==4.11.0.86 packaging==26.3 parso==0.8.7 pexpect==4.9.0 pillow==13.0.0 "
            "prompt_toolkit==3.0.53 psutil==7.2.2 ptyprocess==0.7.0 pure_eval==0.2.4 Pygments==2.21.0 "
            "pyparsing==3.3.3 pyperclip==1.11.0 python-dateutil==4.0.0 pytorch-kinematics==0.7.6 "
            "pytorch-seed==0.2.0 PyYAML==6.0.4 requests==2.34.2 sapien==3.0.3 scipy==1.17.1 setuptools==84.2.1 "
            "smmap==5.0.3 stack-data==0.6.3 sympy==1.14.0 tabulate==0.10.0 toppra==0.6.10 tqdm==4.70.1 "
            "traitlets==5.16.1 transforms3d==0.4.2 trimesh==5.2.0 truststore==0.10.5 typeguard==4.6.1 "
            "typing_extensions==4.16.0 tyro==1.0.17 tzdata==2026.6 urllib3==2.8.0 wcwidth==0.9.4",
        ),
        maker="maniskill",
        example="PickCube-v1",
        gigabytes=2.1,
    ),
    # Without the drivers of keyboards (pynput, evdev), which no world needs and which want a compiler.
    "robosuite": Recipe(
        "robosuite 1.5: Lift, Stack, Door, NutAssembly, PickPlace, Wipe and two-armed tasks",
        ("3.11", "3.12"),
        (
            "numpy==1.26.4 absl-py==2.5.1 cloudpickle==3.1.3 etils==1.15.0 Farama-Notifications==0.0.6 "
            "fsspec==2026.9.0 glfw==2.11.0 gymnasium==1.2.3 importlib_resources==7.1.0 llvmlite==0.50.0 mink==0.0.5 "
            "mujoco==3.3.7 numba==0.68.1 opencv-python-headless==4.11.0.86 packaging==26.3 pillow==13.0.0 "
            "PyOpenGL==3.1.10 qpsolvers==4.13.0 quadprog==0.1.14 robosuite==1.5.2 scipy==1.17.1 six==1.17.0 "
            "termcolor==3.3.0 tqdm==4.70.1 typing_extensions==4.16.0 zipp==4.1.2",
        ),
        maker="robosuite",
        example="Lift",
        gigabytes=1.3,
    ),
    # huggingface_hub below 1, because LIBERO gives it an argument that 1 does not know; torch and what else serves its
    # own training are left out.
    "libero": Recipe(
        "LIBERO: 130 tasks of five suites (its meshes are a download of their own)",
        ("3.11", "3.12"),
        (
            "numpy==1.26.4 absl-py==2.5.1 bddl==1.0.1 certifi==2026.10.19.post1 charset-normalizer==3.5.2 "
            "cloudpickle==3.1.3 contourpy==1.3.3 cycler==0.12.1 easydict==1.14 etils==1.15.0 "
            "Farama-Notifications==0.0.6 filelock==4.2.12 fonttools==4.68.0 fsspec==2026.9.0 future==1.0.0 "
            "glfw==2.11.0 gymnasium==1.2.3 hf-xet==1.8.0 hf-libero==0.1.4 huggingface_hub==0.36.2 idna==3.20 "
            "importlib_resources==7.1.0 kiwisolver==1.5.1 llvmlite==0.50.0 matplotlib==3.11.2 mujoco==3.3.7 "
            "numba==0.68.1 opencv-python-headless==4.11.0.86 packaging==26.3 pillow==13.0.0 PyOpenGL==3.1.10 "
            "pyparsing==3.3.3 python-dateutil==4.0.0 PyYAML==6.0.4 requests==2.34.2 robosuite==1.4.0 scipy==1.17.1 "
            "six==1.17.0 termcolor==3.3.0 tqdm==4.70.1 typing_extensions==4.16.0 urllib3==2.8.0 zipp==4.1.2",
        ),
        maker="libero",
        example="libero_goal/put_the_bowl_on_the_plate",
        gigabytes=1.5,
    ),
}


WORLDS = Environments("worlds", RECIPES, side_worlds.__file__, "env=remote env.name={name} env.id={example}")


def worlds(config: EnvironmentConfig) -> int:
    """The list of Python environments for worlds, printed, or one more made; exit status."""
    return WORLDS.run(config)


def maker_of(name: str) -> str:
    """For `world_server.load`."""
    return f"{WORLDS.script}:{WORLDS.recipe(name).maker}"
