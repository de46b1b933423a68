"""Mutation testing of the joint guard: small mistakes are made in its syntax tree, all of them, one at a time, and the
checks of `guard_checks.py` must notice at least 95 of 100.

Made are: comparisons and operators exchanged or turned round, a term dropped, smaller and larger exchanged, signs and
``not`` dropped, numbers and indices off by one, conditions always or never true, calls replaced by their argument,
assignments left out. Not mutated: texts, annotations, imports, the classes of results, and what raises (a wrong
sentence is not a wrong guard, and `check_refusals` counts that it is raised).

The soak (``BURNISH_SOAK=1``) tries every mutant; otherwise every twelfth, so that the machinery itself cannot rot.
"""

from __future__ import annotations

import ast
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import guard_checks
import pytest

from burnish.real_robot.safety import guard
from soak import Progress, often

SOURCE = Path(str(guard.__file__)).read_text(encoding="utf-8")
EVERY = often(12, 1)

# Most mutants die of what is quick, so these come last, the slowest at the end.
SLOW = [
    guard_checks.check_share,
    guard_checks.check_rows,
    guard_checks.check_transparency,
    guard_checks.check_speed,
    guard_checks.check_step_response,
    guard_checks.check_hostile_streams,
    guard_checks.check_every_tick,
]
QUICK_FIRST = [check for check in guard_checks.CHECKS if check not in SLOW] + SLOW

SWAPPED_OPERATORS: dict[type, list[type]] = {
    ast.Add: [ast.Sub],
    ast.Sub: [ast.Add],
    ast.Mult: [ast.Div],
    ast.Div: [ast.Mult],
    ast.BitAnd: [ast.BitOr],
    ast.BitOr: [ast.BitAnd],
}
SWAPPED_COMPARISONS: dict[type, list[type]] = {
    ast.Lt: [ast.LtE, ast.Gt],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.Lt],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
SWAPPED_NAMES = {
    "minimum": "maximum",
    "maximum": "minimum",
    "floor": "ceil",
    "ceil": "floor",
    "any": "all",
    "all": "any",
    "ones": "zeros",
    "lower": "upper",
    "upper": "lower",
    "isfinite": "isnan",
}

