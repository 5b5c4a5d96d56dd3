"""What stands for `without_modes` where a mode of the tests must see the framework's own operations as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from colossal_lite.zero.forward_hooks import OutsideReads


@contextmanager
def unwatched() -> Iterator[None]:
    """Within, only the watch of a model's reads sees no operation."""

    def passed(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    with patch.object(OutsideReads, "__torch_dispatch__", passed):
        yield
