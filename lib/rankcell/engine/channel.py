"""How a notebook and a rank talk: whole messages, as pickles, over a socket that only these two processes hold.

On one machine the socket is an unnamed pair, so no other user can reach it. Between machines it is TCP, and both ends
prove that they know a key (`authenticate`) before either unpickles a byte of the other.
"""

import contextlib
import functools
import hashlib
import hmac
import inspect
import json
import os
import pickle
import secrets
import socket
import struct
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from . import system

_HEADER = struct.Struct("!Q")
_NONCE = 32  # bytes
MAX_PARTS = 8  # how deep what cannot be pickled is looked for


class Channel:
    """One end of a two-way message channel, for any thread: `send` and `receive` wait, or `post` and `poll` do not."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.unsent = 0  # bytes that were posted and are not on their way yet
        self._unsent: deque[memoryview] = deque()
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Any) -> None:
        """Send one picklable message. Raises OSError when the other end is gone."""
        with self._sending:
            for part in _parts(message):
                self.socket.sendall(part)

    def post(self, message: Any) -> None:
        """Send one message as far as the other end takes it; `push` sends the rest. OSError: that end is gone."""
        parts = _parts(message)
        self._unsent += map(memoryview, parts)
        self.unsent += sum(map(len, parts))
        self.push()

    def push(self) -> None:
        """Send what was posted, as far as the other end takes it now. Raises OSError when it is gone."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self.unsent -= sent
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def receive(self) -> Any:
        """The next message. Waits for it; raises EOFError when the other end is gone."""
        while (payload := self._take()) is None:
            self._fill(wait=True)
        return pickle.loads(payload)

    def poll(self) -> list[Any]:
        """The messages that have arrived, without waiting. Raises EOFError at the end."""
        return [pickle.loads(payload) for payload in self.poll_packed()]

    def poll_packed(self) -> list[bytes]:
        """The messages that have arrived, as they were packed: to pass them on, or to unpack them later."""
        ended = None
        try:
            while self._fill(wait=False):
                pass
        except EOFError as error:
            ended = error
        messages = list(iter(self._take, None))
        if ended and not messages:
            raise ended
        return messages

    def close(self) -> None:
        self.socket.close()

    def _fill(self, *, wait: bool) -> bool:
        try:
            data = self.socket.recv(1 << 18, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (ConnectionResetError, TimeoutError) as error:  # a machine that is gone answers no probe
            raise EOFError from error
        if not data:
            raise EOFError("the other end of the channel is gone")
        self._buffer += data
        return True

    def _take(self) -> bytes | None:
        if len(self._buffer) < _HEADER.size:
            return None
        end = _HEADER.size + _HEADER.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        payload = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        return payload


def _parts(message: Any) -> list[bytes]:
    """A message as it travels; one that is packed already stays as it is."""
    payload = message if isinstance(message, bytes) else pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    header = _HEADER.pack(len(payload))
    # a small message is one packet, and one wake-up of the reader
    return [header + payload] if len(payload) < 1 << 16 else [header, payload]


def pair() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end, over an unnamed Unix socket pair."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs


def authenticate(sock: socket.socket, key: bytes, *, server: bool, timeout: float = 10.0) -> None:
    """Prove to the other end of `sock` that we know `key`, and have it prove the same within `timeout` seconds.

    Each end answers random bytes of the other with their HMAC-SHA256 under the key and its own role, so that no answer
    can be played back to its sender. Only numbers of fixed length are read. What follows is not encrypted. Raises
    PermissionError: the other end does not know the key; OSError, EOFError: it went away, or said nothing.
    """
    before = sock.gettimeout()
    sock.settimeout(timeout)
    mine = secrets.token_bytes(_NONCE)
    sock.sendall(mine)
    theirs = _exactly(sock, _NONCE)
    ours, other = (b"server", b"client") if server else (b"client", b"server")
    sock.sendall(hmac.digest(key, ours + theirs + mine, hashlib.sha256))
    answer = _exactly(sock, hashlib.sha256().digest_size)
    if not hmac.compare_digest(answer, hmac.digest(key, other + mine + theirs, hashlib.sha256)):
        raise PermissionError("the other end of the connection does not know the key")
    sock.settimeout(before)


def connect(addresses: Sequence[str], port: int, key: bytes) -> Channel:
    """A channel to the first of `addresses` that knows `key` and is told that we know it; the other end need not read
    all the time. Raises OSError when none can be reached; says why for each.
    """
    problems: dict[str, str] = {}
    for address in list(dict.fromkeys(addresses)) * 3:
        try:
            sock = socket.create_connection((address, port), timeout=5.0)
            authenticate(sock, key, server=False)
        except (OSError, EOFError) as error:
            problems[address] = str(error)
            continue
        sock.settimeout(None)
        system.keep_alive(sock, reads_always=False)
        return Channel(sock)
    raise OSError("\n".join(f"{address}: {why}" for address, why in problems.items()))


def write_key(key: bytes, port: int, **more: Any) -> Path:
    """A new file, which only the user can read, that tells others where to connect and with which key.

    It lies in the home directory, which the nodes of a cluster share. Raises OSError when that cannot be written to.
    """
    folder = Path.home() / ".rankcell"
    folder.mkdir(mode=0o700, exist_ok=True)
    for left in folder.glob("*.json"):  # by processes of this machine that were killed before they could remove it
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            said = json.loads(left.read_text("utf-8"))
            if said["addresses"][0] == socket.gethostname() and not psutil.pid_exists(said["pid"]):
                left.unlink()
    addresses = [socket.gethostname(), *system.addresses()]
    told = {"addresses": addresses, "port": port, "key": key.hex(), "pid": os.getpid(), **more}
    path = folder / f"{secrets.token_hex(8)}.json"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(told, file)
    return path


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := sock.recv(size - len(data))):
            raise EOFError("the other end of the connection is gone")
        data += part
    return data


def odd_part(name: str, value: Any, dumps: Callable[[Any], Any], seen: tuple[Any, ...] = ()) -> str:
    """What in a value, and in what is in there, `dumps` cannot pickle: "trainer.loader.files[2]"."""
    for part, inner in _made_of(value) if len(seen) < MAX_PARTS else ():
        try:
            dumps(inner)
        except Exception:  # noqa: BLE001 - a __reduce__ may raise anything
            if not any(inner is one for one in (value, *seen)):
                return odd_part(name + part, inner, dumps, (*seen, value))
    return name


def _made_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of: items, attributes, the arguments of a partial, the names that a function uses."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{n}]", inner) for n, inner in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f".{part}", getattr(value, part)) for part in ("func", "args", "keywords"))
    elif isinstance(value, types.FunctionType) and value.__module__ == "__main__":
        used = inspect.getclosurevars(value)
        yield from ((f", which uses {part}", inner) for part, inner in {**used.globals, **used.nonlocals}.items())
    elif not isinstance(value, type):
        yield from ((f".{part}", inner) for part, inner in getattr(value, "__dict__", {}).items())
