"""Exchanges tensors between ranks of one host through shared memory: one copy in, one copy (or sum) out.

Note: the exchange.
Each rank has a **send buffer**: anonymous shared memory that every rank of its host has mapped.  It has one socket to
each of them.  A sender copies a tensor into a free part of its send buffer and sends its offset to each reader.  A
reader waits for that packet, and reads or adds the tensor in place.  Then it answers that it is done.  Then the part is
free again.  A send does not wait for its readers.  Where hundreds of packets are unread it waits for room, and receives
meanwhile.  An order of sends and receives that has no deadlock on paper has none here.
- **Order**: messages from one rank to another are numbered on each `MessageChannel`.  The n-th message expected is the
  n-th posted, whatever else is on the socket.  Every message has a tag (operation, shape, dtype).  Ranks that have
  left the common sequence of operations get an error at once, not after a timeout.
- **Sums** are made in rank order by the rank that needs them.  Their bits depend neither on timing nor on sizes.
- **Faults**: a rank that ends closes its sockets, and ranks that wait for it get an error.  A rank that stalls is
  waited for until the timeout.  Messages that a rank posted before it ended can still be read.
- **Cost**: the send buffer grows to the most bytes that were posted and not yet read, and no further.  A message is two
  short packets: the offset, and that it has been read.  No thread, no spinning.
Addresses are reserved for all of the host's memory at once and take none until they are written.  Linux only:
elsewhere `HostHandshake` finds no neighbour.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colossal_lite.distributed.send_buffer import ExchangeError, SendBuffer

Stage = tuple[list["Arrival"], "Finish"]
Finish = Callable[[], Stage | None]
MOST_LENT = 64
"""Parts of the send buffer in use before this rank reads its sockets: unread answers must not fill one."""
MESSAGE_BYTES = 4096
TOKEN_BYTES = 16
_HEADER = struct.Struct("<BHQQQ")  # kind, channel, number, offset, size in bytes; then the tag
_POSTED, _DONE = 1, 2


@dataclass
class Neighbour:
    """One rank of the same host: its socket, its send buffer, and its messages that no operation has requested
    yet."""

    rank: int
    socket: socket.socket
    memory: mmap.mmap
    arrived: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    """(offset, tag) by (channel, number)."""
    gone: bool = False


class Arrival:
    """An expected message. `wait`, then read `view()`, then `done()`."""

    def __init__(
        self, exchange: Exchange, source: Neighbour, key: tuple[int, int], like: Tensor, tag: str,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self._exchange, self._source, self._key, self._tag = exchange, source, key, tag
        self._shape, self._dtype, self._timeout_s = like.shape, like.dtype, timeout_s
        self._offset = -1

    def is_here(self) -> bool:
        """Whether it can be read without waiting. A wrong message raises later, in `wait`."""
        return self._source.arrived.get(self._key, (0, ""))[1] == self._tag

    def wait(self) -> None:
        """Wait for the message. Raises ExchangeError."""
        self._offset = self._exchange.await_message(self._source, self._key, self._tag, self._timeout_s)

    def view(self) -> Tensor:
        """The message, in the sender's send buffer. Its only reader may write into it."""
        assert self._offset >= 0, "it has not been waited for"
        return _tensor(self._source.memory, self._offset, self._shape, self._dtype)

    def done(self) -> None:
        """Give the part back to the sender."""
        self._exchange.say_done(self._source, self._offset, self._timeout_s)
        self._offset = -1


@dataclass(frozen=True)
class Lost:
    """Stands for a message to a rank that has ended: waiting for it raises."""

    rank: int

    def wait(self) -> None:
        raise ExchangeError(f"Connection closed by rank {self.rank}")


