"""The codec: what openpi packs byte for byte, every kind of array there and back, and nothing of what is hostile."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from burnish.policies.core.errors import BurnishError
from burnish.policies.wire import codec as wire

KINDS = ["bool", *(f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)), "float16", "float32", "float64"]


def test_an_array_is_the_bytes_that_openpi_sends():
    """By hand from the format: map of 1, "x", map of 4, keys of bytes, true, the data, "<f4", [2, 1]."""
    expected = (
        b"\x81\xa1x\x84"
        b"\xc4\x0b__ndarray__\xc3"
        b"\xc4\x04data\xc4\x08\x00\x00\x80\x3f\x00\x00\x00\xc0"
        b"\xc4\x05dtype\xa3<f4"
        b"\xc4\x05shape\x92\x02\x01"
    )
    value = {"x": np.array([[1.0], [-2.0]], np.float32)}
    assert wire.pack(value) == expected
    assert np.array_equal(wire.unpack(expected)["x"], value["x"])


def test_a_scalar_is_the_bytes_that_openpi_sends():
    expected = b"\x81\xa1s\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\x07\xc4\x05dtype\xa3<i4"
    assert wire.pack({"s": np.int32(7)}) == expected
    back = wire.unpack(expected)["s"]
    assert type(back) is np.int32 and back == 7


def test_plain_things_are_plain_messagepack():
    value = {"prompt": "pick ü", "n": -3, "flag": True, "none": None, "list": [1, 2.5, b"raw"], "deep": {"a": {"b": 1}}}
    assert wire.pack(value) == msgpack.packb(value) and wire.unpack(wire.pack(value)) == value
    assert wire.pack(np.float64(0.5)) == msgpack.packb(0.5), "Python's own float"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_every_dtype_and_shape_makes_the_round_trip(name, order, shape):
    source = np.random.default_rng(0)
    value = np.asarray(100 * source.standard_normal(shape)).astype(name).astype(np.dtype(name).newbyteorder(order))
    back = wire.unpack(wire.pack(value))
    assert back.dtype == np.dtype(name) and back.dtype.isnative and back.shape == shape and back.flags.writeable
    assert np.array_equal(back, value)
    scalar = wire.unpack(wire.pack(np.dtype(name).type(1)))
    assert scalar == 1 and (name == "float64" or type(scalar) is np.dtype(name).type)


def test_what_lies_otherwise_in_memory_arrives_in_order():
    value = np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1)[::2]
    assert not value.flags.c_contiguous and np.array_equal(wire.unpack(wire.pack(value)), value)


def array_frame(**changes):
    item = {"__ndarray__": True, "data": b"\x00" * 8, "dtype": "<f4", "shape": [2]} | changes
    return msgpack.packb({"x": {key.encode(): x for key, x in item.items() if x is not None}})


def test_the_frame_that_the_hostile_ones_differ_from_is_good():
    assert np.array_equal(wire.unpack(array_frame())["x"], np.zeros(2, np.float32))


@pytest.mark.parametrize(
    "dtype", ["|O", "O", "<c8", "|V4", "<U2", "|S4", "<M8[s]", "f4,f4", "nonsense", "", 3, None, b"<f4"]
)
def test_other_dtypes_are_refused(dtype):
    """One of objects would make pointers of the sender's bytes, and 20 000 fields a slow machine."""
    with pytest.raises(BurnishError, match="only bool, integers and floats"):
        wire.unpack(array_frame(dtype=dtype))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [3]},
        {"shape": [1]},
        {"shape": [-2]},
        {"shape": [-1, -2]},
        {"shape": [2**40, 2**40]},
        {"shape": [10**12, 0], "data": b""},
        {"shape": [2**62, 4], "data": b""},
        {"shape": [True, 2]},
        {"shape": [2.0]},
        {"shape": "2"},
        {"shape": None},
        {"shape": [1] * 17, "data": b"\x00" * 4},
        {"data": "12345678"},
        {"data": None},
        {"data": [0] * 8},
    ],
    ids=str,
)
def test_sizes_that_are_not_those_of_the_data_are_refused(changes):
    with pytest.raises(BurnishError, match="holds an array whose"):
        wire.unpack(array_frame(**changes))


@pytest.mark.parametrize("number", ["7", None, [7], b"7", 2**40, -(2**40)])
def test_scalars_that_are_no_numbers_of_their_kind_are_refused(number):
    data = msgpack.packb({b"__npgeneric__": True, b"data": number, b"dtype": "<i4"})
    with pytest.raises(BurnishError):
        wire.unpack(data)


def test_truncated_and_foreign_bytes_are_refused_by_a_sentence():
    whole = wire.pack({"x": np.arange(6.0), "deep": [{"a": 1}]})
    for cut in range(len(whole)):
        with pytest.raises(BurnishError):
            wire.unpack(whole[:cut])
    deep = b"\x91" * 5000 + b"\x00"
    many = b"\xdd\xff\xff\xff\xff"
    extension = msgpack.packb(msgpack.ExtType(5, b"code"))
    for data in (whole + b"\x00", b"\xc1", deep, many, extension, b"\xa2\xff\xfe", b"\x81\xc0\x01", "text", None):
        with pytest.raises(BurnishError):
            wire.unpack(data)


def test_random_damage_never_gets_past_a_sentence():
    """Of 3000 frames with three bytes changed each: an answer or a sentence, and no array that is not on the list."""
    source = np.random.default_rng(0)
    whole = wire.pack(
        {"state": np.arange(6, dtype=np.float32), "image": np.zeros((2, 2, 3), np.uint8), "n": np.int8(3)}
    )
    refused = 0
    for _ in range(3000):
        data = bytearray(whole)
        for place in source.integers(len(data), size=3):
            data[place] = source.integers(256)
        try:
            found = wire.unpack(bytes(data))
        except BurnishError:
            refused += 1
            continue
        arrays = [x for x in found.values() if isinstance(x, np.ndarray)] if isinstance(found, dict) else []
        assert all(x.dtype.name in KINDS for x in arrays)
    assert 300 < refused < 3000


def test_a_truth_value_is_true_or_false():
    found = wire.unpack(array_frame(dtype="|b1", data=b"\x02\x00", shape=[2]))["x"]
    assert found.view(np.uint8).tolist() == [1, 0]


def test_large_frames_are_refused_both_ways():
    value = np.zeros(1000, np.uint8)
    with pytest.raises(BurnishError, match="exceeds the limit of 500"):
        wire.pack(value, limit=500)
    with pytest.raises(BurnishError, match="exceeds the limit of 500"):
        wire.unpack(wire.pack(value), limit=500)


@pytest.mark.parametrize(
    "value", [np.array([object()]), np.zeros(2, np.complex64), np.array(["a"]), object(), {"a": {1, 2}}]
)
def test_what_has_no_form_is_not_sent(value):
    with pytest.raises(BurnishError, match="no form there"):
        wire.pack(value)
