"""Real-Time Data Exchange, the wire of Universal Robots: frames, types, and the recipes that name what is exchanged.

A frame is a big-endian length (which counts its own two bytes), a type and a payload. A recipe is a list of variables;
afterwards one data frame carries their values in this order behind the number of the recipe. Described in the
manufacturer's "Real-Time Data Exchange (RTDE) Guide", protocol version 2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

HEADER = struct.Struct(">HB")
LONGEST = 4096  # bytes that a frame may claim; all variables of a controller together need less
VERSION = 2


class Kind(IntEnum):
    """The types of frames are letters."""

    VERSION = ord("V")
    CONTROLLER = ord("v")
    TEXT = ord("M")
    DATA = ord("U")
    OUTPUTS = ord("O")
    INPUTS = ord("I")
    START = ord("S")
    PAUSE = ord("P")


class BadFrame(Exception):
    """The bytes that arrived are no frame; a stream cannot be followed any further after that."""


FORMATS: Mapping[str, str] = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT32": "I",
    "UINT64": "Q",
    "INT32": "i",
    "DOUBLE": "d",
    "VECTOR3D": "3d",
    "VECTOR6D": "6d",
    "VECTOR6INT32": "6i",
    "VECTOR6UINT32": "6I",
}

_OUTPUTS: Mapping[str, str] = {
    "DOUBLE": "timestamp actual_execution_time speed_scaling target_speed_fraction actual_momentum actual_main_voltage "
    "actual_robot_voltage actual_robot_current standard_analog_input0 standard_analog_input1 standard_analog_output0 "
    "standard_analog_output1 speed_scaling_combined tool_output_current payload",
    "VECTOR6D": "target_q target_qd target_qdd target_current target_moment actual_q actual_qd actual_current "
    "joint_control_output actual_TCP_pose actual_TCP_speed actual_TCP_force target_TCP_pose target_TCP_speed "
    "joint_temperatures actual_joint_voltage ft_raw_wrench payload_inertia actual_current_as_torque",
    "VECTOR3D": "actual_tool_accelerometer payload_cog",
    "VECTOR6INT32": "joint_mode",
    "UINT64": "actual_digital_input_bits actual_digital_output_bits",
    "UINT32": "runtime_state robot_status_bits safety_status_bits",
    "INT32": "robot_mode safety_mode safety_status",
}
_INPUTS: Mapping[str, str] = {
    "UINT32": "speed_slider_mask",
    "DOUBLE": "speed_slider_fraction standard_analog_output_0 standard_analog_output_1",
    "UINT8": "standard_digital_output_mask standard_digital_output configurable_digital_output_mask "
    "configurable_digital_output tool_digital_output_mask tool_digital_output standard_analog_output_mask "
    "standard_analog_output_type",
    "VECTOR6D": "external_force_torque",
}


def _table(words: Mapping[str, str], direction: str) -> dict[str, str]:
    table = {name: kind for kind, names in words.items() for name in names.split()}
    for i in range(48):
        table[f"{direction}_int_register_{i}"] = "INT32"
        table[f"{direction}_double_register_{i}"] = "DOUBLE"
    return table


OUTPUTS = _table(_OUTPUTS, "output")
INPUTS = _table(_INPUTS, "input")


@dataclass(frozen=True)
class Recipe:
    """The names and types of the values in one kind of data package."""

    number: int
    names: tuple[str, ...]
    types: tuple[str, ...]

    @property
    def layout(self) -> struct.Struct:
        return struct.Struct(">B" + "".join(FORMATS[kind] for kind in self.types))

    def pack(self, values: Mapping[str, Any]) -> bytes:
        flat: list[Any] = []
        for name in self.names:
            value = values[name]
            flat.extend(value if isinstance(value, Sequence) else (value,))
        return self.layout.pack(self.number, *flat)

    def unpack(self, payload: bytes) -> dict[str, Any]:
        layout = self.layout
        if len(payload) != layout.size:
            raise BadFrame(f"recipe {self.number} has {layout.size} bytes, and {len(payload)} came")
        flat = layout.unpack(payload)[1:]
        values, at = {}, 0
        for name, kind in zip(self.names, self.types, strict=True):
            width = int(FORMATS[kind][0]) if len(FORMATS[kind]) == 2 else 1
            values[name] = flat[at] if width == 1 else list(flat[at : at + width])
            at += width
        return values


def names_of(text: bytes) -> tuple[str, ...]:
    """Of a comma list; ur-rtde leaves a comma at its end."""
    return tuple(name for name in text.decode("ascii", "replace").split(",") if name)


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """A frame of RTDE: header and payload."""
    return HEADER.pack(HEADER.size + len(payload), kind) + payload


class Frames:
    """A stream of bytes, cut into frames however it arrives."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        self._rest += data
        while len(self._rest) >= HEADER.size:
            size, kind = HEADER.unpack_from(self._rest)
            if not HEADER.size <= size <= LONGEST:
                raise BadFrame(f"a frame claims {size} bytes")
            if len(self._rest) < size:
                return
            payload = bytes(self._rest[HEADER.size : size])
            del self._rest[:size]
            yield kind, payload
