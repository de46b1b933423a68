"""Every public function and class of the package says in a line what it is."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("policies", "offline", "finetune", "sim", "real_robot")
RIDDLES = ("What ", "Who ", "Whoever ", "Somebody ")  # a sentence with its subject left to be guessed
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def unexplained(path: str, source: str) -> Iterator[str]:
    """Each public definition of a module, methods not among them, that has no docstring or one without a subject."""
    for node in ast.parse(source).body:
        if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
            text = (ast.get_docstring(node) or "").strip()
            if not text or text.startswith(RIDDLES):
                yield f"{path}:{node.lineno} {node.name}"


def test_each_public_name_says_what_it_is():
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    assert len(files) > 10 * len(FOLDERS), "the tree was not found, so nothing was examined"
    found = [
        complaint
        for file in files
        for complaint in unexplained(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_rule_can_fail():
    source = '''"""A module."""

class Plain(NamedTuple):
    x: int

class Explained(Enum):
    """The colours of a light."""

    def method(self): ...

def silent(): return 1

async def late():
    x = "no docstring"

def empty():
    """   """

def riddle():
    """What a function gives."""

def _private(): ...

def explained():
    """The number one."""
    def inner(): ...
'''
    names = ["3 Plain", "11 silent", "13 late", "16 empty", "19 riddle"]
    assert list(unexplained("a.py", source)) == [f"a.py:{name}" for name in names]
