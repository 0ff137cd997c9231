"""JSON that orjson writes and reads equals that of the standard library, also where orjson alone would differ."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store.quick_json import dumps, loads

TEXT = st.text(st.characters())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))


@given(VALUES)
def test_what_is_written_is_read_as_it_was(value):
    again = loads(dumps(value))
    assert again == value and repr(again) == repr(json.loads(json.dumps(value)))


@given(VALUES)
def test_what_the_standard_library_wrote_is_read_as_it_reads_it(value):
    data = json.dumps(value).encode()
    assert repr(loads(data)) == repr(json.loads(data))


@pytest.mark.parametrize("value", ["\ud800.warc", {"\udcff": 1}, 2**64, -2**63 - 1, 10**30, {"b": 1, "a": [2**64]}])
def test_what_orjson_refuses_goes_the_other_way(value):
    assert loads(dumps(value)) == value and loads(json.dumps(value).encode()) == value


@pytest.mark.parametrize("value", [float("nan"), {"a": [1.0, {"b": float("inf")}]}, [None, float("nan")],
                                   ["\ud800", float("nan")]])
def test_a_nan_is_refused(value):
    with pytest.raises(ValueError):
        dumps(value)


def test_the_order_of_keys_is_kept():
    assert list(loads(dumps({"b": 1, "a": 2}))) == ["b", "a"]
