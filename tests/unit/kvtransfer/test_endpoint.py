"""Layouts are compared whole."""

import pytest

from diptych.errors import LayoutMismatchError
from diptych.v1 import common_pb2
from kvtransfer.endpoint import compare_layouts


def test_every_field_of_a_layout_counts() -> None:
    for field in common_pb2.KVLayout.DESCRIPTOR.fields:
        ours, theirs = common_pb2.KVLayout(), common_pb2.KVLayout()
        compare_layouts(ours, theirs)
        if field.name == "groups":
            continue  # see below
        value = "x" if isinstance(getattr(theirs, field.name), str) else 7
        setattr(theirs, field.name, value)
        with pytest.raises(LayoutMismatchError, match=f"^{field.name}: .*{value!r}") as excinfo:
            compare_layouts(ours, theirs)
        assert excinfo.value.metadata["field"] == field.name


GROUP = {
    "kind": common_pb2.KV_KIND_SLIDING,
    "window": 7,
    "layers": [2],
    "num_kv_heads": 7,
    "head_dim": 7,
    "dtype": "x",
    "block_bytes": 7,
}


def test_every_field_of_a_group_of_layers_counts() -> None:
    assert list(GROUP) == [field.name for field in common_pb2.KVGroup.DESCRIPTOR.fields]
    full = common_pb2.KVGroup(kind=common_pb2.KV_KIND_FULL)
    for name, value in GROUP.items():
        ours, theirs = (common_pb2.KVLayout(groups=[full, full]) for _ in range(2))
        compare_layouts(ours, theirs)
        theirs.groups[1].MergeFrom(common_pb2.KVGroup(**{name: value}))  # type: ignore[arg-type]
        with pytest.raises(LayoutMismatchError) as excinfo:
            compare_layouts(ours, theirs)
        assert excinfo.value.metadata["field"] == f"groups[1].{name}"
        assert excinfo.value.message.endswith(f"the source has {getattr(theirs.groups[1], name)!r}")


def test_another_number_of_groups_is_told() -> None:
    ours, theirs = common_pb2.KVLayout(), common_pb2.KVLayout(groups=[common_pb2.KVGroup()])
    with pytest.raises(LayoutMismatchError, match=r"^groups: the reader has 0, the source has 1$"):
        compare_layouts(ours, theirs)


def test_caches_of_other_element_types_are_no_pair() -> None:
    """Even where the blocks happen to be as large."""
    ours, theirs = (
        common_pb2.KVLayout(dtype=dtype, block_bytes=4096) for dtype in ("float32", "int8")
    )
    with pytest.raises(LayoutMismatchError, match=r"^dtype: .*float32.*int8") as excinfo:
        compare_layouts(ours, theirs)
    assert excinfo.value.metadata["field"] == "dtype"
