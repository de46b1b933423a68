"""Entry point: ``burnish compare``."""

from __future__ import annotations

import sys

from ...policies.cli.cli import compose, main, to_object
from ..__main__ import GROUPS as FINETUNE
from ..refinement import FinetuneConfig
from .compare import CompareConfig, compared

GROUPS: dict[str, dict[str, type]] = {}  # no setting of this verb is a choice among configurations


def compare(config: CompareConfig) -> int:
    """A comparison of methods on one base, run by run, with its table and best run written; exit status."""
    schema = FinetuneConfig, FINETUNE["finetune"]
    return compared(config, lambda words: to_object(compose("finetune", *schema, words)).method)


if __name__ == "__main__":
    sys.exit(main())
