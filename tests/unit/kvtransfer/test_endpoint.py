"""Layouts are compared whole."""

import pytest

from diptych.errors import LayoutMismatchError
from diptych.v1 import common_pb2
from kvtransfer.endpoint import compare_layouts


def test_every_field_of_a_layout_counts() -> None:
    for field in common_pb2.KVLayout.DESCRIPTOR.fields:
        ours, theirs = common_pb2.KVLayout(), common_pb2.KVLayout()
        compare_layouts(ours, theirs)
        value = "x" if isinstance(getattr(theirs, field.name), str) else 7
        setattr(theirs, field.name, value)
        with pytest.raises(LayoutMismatchError, match=f"^{field.name}: .*{value!r}") as excinfo:
            compare_layouts(ours, theirs)
        assert excinfo.value.metadata["field"] == field.name


def test_caches_of_other_element_types_are_no_pair() -> None:
    """Even where the blocks happen to be as large."""
    ours, theirs = (
        common_pb2.KVLayout(dtype=dtype, block_bytes=4096) for dtype in ("float32", "int8")
    )
    with pytest.raises(LayoutMismatchError, match=r"^dtype: .*float32.*int8") as excinfo:
        compare_layouts(ours, theirs)
    assert excinfo.value.metadata["field"] == "dtype"
