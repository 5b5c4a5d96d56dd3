"""Declares the key-value store through which ranks exchange words, and implements it for one process."""

from __future__ import annotations

from typing import Protocol


class KeyValueStore(Protocol):
    """What ranks share: torch's stores have these methods."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class LocalStore:
    """A store for one process."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self._words[key] = value

    def get(self, key: str, /) -> bytes:
        return self._words[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._words for key in keys)

    def delete_key(self, key: str, /) -> bool:
        return self._words.pop(key, None) is not None