# Mutants that change nothing that can be seen, each with its reason. One that is not made any more, or is killed, must
# not be listed.
ONE_POINT = "a single number, at which either answer is right"
SLOWER = "NumPy broadcasts it to the same, only more slowly"
EQUIVALENT = {
    ": Array = NDArray[np.float64] -> pass": "annotations are not looked at",
    ": Bools = NDArray[np.bool_] -> pass": "annotations are not looked at",
    "__post_init__: spacing > finest(self) -> spacing >= finest(self)": ONE_POINT,
    "__post_init__: self.lower -> self.upper (2)": "where all have the shape of one, they have that of the other",
    "of: upper - lower < 2 * quantum -> upper - lower <= 2 * quantum": ONE_POINT,
    "__init__: limits.lower -> limits.upper": "the other has the same length",
    "__init__: whole(-limits.velocity) -> -limits.velocity": SLOWER,
    "__init__: whole(step) -> step": SLOWER,
    "__init__: whole(limits.period_s) -> limits.period_s": SLOWER,
    "__init__: whole(SLACK * np.minimum(step, limits.velocity)) -> SLACK * np.minimum(step, limits.velocity)": SLOWER,
    "__init__: whole(2 / (step * limits.period_s), 3) -> 2 / (step * limits.period_s)": SLOWER,
    "__init__: whole(limits.period_s, 3) -> limits.period_s": SLOWER,
    "__init__: whole(step / 2, 3) -> step / 2": SLOWER,
    "reset: slice(None) if mask is None else mask -> mask": "an index of None is all rows too",
    "restore: slice(None) if mask is None else mask -> mask": "an index of None is all rows too",
    "reset: slice(None) -> None": "an index of None is all rows too",
    "restore: slice(None) -> None": "an index of None is all rows too",
    "__call__: 0 <= speed <= 1 -> 0 < speed <= 1": "what is no share counts as 0",
    "__call__: share < 1 -> share <= 1": "a share of 1 changes nothing",
    "__call__: 1 -> 2 (3)": "a share of 1 changes nothing",
    "__call__: if share < 1:\n    most = np.maximum(np.abs(v) - step, share * most)\n    least = -most -> if True:\n"
    "    most = np.maximum(np.abs(v) - step, share * most)\n    least = -most": "a share of 1 changes nothing",
    "__call__: if some_bad:\n    want[bad] = 0.0 -> if True:\n    want[bad] = 0.0": "no row, then none is chosen",
    "__call__: (want == wish) & (np.abs(chosen - wish) <= self._slack) -> np.abs(chosen - wish) <= self._slack": (
        "a tick that ends within the slack of its request may as well end on it"
    ),
    "__call__: np.abs(chosen - wish) <= self._slack -> np.abs(chosen - wish) < self._slack": ONE_POINT,
    "__call__: np.where(bad[..., None], sent, target) if some_bad else target"
    " -> np.where(bad[..., None], sent, target)": "where no row is bad, the target is chosen everywhere",
    "rounded: q > (limits.lower + limits.upper) / 2 -> q >= (limits.lower + limits.upper) / 2": ONE_POINT,
    "why: np.abs(speed) > limits.velocity -> np.abs(speed) >= limits.velocity": ONE_POINT,
    "why: np.abs(speed - v) > self._step + self._slack -> np.abs(speed - v) >= self._step + self._slack": ONE_POINT,
    "numbers: if found.dtype == np.float64:\n    return found.copy() -> if False:\n    return found.copy()": (
        "the general way, only slower"
    ),
    "_understood: if np.count_nonzero(finite) == finite.size:\n    return (asked, np.zeros(rows, bool)) -> if False:\n"
    "    return (asked, np.zeros(rows, bool))": "the general way, only slower",
}


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What could stand in the place of an expression by mistake."""

    def changed(**fields: Any) -> ast.AST:
        other = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    if isinstance(node, ast.BinOp):
        for operator in SWAPPED_OPERATORS.get(type(node.op), []):
            yield changed(op=operator())
        yield from (node.left, node.right)
    elif isinstance(node, ast.BoolOp):
        yield changed(op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        yield from node.values
    elif isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            for other in SWAPPED_COMPARISONS.get(type(operator), []):
                yield changed(ops=[*node.ops[:i], other(), *node.ops[i + 1 :]])
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Attribute) and node.attr in SWAPPED_NAMES:
        yield changed(attr=SWAPPED_NAMES[node.attr])
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and type(node.value) is not bool:
        for value in (node.value + 1, node.value - 1, *([0.0] if isinstance(node.value, float) else [])):
            yield ast.Constant(value)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Call):
        # f(a, b) -> b, a ...: a call that was forgotten.
        yield from (argument for argument in node.args if not isinstance(argument, (ast.GeneratorExp, ast.Starred)))
        if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name):
            yield node.func.value  # x.copy() -> x


def statements(node: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Assign, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()
    if isinstance(node, ast.If):
        for value in (True, False):
            other = copy.deepcopy(node)
            other.test = ast.Constant(value)
            yield other


def places(node: ast.AST, scope: str = "") -> Iterator[tuple[ast.AST, str, int | None, ast.AST, str]]:
    """(parent, field, index, child, function or class) of all that may be mutated."""
    scope = node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else scope
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases") or isinstance(
            node, (ast.Raise, ast.Import, ast.ImportFrom)
        ):
            continue
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, (ast.expr, ast.stmt)):
                if isinstance(child, ast.ClassDef) and child.name in ("Intervention", "Guarded"):
                    continue
                yield node, field, i, child, scope
                yield from places(child, scope)


def mutants() -> Iterator[tuple[str, ast.Module]]:
    """Where, what and what it became, counted where that repeats, and the tree; all different from the original."""
    tree, seen = ast.parse(SOURCE), {ast.unparse(ast.parse(SOURCE))}
    named: Counter[str] = Counter()
    for parent, field, index, child, scope in list(places(tree)):
        others = replacements(child) if isinstance(child, ast.expr) else statements(child)  # type: ignore[arg-type]
        holder = getattr(parent, field)
        for other in others:
            if index is None:
                setattr(parent, field, other)
            else:
                holder[index] = other
            text = ast.unparse(tree)
            if text not in seen:
                seen.add(text)
                name = f"{scope}: {ast.unparse(child)} -> {ast.unparse(other)}"
                named[name] += 1
                yield name if named[name] == 1 else f"{name} ({named[name]})", ast.parse(text)
        if index is None:
            setattr(parent, field, holder)
        else:
            holder[index] = child


def module(tree: ast.Module) -> ModuleType:
    """The guard as this tree has it. The tree is our own source with one change; nothing else is ever executed here."""
    made = ModuleType("burnish.real_robot.safety.guard_mutant")
    made.__package__ = "burnish.real_robot.safety"
    sys.modules[made.__name__] = made  # dataclasses look themselves up
    try:
        exec(compile(tree, "mutant", "exec"), made.__dict__)
    finally:
        del sys.modules[made.__name__]
    return made


def killer(tree: ast.Module) -> str:
    """The first check that fails, or nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            mutant = module(tree)
        except Exception as error:
            return f"import: {error}"
        for check in QUICK_FIRST:
            try:
                check(mutant)
            except Exception:
                return check.__name__
    return ""


@pytest.mark.slow
def test_the_original_lives():
    assert killer(ast.parse(SOURCE)) == ""


@pytest.mark.slow
def test_mutants_are_killed():
    everything = list(mutants())
    assert len(everything) > 200
    stale = EQUIVALENT.keys() - {name for name, _ in everything}
    assert not stale, f"listed as equivalent, and not made any more: {stale}"
    tried = everything[::EVERY]
    progress = Progress("mutants", len(tried))
    survivors = {name for name, tree in progress.along(tried) if not killer(tree)}
    wrong = {name for name, _ in tried if name in EQUIVALENT} - survivors
    assert not wrong, f"listed as equivalent, and killed: {wrong}"
    real = sorted(survivors - EQUIVALENT.keys())
    assert len(real) <= 0.05 * len(tried), f"{len(real)} of {len(tried)} live:\n" + "\n".join(real)
