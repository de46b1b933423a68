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
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import guard_checks
import pytest

from burnish.real_robot import guard
from hostile import SOAK

SOURCE = Path(str(guard.__file__)).read_text(encoding="utf-8")
EVERY = 1 if SOAK else 12

SLOW = (guard_checks.check_hostile_streams, guard_checks.check_every_tick)  # come last

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

# Mutants that change nothing that can be seen, each with its reason; a text must be the mutant's line.
EQUIVALENT = {
    "Array = NDArray[np.float64] -> pass": "annotations are not looked at",
    "Bools = NDArray[np.bool_] -> pass": "annotations are not looked at",
    "np.ones(self.shape[:-1], bool) if mask is None else mask -> mask": "an index of None writes to all rows too",
    "np.abs(rest) <= self._step -> np.abs(rest) < self._step": "both sides agree at A h",
    "speed < 1 -> speed <= 1": "a share of 1 changes nothing",
    "np.abs(chosen - wish) <= self._slack -> np.abs(chosen - wish) < self._slack": "a single number",
    "self._q.copy() -> self._q": "the next line but one writes into another array",
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


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, index, child) of all that may be mutated."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases") or isinstance(
            node, (ast.Raise, ast.Import, ast.ImportFrom)
        ):
            continue
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, (ast.expr, ast.stmt)):
                if isinstance(child, ast.ClassDef) and child.name in ("Intervention", "Guarded"):
                    continue
                yield node, field, i, child
                yield from places(child)


def mutants() -> Iterator[tuple[str, ast.Module]]:
    """(line, what it became) and the tree, all different from the original."""
    tree, seen = ast.parse(SOURCE), {ast.unparse(ast.parse(SOURCE))}
    for parent, field, index, child in list(places(tree)):
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
                line = getattr(child, "lineno", 0)
                yield f"{line}: {ast.unparse(child)} -> {ast.unparse(other)}", ast.parse(text)
        if index is None:
            setattr(parent, field, holder)
        else:
            holder[index] = child


def module(tree: ast.Module) -> ModuleType:
    """The guard as this tree has it. The tree is our own source with one change; nothing else is ever executed here."""
    made = ModuleType("burnish.real_robot.guard_mutant")
    made.__package__ = "burnish.real_robot"
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
        for check in sorted(guard_checks.CHECKS, key=SLOW.__contains__):
            try:
                check(mutant)
            except Exception:
                return check.__name__
    return ""


def test_the_original_lives():
    assert killer(ast.parse(SOURCE)) == ""


@pytest.mark.slow
def test_mutants_are_killed():
    everything = list(mutants())
    assert len(everything) > 200
    tried = everything[::EVERY]
    survivors = [name for name, tree in tried if not killer(tree)]
    real = [name for name in survivors if name.split(": ", 1)[1] not in EQUIVALENT]
    assert len(real) <= 0.05 * len(tried), f"{len(real)} of {len(tried)} live:\n" + "\n".join(real)
