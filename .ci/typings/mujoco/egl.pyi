# MuJoCo's names live in compiled modules that no type checker can read.
from typing import Any

def __getattr__(name: str) -> Any: ...
