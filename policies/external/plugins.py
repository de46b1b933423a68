"""``policy=callable``: a policy of an installed package, by the name under which the package announces it.

    [project.entry-points."burnish.policies"]
    my_policy = "my_package.policies:make"        # make(world: EnvSpec) -> Policy

A name ``module:callable`` leads to one of the user's own modules, those that BURNISH_IMPORT names. So a configuration
or a checkpoint can only choose among what is installed or was named here. The policy behind the name is a black box: it
acts, and its weights are neither read nor saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch import Tensor

from ..core.errors import BurnishError, did_you_mean, reason
from ..core.imports import named_modules
from ..core.seed import Noise
from ..core.spec import EnvSpec, PolicySpec
from ..core.types import Obs, Policy, Prefix
from .policy import checked

GROUP = "burnish.policies"


@dataclass
class CallableConfig:
    """Settings of `policy=callable`: the name of an installed policy."""

    name: str  # an entry point of the group burnish.policies, or module:callable of a module that BURNISH_IMPORT names


class InstalledPolicy:
    """A policy of an installed package, checked for a spec that fits the world."""

    def __init__(self, config: CallableConfig, world: EnvSpec) -> None:
        self.config, self.world = config, world
        make = _named_by_user(config.name) or loaded(GROUP, config.name, "policy.name", "a policy")
        try:
            self._policy: Policy = make(world)
        except BurnishError:
            raise
        except Exception as error:  # whatever the code of a package raises
            raise BurnishError(f"policy.name={config.name} could not be made ({_named(error)}); mend it") from error
        spec = getattr(self._policy, "spec", None)
        if not isinstance(spec, PolicySpec) or not hasattr(self._policy, "act"):
            raise BurnishError(
                f"policy.name={config.name} made a {type(self._policy).__name__}, which is no policy: it needs act and "
                "a PolicySpec as spec; wrap a function in burnish.policies.external.policy.CallablePolicy"
            )
        self.spec = spec

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        first = next(iter(obs.values()))
        try:
            answer: Any = self._policy.act(obs, noise=noise, prefix=prefix, greedy=greedy, generator=generator)
        except BurnishError:
            raise
        except Exception as error:
            raise BurnishError(f"policy.name={self.config.name} failed to act ({_named(error)}); mend it") from error
        return checked(answer, (len(first), *self.spec.chunk_shape), first.device).clamp(-1, 1)


def _named_by_user(name: str) -> Any:
    """The callable of ``module:callable``, None for another name."""
    module, colon, attribute = name.partition(":")
    if not colon:
        return None
    if module not in named_modules():
        raise BurnishError(
            f"policy.name={name} leads to a module that the user has not named; say BURNISH_IMPORT={module} before the "
            "command, and PYTHONPATH=. where it lies in this folder"
        )
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BurnishError(f"policy.name={name} cannot be imported: {reason(error)}") from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {reason(error)}"


def loaded(group: str, name: str, setting: str, what: str) -> Any:
    """The object that an installed package announces under ``name``; ``setting`` is the one that names it."""
    entry = _entry(group, name, setting, what)
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise BurnishError(f"{setting}={name} leads to {entry.value}, which is broken: {reason(error)}") from error


def _entry(group: str, name: str, setting: str, what: str) -> EntryPoint:
    entries = entry_points(group=group)
    found = {entry.value: entry for entry in entries if entry.name == name}
    if not found:
        raise BurnishError(
            f"no installed package announces {what} as {name!r} (entry points of the group {group}); "
            f"{did_you_mean(name, entries.names)}"
        )
    if len(found) > 1:
        raise BurnishError(f"{setting}={name} is ambiguous: it is {' and '.join(sorted(found))}; uninstall one")
    return next(iter(found.values()))
