"""What is only told to a device: the host sees none of its numbers."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_SEEN_BY_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}


class SeenByNobody(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what asks for a number of the device, as capturing a graph does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.name() not in _SEEN_BY_HOST, (
            f"{func.name()} within a graph, or what is launched ahead"
        )
        return func(*args, **(kwargs or {}))
