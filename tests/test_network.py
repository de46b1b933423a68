"""An ONNX file of a stranger: what repeats is refused before it runs, and what takes long or much is stopped."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.external.onnx import OnnxConfig, OnnxPolicy
from burnish.real_robot.errors import Refused
from burnish.real_robot.export import network
from burnish.real_robot.export.network import Network, check_graph
from burnish.real_robot.export.runtime import BoundNetwork

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
STATE = {"state": np.zeros((1, 2), np.float32)}
WORLD = EnvSpec(ObsSpec({"state": (2,)}), ActionSpec((-1.0, -1.0), (1.0, 1.0)), 10.0, "velocity", 5)


def numbers(name: str, *values: int):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def graph(nodes, initializers=(), inside=False):
    """Of ``state`` (1, 2) and what follows from it; ``inside`` another node, of nothing."""
    seen = [] if inside else [helper.make_tensor_value_info("state", FLOAT, [1, 2])]
    return helper.make_graph(
        nodes, "g", seen, [helper.make_tensor_value_info("out", FLOAT, None if inside else [1, 2])], list(initializers)
    )


def model(nodes, initializers=(), functions=()) -> bytes:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ours", 1)]
    made = helper.make_model(graph(nodes, initializers), opset_imports=opsets, ir_version=9, functions=list(functions))
    return made.SerializeToString()


def function(name: str, nodes):
    return helper.make_function(
        "ours", name, ["x"], ["y"], nodes, [helper.make_opsetid("", 17), helper.make_opsetid("ours", 1)]
    )


def body(*nodes):
    """Of a loop that carries ``x``."""
    ways = [("i", INT, []), ("go", BOOL, []), ("x", FLOAT, [1, 2])], [("on", BOOL, []), ("xo", FLOAT, [1, 2])]
    seen, given = ([helper.make_tensor_value_info(*way) for way in side] for side in ways)
    return helper.make_graph([helper.make_node("Identity", ["go"], ["on"]), *nodes], "b", seen, given)


LOOP = helper.make_node("Loop", ["n", "", "state"], ["out"], body=body(helper.make_node("Add", ["x", "x"], ["xo"])))
ENDLESS = model([LOOP], [numbers("n", 10**9)])  # half an hour, measured by a thousandth of it
SUM = [helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0), helper.make_node("Add", ["state", "sum"], ["out"])]


def branch(inner) -> bytes:
    other = graph([helper.make_node("Identity", ["state"], ["out"])], inside=True)
    test = helper.make_node("Cast", ["n"], ["yes"], to=BOOL)
    choice = helper.make_node("If", ["yes"], ["out"], then_branch=graph([inner], inside=True), else_branch=other)
    return model([test, choice], [numpy_helper.from_array(np.array(1, np.int64), "n")])


def in_pieces() -> bytes:
    """Protobuf joins a message that is given twice: the second half of the graph has the loop."""
    harmless = model([helper.make_node("Identity", ["state"], ["unused"])])
    return harmless + ENDLESS


def laughing(depth: int) -> bytes:
    """Each function calls the one below ten times."""

    def calls(name: str):
        steps = ["x", *(f"v{i}" for i in range(9)), "y"]
        return [helper.make_node(name, [a], [b], domain="ours") for a, b in pairwise(steps)]

    functions = [function("f0", [helper.make_node("Neg", ["x"], ["y"])])]
    functions += [function(f"f{i}", calls(f"f{i - 1}")) for i in range(1, depth + 1)]
    return model([helper.make_node(f"f{depth}", ["state"], ["out"], domain="ours")], functions=functions)


ITSELF = model(
    [helper.make_node("f", ["state"], ["out"], domain="ours")],
    functions=[function("f", [helper.make_node("f", ["x"], ["y"], domain="ours")])],
)
REFUSED = {
    "loop": (ENDLESS, "'Loop' may repeat for ever"),
    "loop in a branch": (branch(LOOP), "'Loop' may repeat for ever"),
    "loop in pieces": (in_pieces(), "'Loop' may repeat for ever"),
    "scan": (
        model([helper.make_node("Scan", ["state"], ["out"], body=body(), num_scan_inputs=1)]),
        "'Scan' may repeat",
    ),
    "loop in a function": (
        model([helper.make_node("f", ["state"], ["out"], domain="ours")], functions=[function("f", [LOOP])]),
        "'Loop' may repeat for ever",
    ),
    "functions of functions": (laughing(12), "unfolds to more than 100000 operations"),
    "function of itself": (ITSELF, "unfolds to more than 100000 operations"),
    "another format": (b"\0\0\0\0ORTM" + bytes(100), "onnxruntime's own format"),
    "no model": (b"\x80" * 100, "no ONNX model"),
    "cut off": (ENDLESS[:-50], "no ONNX model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_onnx_that_may_never_return_is_refused_before_it_runs(name, tmp_path):
    content, sentence = REFUSED[name]
    (tmp_path / "m.onnx").write_bytes(content)
    began = time.monotonic()
    with pytest.raises(BurnishError, match=sentence):
        OnnxPolicy(OnnxConfig(str(tmp_path / "m.onnx")), WORLD)
    with pytest.raises(Refused, match=sentence):  # the same file in a bundle
        BoundNetwork("policy.onnx", content, STATE, (2,))
    assert time.monotonic() - began < 10  # on a busy machine; the loop alone would take half an hour


def test_onnx_that_ends_is_run():
    """The control: branches, functions and functions of functions are no loops."""
    for content in (
        branch(helper.make_node("Neg", ["state"], ["out"])),
        laughing(2),
        model([helper.make_node("Neg", ["state"], ["out"])]),
    ):
        assert Network(content).run("out", STATE).shape == (1, 2)


def test_onnx_of_as_many_operations_as_allowed_is_read_and_one_more_is_not(monkeypatch):
    monkeypatch.setattr(network, "MOST_NODES", 1000)
    names = ["state", *(f"v{i}" for i in range(999)), "out"]
    nodes = [helper.make_node("Neg", [a], [b]) for a, b in pairwise(names)]
    check_graph(model(nodes))
    with pytest.raises(ValueError, match="more than 1000 operations"):
        check_graph(model([*nodes, helper.make_node("Neg", ["state"], ["more"])]))


def heavy(times: int) -> bytes:
    """Matrix products of 64 MB each, in a file of a few hundred bytes."""
    ones = helper.make_node("ConstantOfShape", ["s"], ["b0"], value=numpy_helper.from_array(np.ones(1, np.float32)))
    nodes = [helper.make_node("MatMul", [f"b{i}", f"b{i}"], [f"b{i + 1}"]) for i in range(times - 1)]
    last = helper.make_node("MatMul", [f"b{times - 1}", f"b{times - 1}"], ["big"])
    return model([ones, *nodes, last, *SUM], [numbers("s", 4000, 4000)])


def test_onnx_whose_first_answer_takes_long_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "FIRST_S", 0.5)
    (tmp_path / "m.onnx").write_bytes(heavy(500))  # minutes: a product has 1.3e11 operations
    began = time.monotonic()
    with pytest.raises(BurnishError, match=r"its first answer took longer than 0\.5 s"):
        OnnxPolicy(OnnxConfig(str(tmp_path / "m.onnx")), WORLD)
    assert time.monotonic() - began < 20


def test_onnx_that_asks_for_more_memory_than_allowed_is_refused(monkeypatch):
    """A file of a hundred bytes that unfolds to 6 GB; without the bound they are allocated, and written."""
    asks = model([helper.make_node("ConstantOfShape", ["s"], ["big"]), *SUM], [numbers("s", 3 * 2**29)])
    with pytest.raises(Exception, match="Available memory"):
        Network(asks).run("out", STATE)
