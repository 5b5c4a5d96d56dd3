"""Refuses calls of public functions with wrong arguments, and says their legal form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from colossal_lite.config.errors import nearest

Given = ParamSpec("Given")
Found = TypeVar("Found")


def with_form(name: str, form: str) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """A wrong call of the decorated function raises ValueError, in place of TypeError. It names the call, the
    fault, and the legal `form`."""

    def decorate(call: Callable[Given, Found]) -> Callable[Given, Found]:
        @wraps(call)
        def checked(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            try:
                return call(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # from within the call
                fault = _fault(call, args, kwargs) or str(error)
            raise ValueError(f"{name}: {fault}; legal: {form}")

        return checked

    return decorate


def with_fields(kind: type[Found]) -> type[Found]:
    """As `with_form`, of a call that makes an object of a dataclass. The legal form has the names of its fields."""
    names = [name for name in inspect.signature(kind).parameters]
    form = f"{kind.__name__}(...), with {', '.join(names)}"
    setattr(kind, "__init__", with_form(kind.__name__, form)(getattr(kind, "__init__")))  # noqa: B009, B010
    return kind


def _fault(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why the arguments do not fit, with the nearest name that the call has; "" if they fit."""
    signature = inspect.signature(call)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        is_name = "unexpected keyword" in str(error)
        unknown = next((given for given in kwargs if is_name and given not in signature.parameters), None)
        near = unknown and nearest(unknown, signature.parameters)
        return f"{error}; did you mean {near!r}?" if near else str(error)
    return ""
