"""Words that the field uses, and sentences that say their subject first.

A newcomer searches for the usual word, so names of our own making are kept out of identifiers. Prose is free to use
them, but a sentence of a page, a docstring or a comment does not begin with what, who or nobody: such a sentence makes
the reader wait for the thing that it is about. Both rules are shown to be able to fail.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from test_structure import ROOT, Module, modules

PACKAGES = ("policies", "sim", "finetune", "offline", "real_robot")

# Old word -> the word that the field uses.
OLD_WORDS = {
    "told": "mask, data, spec",
    "announced": "spec_from_server, extensions",
    "door": "gateway",
    "porch": "admission",
    **dict.fromkeys(("stranger", "strangers"), "untrusted, unproven"),
    **dict.fromkeys(("everybody", "nobody", "somebody", "whoever"), "the thing itself"),
    "hear": "receive",
    **dict.fromkeys(("lesson", "lessons"), "demonstration, label"),
    "relay": "split chain",
    "skeleton": "structure",
    "orders": "actor configuration",
    **dict.fromkeys(("eyes", "sighted"), "camera observations, sensors"),
    **dict.fromkeys(("promise", "promises"), "adapter checks"),
    "watchman": "watchdog",
    **dict.fromkeys(("mind", "minds", "thinking"), "inference"),
    "receding": "real-time chunking",
    "grasp": "gripper channel",
    "fitting": "compatibility",
    **dict.fromkeys(("takeover", "takeovers"), "intervention"),
    "meaning": "action transform",
    "worth": "q_values",
    "ledger": "episode statistics",
    "letter": "message",
    **dict.fromkeys(("life", "lives"), "actor handle"),
    "exam": "evaluation",
    "outward": "gymnasium adapters",
    "hour": "soak",
    "meaningless": "negative control",
    "bombs": "decompression bombs",
}
# Genuine uses: (module or folder, word).
ALLOWED = {
    ("real_robot.control", "orders"),  # of a person, to the control loop: home, stop
    ("real_robot.drivers.universal_link", "orders"),
    ("policies.core.offset", "life"),  # half-life, of an exponential decay
    ("sim.experts.push", "orders"),  # in which an expert turns and shifts
    ("sim.experts", "grasp"),  # of a cube
    ("sim.external", "told"),  # settings in which a user names an environment
    ("sim.external", "letter"),  # a message between a worker and its parent
    ("sim.external.experts", "door"),  # of robosuite and Meta-World
    ("sim.external.experts", "grasp"),
}
# Good words in a name of a function, but not of a module, whose contents they do not say.
OLD_MODULES = {*OLD_WORDS, "trial", "outside", "installed", "keep", "drive", "apart", "question", "answer"}

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(name: str) -> list[str]:
    """The words of an identifier: "_toldNow" has told and now."""
    return [word.lower() for word in WORD.findall(name)]


def identifiers(module: Module) -> Iterator[tuple[int, str]]:
    """(line, name) of all that the module names: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def old_words(module: Module) -> Iterator[str]:
    for part in module.name.split("."):
        if part in OLD_MODULES:
            yield f"1: a module is called {part}; use {OLD_WORDS.get(part, 'a topic')}"
    for line, name in identifiers(module):
        for word in words(name):
            if word in OLD_WORDS and not any(module.within(place) and word == other for place, other in ALLOWED):
                yield f"{line}: {name}; say {OLD_WORDS[word]}"


# ---- sentences ----

RIDDLE = re.compile(
    r"(?:^|[.!?][\"'`)*]*\s+|\|\s*)(?:[#>|*_(\-`]|\d+\.|\s)*"  # the beginning of a text, of a sentence, of a cell
    r"((?:What|Whatever|Whoever|Who|Nobody|Everybody|Somebody)\b[^.!?|]{0,60})"
)
FENCE = re.compile(r"^\s*(```|~~~)")
BEGINS_ANEW = re.compile(r"\s*([*+-]\s|#|>|\||\d+\.\s)")


def riddles(text: str) -> list[str]:
    """The beginnings of its sentences that hide their subject. Lines are joined; a capital begins a sentence."""
    return [found[1].strip() for found in RIDDLE.finditer(" ".join(text.split()))]


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, item, row and heading of a page or a docstring, without blocks of code."""
    begun, text, code = 1, "", False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        fence = FENCE.match(line) is not None
        if text and (fence or not line.strip() or BEGINS_ANEW.match(line) or text.startswith("#")):
            yield begun, text
            text = ""
        code ^= fence
        if not (code or fence) and line.strip():
            begun, text = (begun, f"{text} {line.strip()}") if text else (number, line.strip())


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment; whole lines of comment that follow each other are one."""
    begun, last, text = 0, -1, ""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, said = token.start[0], token.string.lstrip("#! ")
        alone = lines[row - 1].lstrip().startswith("#")
        if text and alone and row == last + 1:
            text = f"{text} {said}"
        else:
            if text:
                yield begun, text
            begun, text = row, said
        last = row if alone else -1
    if text:
        yield begun, text


