"""Comparing two workers' layouts. Pure."""

from diptych.errors import LayoutMismatchError
from diptych.v1 import common_pb2


def compare_layouts(reader: common_pb2.KVLayout, source: common_pb2.KVLayout) -> None:
    """Require equality field by field, fields added later included.

    Raises LayoutMismatchError: names the first field that differs and both values.
    """
    for field in common_pb2.KVLayout.DESCRIPTOR.fields:
        ours, theirs = getattr(reader, field.name), getattr(source, field.name)
        if ours != theirs:
            raise LayoutMismatchError(
                f"{field.name}: the reader has {ours!r}, the source has {theirs!r}",
                field=field.name,
                reader=str(ours),
                source=str(theirs),
            )
