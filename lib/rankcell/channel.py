"""How a notebook and a rank talk: whole messages over a socket that only these two processes hold.

On one machine the socket is an unnamed pair, so no other user can reach it. Messages are pickles; a message
is only unpickled from a socket whose other end is known.
"""

import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!Q")


class Channel:
    """One end of a two-way message channel. `receive` waits; `poll` never waits."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, message: Any) -> None:
        """Send one picklable message. Raises OSError when the other end is gone."""
        payload = message if isinstance(message, bytes) else pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(payload) < 1 << 16:  # one packet, one wake-up of the reader
            self.socket.sendall(_HEADER.pack(len(payload)) + payload)
        else:
            self.socket.sendall(_HEADER.pack(len(payload)))
            self.socket.sendall(payload)

    def receive(self) -> Any:
        """The next message. Waits for it; raises EOFError when the other end is gone."""
        while (message := self._take()) is None:
            self._fill(wait=True)
        return message[0]

    def poll(self) -> list[Any]:
        """The messages that have arrived, without waiting. Raises EOFError at the end."""
        messages: list[Any] = []
        try:
            while self._fill(wait=False):
                pass
        except EOFError:
            if not (messages := self._all()):
                raise
            return messages
        return self._all()

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def _fill(self, *, wait: bool) -> bool:
        try:
            data = self.socket.recv(1 << 18, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError as error:
            raise EOFError from error
        if not data:
            raise EOFError("the other end of the channel is gone")
        self._buffer += data
        return True

    def _take(self) -> tuple[Any] | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        payload = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        return (pickle.loads(payload),)

    def _all(self) -> list[Any]:
        messages = []
        while (message := self._take()) is not None:
            messages.append(message[0])
        return messages


def pair() -> tuple[Channel, Channel]:
    """Two connected channels over an unnamed Unix socket pair."""
    a, b = socket.socketpair()
    return Channel(a), Channel(b)