def texts(module: Module) -> Iterator[tuple[int, str]]:
    """(line, text) of its docstrings, comments and headings."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node) or ""
            yield from ((node.body[0].lineno + line - 1, text) for line, text in paragraphs(doc))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("#"):
            yield node.lineno, node.value  # a heading of a page that is made by a program
    yield from comments(module.source)


def hidden_subjects(module: Module) -> Iterator[str]:
    found = paragraphs(module.source) if module.path.endswith(".md") else texts(module)
    yield from (f"{line}: {start!r} hides its subject; say it first" for line, text in found for start in riddles(text))


def pages() -> list[Module]:
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Module(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def complaints(rule, found: list[Module]) -> str:
    return "\n".join(f"{module.path}:{said}" for module in found for said in rule(module))


def test_names_are_those_of_the_field():
    found = modules(*PACKAGES)
    assert len(found) > 100, "the tree was not found, so nothing was examined"
    assert not (said := complaints(old_words, found)), "\n" + said


def test_every_allowance_is_used():
    """An allowance that nothing needs would let the word come back."""
    for place, word in ALLOWED:
        names = [name for module in modules(*PACKAGES) if module.within(place) for _, name in identifiers(module)]
        assert any(word in words(name) for name in names), f"{place} has no {word} any more; take it off the list"


def test_sentences_say_their_subject_first():
    found = [module for module in modules(*PACKAGES, "benchmarks", "docs") if not module.within("sim.external")]
    found += pages()
    assert {"docs/concepts.md", "README.md", "docs/hook.py"} <= {module.path for module in found}
    assert not (said := complaints(hidden_subjects, found)), "\n" + said


@pytest.mark.parametrize(
    ("path", "source", "complains"),
    [
        ("offline/a.py", "told = 1", True),
        ("offline/a.py", "def f(told): ...", True),
        ("offline/a.py", "def f(*, told_now=1): ...", True),
        ("offline/a.py", "class Told: ...", True),
        ("offline/a.py", "class ToldSpec: ...", True),
        ("offline/a.py", "def _told(): ...", True),
        ("offline/a.py", "async def hear(): ...", True),
        ("offline/a.py", "self._door = 1", True),
        ("offline/a.py", "STRANGERS = 64", True),
        ("offline/a.py", "for lesson in x: ...", True),
        ("offline/relay.py", "", True),
        ("policies/keep/a.py", "", True),
        ("offline/a.py", "keep = 1", False),
        ("offline/a.py", "heard = indoors = untold = 1", False),
        ("offline/a.py", "x = 'told'  # it is told the hour that it is worth", False),
        ("offline/a.py", "'''The door is worth a lesson.'''", False),
        ("real_robot/control/a.py", "orders = 1", False),
        ("real_robot/serving/a.py", "orders = 1", True),
        ("real_robot/control/a.py", "door = 1", True),
    ],
)
def test_an_old_word_is_found(path, source, complains):
    assert bool(list(old_words(Module(path, source)))) == complains


@pytest.mark.parametrize(
    ("path", "source", "complains"),
    [
        ("offline/a.py", "'''What is sent.'''", True),
        ("offline/a.py", "'''A rule. Nobody knows it.'''", True),
        ("offline/a.py", "'''A rule. What\nis sent is kept.'''", True),
        ("offline/a.py", "'''A rule.\n\n**Who may die.** All.'''", True),
        ("offline/a.py", "'''A rule.\n\n* Whoever comes.'''", True),
        ("offline/a.py", "def f():\n    '''Everybody is told.'''", True),
        ("offline/a.py", "class A:\n    def f(self):\n        '''A rule (of `x`.) Somebody came.'''", True),
        ("offline/a.py", "# What is sent.\nx = 1", True),
        ("offline/a.py", "# A rule.\n# What is sent.\nx = 1", True),
        ("offline/a.py", "# A rule. Whatever\n# it is.\nx = 1", True),
        ("offline/a.py", "x = 1  # Who comes first", True),
        ("offline/a.py", "x = 1  # what the actor writes", False),
        ("offline/a.py", "'''It says what is sent, and nobody asks.'''", False),
        ("offline/a.py", "'''The rule is:\nWhatNot, of the class.'''", False),
        ("offline/a.py", "x = 'What is sent.'", False),
        ("docs/a.py", "x = '## What every one needs'", True),
        ("offline/a.py", "# a rule\nx = 1\n# that ends\nWhat = 2", False),
        ("docs/a.md", "## Who may die", True),
        ("docs/a.md", "A line.\n* **What is kept.** All.", True),
        ("docs/a.md", "A line ends.\nWhat follows.", True),
        ("docs/a.md", "| Nobody | 1 |", True),
        ("docs/a.md", "| 1 | What it is |", True),
        ("docs/a.md", "1. Somebody", True),
        ("docs/a.md", "*What it leaves.*", True),
        ("docs/a.md", "```\nWhat is it\n```\nText.", False),
        ("docs/a.md", "Said of the World Health Organization,\nWHO for short.", False),
        ("docs/a.md", "It knows what\nit is. The one who asks knows.", False),
    ],
)
def test_a_hidden_subject_is_found(path, source, complains):
    assert bool(list(hidden_subjects(Module(path, source)))) == complains
