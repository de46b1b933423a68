"""Every module is where an installation puts it, and can be imported by itself."""

from __future__ import annotations

import importlib
import pkgutil

from conftest import demand

PACKAGES = [f"burnish.{name}" for name in ("policies", "sim", "finetune", "offline", "real_robot", "configs")]


def test_every_module_can_be_imported() -> None:
    for extra in ("stable_baselines3", "websockets", "msgpack"):
        demand(extra)

    def broken(name: str) -> None:
        raise AssertionError(f"{name} cannot be imported")

    names = list(PACKAGES)
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        names += [module.name for module in pkgutil.walk_packages(path, f"{package}.", onerror=broken)]
    assert len(names) > 150 and {"burnish.finetune.compare.report.page", "burnish.sim.tasks.insert"} <= set(names)
    for name in names:
        # The modules of a plug-in are for an environment with LeRobot (test_lerobot_export.py has a stand-in).
        if not name.endswith(".__main__") and not name.startswith("burnish.policies.lerobot.plugin."):
            importlib.import_module(name)
