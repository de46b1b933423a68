"""Errors on the way to a motor, each a sentence. The control side imports nothing else of ours, so these are
not the errors of `policies`; the entry points turn them into those."""

from __future__ import annotations


class RobotError(Exception):
    """Says what happened, why, and what to do."""


class IllegalTransition(RobotError):
    """A call that the phase of the adapter does not allow. Nothing was sent."""


class Refused(RobotError):
    """A command or a setting that the adapter does not take. Nothing was sent, and the phase stays."""


class StaleState(RobotError):
    """No new state within the time given. The last one is not repeated."""


class DeviceFault(RobotError):
    """The device or the link is not what it has to be; the adapter is in FAULT until a person calls ``recover``."""
