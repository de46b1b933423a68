"""Processors of a policy of Burnish in LeRobot, which has its normalisation inside."""

from __future__ import annotations

from typing import Any

from lerobot.processor import (  # pyright: ignore[reportMissingImports]
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
)
from lerobot.processor.converters import (  # pyright: ignore[reportMissingImports]
    policy_action_to_transition,
    transition_to_policy_action,
)
from lerobot.utils.constants import (  # pyright: ignore[reportMissingImports]
    POLICY_POSTPROCESSOR_DEFAULT_NAME,
    POLICY_PREPROCESSOR_DEFAULT_NAME,
)

from .configuration_burnish import BurnishConfig


def make_burnish_pre_post_processors(config: BurnishConfig, dataset_stats: Any = None) -> tuple[Any, Any]:
    """Before the policy: names, a batch, the device. Behind it: the CPU. ``dataset_stats`` are not needed."""
    before = [
        RenameObservationsProcessorStep(rename_map={}),
        AddBatchDimensionProcessorStep(),
        DeviceProcessorStep(device=config.device),
    ]
    return (
        PolicyProcessorPipeline(steps=before, name=POLICY_PREPROCESSOR_DEFAULT_NAME),
        PolicyProcessorPipeline(
            steps=[DeviceProcessorStep(device="cpu")],
            name=POLICY_POSTPROCESSOR_DEFAULT_NAME,
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        ),
    )