class Operation:
    """A collective in flight: expected messages, and what to do when all have arrived.

    `finish` may return a next stage, which posts and expects again. Messages that have arrived are read whenever this
    rank begins another operation. So neighbours can reuse their parts before this operation is waited for.
    """

    def __init__(self, exchange: Exchange, arrivals: Sequence[Arrival], finish: Finish) -> None:
        self._exchange, self._arrivals, self._finish = exchange, list(arrivals), finish
        if self._arrivals:
            exchange.unfinished.append(self)

    def wait(self) -> None:
        """Wait for its end. Raises ExchangeError."""
        while self._arrivals:
            self._take_stage()

    def advance(self) -> None:
        """Run as far as possible without waiting."""
        while self._arrivals and all(each.is_here() for each in self._arrivals):
            self._take_stage()

    def _take_stage(self) -> None:
        for each in self._arrivals:
            each.wait()
        following = self._finish()
        for each in self._arrivals:
            each.done()
        self._arrivals, self._finish = following if following else ([], nothing)
        if not self._arrivals:
            self._exchange.unfinished.remove(self)


class Exchange:
    """Posts and receives messages of this rank, with every other rank of its host. One thread at a time may use it."""

    def __init__(self, rank: int, send_buffer: SendBuffer, neighbours: Sequence[Neighbour]) -> None:
        self.rank, self.send_buffer = rank, send_buffer
        self._neighbours = {each.rank: each for each in neighbours}
        self._by_descriptor = {each.socket.fileno(): each for each in neighbours}
        self._poll = select.poll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)
        self._interrupted, self._bell = "", os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._bell, select.POLLIN)
        self.unfinished: list[Operation] = []
        self._posted: Counter[tuple[int, int]] = Counter()
        self._expected: Counter[tuple[int, int]] = Counter()

    def reserve(self, channel: int, readers: Sequence[int]) -> Mapping[int, int]:
        """The numbers of the next message to each of `readers` on `channel`, to be posted later."""
        numbers = {reader: self._posted[channel, reader] for reader in readers}
        self._posted.update((channel, reader) for reader in readers)
        return numbers

    def post(
        self, tensor: Tensor, channel: int, numbers: Mapping[int, int], tag: str, timeout_s: float
    ) -> Sequence[Lost]:
        """Copy `tensor`, of any strides, to where the ranks of `numbers` can read it, and send them its offset. Does
        not wait.

        Returns the ranks that have ended. If one is needed, its expected messages will raise.
        """
        if self.send_buffer.lent >= MOST_LENT:
            self._hear_all()
        size_bytes = tensor.numel() * tensor.element_size()
        self.send_buffer.posted_bytes += size_bytes
        offset = self.send_buffer.lend(size_bytes, len(numbers))
        _tensor(self.send_buffer.memory, offset, tensor.shape, tensor.dtype).copy_(tensor)
        text = tag.encode()[: MESSAGE_BYTES - _HEADER.size]
        lost = []
        for reader, number in numbers.items():
            words = _HEADER.pack(_POSTED, channel, number, offset, len(text)) + text
            if not self._tell(self._neighbours[reader], words, timeout_s):
                lost.append(Lost(reader))
                self.send_buffer.give_back(offset)
        return lost

    def expect(self, like: Tensor, channel: int, source: int, tag: str, timeout_s: float) -> Arrival:
        """The next message of rank `source` on `channel`, of the shape and dtype of `like`."""
        number = self._expected[channel, source]
        self._expected[channel, source] = number + 1
        return Arrival(self, self._neighbours[source], (channel, number), like, tag, timeout_s)

    def advance(self) -> None:
        """Read the messages that have arrived for operations in flight."""
        if self.unfinished:
            self._hear_all()
            for each in tuple(self.unfinished):
                each.advance()

    def await_message(self, source: Neighbour, key: tuple[int, int], tag: str, timeout_s: float) -> int:
        """Wait for a message; its offset."""
        self._hear(source, key)
        end = time.monotonic() + timeout_s
        while key not in source.arrived:
            if source.gone:
                raise ExchangeError(f"Connection closed by rank {source.rank}")
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise ExchangeError(f"Timed out after {timeout_s:g} s waiting for rank {source.rank}")
            for descriptor, _ in self._ready(left_s):
                self._hear(self._by_descriptor[descriptor], key)
        offset, theirs = source.arrived.pop(key)
        if theirs != tag:
            raise ExchangeError(f"rank {source.rank} has come with {theirs}, this rank with {tag}")
        return offset

    def say_done(self, source: Neighbour, offset: int, timeout_s: float) -> None:
        """Send the sender an answer that its part has been read. A sender that has ended needs none."""
        self._tell(source, _HEADER.pack(_DONE, 0, 0, offset, 0), timeout_s)

    def interrupt(self, why: str) -> None:
        """End the wait under way and all later ones, from another thread: they raise ExchangeError."""
        self._interrupted = why
        os.eventfd_write(self._bell, 1)

    def _ready(self, left_s: float) -> list[tuple[int, int]]:
        """Descriptors of neighbours that are ready within `left_s`, with their events. Raises ExchangeError if
        interrupted."""
        ready = self._poll.poll(left_s * 1000)
        if self._interrupted:
            raise ExchangeError(self._interrupted)
        return ready

    def close(self) -> None:
        """Close the sockets; shared memory is freed with its last view."""
        for each in self._neighbours.values():
            each.socket.close()
        self._neighbours.clear()
        os.close(self.send_buffer.descriptor)
        os.close(self._bell)

    def _tell(self, reader: Neighbour, words: bytes, timeout_s: float) -> bool:
        """Send one packet; False if the reader has ended. While its socket is full this rank receives, as all may be
        full."""
        end = time.monotonic() + timeout_s
        while not reader.gone:
            try:
                reader.socket.send(words)
                return True
            except BlockingIOError:
                if (left_s := end - time.monotonic()) <= 0:
                    message = f"Timed out after {timeout_s:g} s: rank {reader.rank} reads nothing"
                    raise ExchangeError(message) from None
                descriptor = reader.socket.fileno()
                self._poll.modify(descriptor, select.POLLIN | select.POLLOUT)
                try:
                    ready = self._ready(left_s)
                finally:
                    self._poll.modify(descriptor, select.POLLIN)
                for other, events in ready:
                    if events & ~select.POLLOUT:
                        self._hear(self._by_descriptor[other])
            except (BrokenPipeError, ConnectionResetError):
                return False  # its last packets may still be unread: reading them shows that it has ended
        return False

    def _hear_all(self) -> None:
        for each in self._neighbours.values():
            self._hear(each)

    def _hear(self, source: Neighbour, until: tuple[int, int] | None = None) -> None:
        """Read the packets of one neighbour, at most to the message `until`."""
        while not source.gone and (until is None or until not in source.arrived):
            try:
                packet = source.socket.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it ended with unread packets of ours; its own last ones follow, then nothing
            if not packet:
                source.gone = True
                self._poll.unregister(source.socket.fileno())
                return
            kind, channel, number, offset, size = _HEADER.unpack_from(packet)
            if kind == _DONE:
                self.send_buffer.give_back(offset)
            else:
                tag = packet[_HEADER.size : _HEADER.size + size].decode(errors="replace")
                source.arrived[channel, number] = (offset, tag)


@dataclass(frozen=True)
class MessageChannel:
    """One sequence of messages between the ranks of one group."""

    exchange: Exchange
    number: int
    ranks: tuple[int, ...]
    timeout_s: float

    def reserve(self, readers: Sequence[int]) -> Mapping[int, int]:
        """The numbers of messages that are posted later to the coordinates `readers`."""
        return self.exchange.reserve(self.number, [self.ranks[coord] for coord in readers])

    def post(self, tensor: Tensor, to: Mapping[int, int], tag: str) -> Sequence[Lost]:
        """Post `tensor` under its reserved number."""
        return self.exchange.post(tensor, self.number, to, tag, self.timeout_s)

    def expect(self, like: Tensor, source: int, tag: str) -> Arrival:
        """The next message of coordinate `source`, of the shape and dtype of `like`."""
        return self.exchange.expect(like, self.number, self.ranks[source], tag, self.timeout_s)


def _tensor(memory: mmap.mmap, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    numel = 1
    for size in shape:
        numel *= size
    if not numel:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset).view(tuple(shape))


def nothing() -> None:
    """Do nothing."""
    return None
