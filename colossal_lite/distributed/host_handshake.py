"""Connects the ranks of one host: each maps the send buffers of the others and opens a socket to each of them.

Note: the handshake.
Every rank listens on a socket without a file and publishes a card: its host and a token.  `join` connects each pair of
ranks whose cards show one host, and passes the descriptors of their send buffers.  A process of another user, or
without this world's token, is refused.  Linux only: elsewhere `why_not` gives the reason, and no memory is shared.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colossal_lite.distributed.send_buffer import ExchangeError, SendBuffer, mapped
from colossal_lite.distributed.shared_memory import MESSAGE_BYTES, TOKEN_BYTES, Exchange, Neighbour


@dataclass(frozen=True)
class HostHandshake:
    """One rank's side of the handshake: `card` is what the others need, `join` takes their cards."""

    rank: int
    card: bytes
    """Of one length on every rank: the host, user and network namespace as a hash, then the rank's token."""
    _listener: socket.socket | None
    _token: bytes

    @classmethod
    def call(cls, rank: int) -> HostHandshake:
        """Listen, if this system can share memory between processes."""
        token = secrets.token_bytes(TOKEN_BYTES)
        if why_not():
            return cls(rank, secrets.token_bytes(32) + token, None, token)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(_address(token))
        listener.listen(socket.SOMAXCONN)
        return cls(rank, _host() + token, listener, token)

    def join(self, cards: Sequence[bytes], timeout_s: float) -> Exchange | None:
        """Connect to the ranks whose cards show this host. Collective; every rank must listen before the first joins.

        None where there are no such ranks. Raises ExchangeError if one does not connect within `timeout_s`.
        """
        here = host_of(self.card)
        mates = [other for other, card in enumerate(cards) if host_of(card) == here and other != self.rank]
        if self._listener is None or not mates:
            self.close()
            return None
        try:
            send_buffer = SendBuffer()
            below = [
                _enter(self.rank, send_buffer, other, cards[other][-TOKEN_BYTES:], timeout_s)
                for other in mates
                if other < self.rank
            ]
            above = self._receive({other for other in mates if other > self.rank}, send_buffer, timeout_s)
        except OSError as error:
            text = f"memory cannot be shared: {error}; backend='gloo' does without"
            raise ExchangeError(text) from error
        finally:
            self.close()
        return Exchange(self.rank, send_buffer, [*below, *above])

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _receive(self, wanted: set[int], send_buffer: SendBuffer, timeout_s: float) -> list[Neighbour]:
        assert self._listener is not None
        end, found = time.monotonic() + timeout_s, list[Neighbour]()
        while wanted:
            try:
                self._listener.settimeout(max(0.001, end - time.monotonic()))
                link, _ = self._listener.accept()
            except TimeoutError as error:
                late = ", ".join(map(str, sorted(wanted)))
                raise ExchangeError(
                    f"ranks {late} of this host have not come within {timeout_s:g} s"
                ) from error
            link.settimeout(max(0.001, end - time.monotonic()))
            rank, descriptor = self._heard(link)
            if rank not in wanted:  # of another user, or without the token
                link.close()
                if descriptor >= 0:
                    os.close(descriptor)
                continue
            socket.send_fds(link, [b"outbox"], [send_buffer.descriptor])
            wanted.discard(rank)
            found.append(_neighbour(rank, link, descriptor, send_buffer.capacity_bytes))
        return found

    def _heard(self, link: socket.socket) -> tuple[int, int]:
        """The rank that connects and the descriptor of its send buffer; -1 for another user or a wrong token."""
        _, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            return -1, -1
        try:
            words, descriptors, _, _ = socket.recv_fds(link, MESSAGE_BYTES, 1)
        except OSError:
            return -1, -1
        if len(descriptors) == 1 and secrets.compare_digest(words[:TOKEN_BYTES], self._token):
            return int.from_bytes(words[TOKEN_BYTES:], "little"), descriptors[0]
        for each in descriptors:
            os.close(each)
        return -1, -1


def why_not() -> str | None:
    """Why this process can share memory with no other; None if it can."""
    if sys.platform != "linux":
        return f"shared memory without a name is Linux's, this is {sys.platform}"
    try:
        os.close(os.memfd_create("colossal_lite probe", os.MFD_CLOEXEC))
        _host()
    except OSError as error:
        return str(error)
    return None


def host_of(card: bytes) -> bytes:
    """Equal on the cards of ranks that can share memory."""
    return card[:-TOKEN_BYTES]


def _enter(rank: int, send_buffer: SendBuffer, other: int, token: bytes, timeout_s: float) -> Neighbour:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(timeout_s)
    try:
        link.connect(_address(token))
        socket.send_fds(link, [token + rank.to_bytes(8, "little")], [send_buffer.descriptor])
        _, descriptors, _, _ = socket.recv_fds(link, MESSAGE_BYTES, 1)
    except OSError as error:
        link.close()
        raise ExchangeError(f"rank {other} of this host cannot be met: {error}") from error
    if len(descriptors) != 1:
        link.close()
        raise ExchangeError(f"rank {other} of this host has ended while it was met")
    return _neighbour(other, link, descriptors[0], send_buffer.capacity_bytes)


def _neighbour(rank: int, link: socket.socket, descriptor: int, capacity_bytes: int) -> Neighbour:
    memory = mapped(descriptor, capacity_bytes)
    os.close(descriptor)
    link.setblocking(False)
    return Neighbour(rank, link, memory)


def _address(token: bytes) -> bytes:
    """An address without a file: it ends with the socket."""
    return b"\0colossal_lite/" + token.hex().encode()


def _host() -> bytes:
    """Equal for processes that can share memory: one kernel boot, one network namespace, one user."""
    words = (
        Path("/proc/sys/kernel/random/boot_id").read_text(),
        str(os.stat("/proc/self/ns/net").st_ino),
        str(os.getuid()),
    )
    return hashlib.sha256("\n".join(words).encode()).digest()
