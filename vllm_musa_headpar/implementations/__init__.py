"""The ways to carry out an exchange. Each is a callable `(Exchange, ProcessGroup) -> Pending`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..blocks import Exchange


class Pending(Protocol):
    """An exchange under way. It owns the staging buffers until it is done."""

    def wait(self) -> Tensor:
        """Order the current stream after the transfer, unpack what is staged and return the result.

        Idempotent. A handle may also be dropped without waiting: the result is then undefined, later
        exchanges are not.
        """
        ...


Implementation = Callable[[Exchange, Any], Pending]
# Several exchanges in one launch; waiting completes all of them, and returns the first one's result.
Together = Callable[[Sequence[Exchange], Any], Pending]
