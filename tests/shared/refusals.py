"""Reads what a call is refused by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def told_of(call: Callable[[], Any]) -> str:
    """The message of the ValueError that `call` raises, or ""."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""
