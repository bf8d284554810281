"""The channel between two machines: who does not know the key is refused before a byte is believed."""

import hashlib
import hmac
import pickle
import socket
import threading
from functools import partial

from rankcell.engine import channel

KEY = b"k" * 32


def meet(client, timeout=30.0):
    """What `authenticate` did at the server, while `client(socket)` acted at the other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=client, args=(theirs,))
        thread.start()
        try:
            channel.authenticate(ours, KEY, server=True, timeout=timeout)
            channel.Channel(ours).send({"x": 1})
        except (OSError, EOFError) as error:
            return error
        finally:
            ours.close()
            thread.join()


def test_two_ends_talk_if_they_have_the_same_key():
    heard = []

    def client(sock, key=KEY):
        try:
            channel.authenticate(sock, key, server=False, timeout=30.0)
            heard.append(channel.Channel(sock).receive())
        except (OSError, EOFError):
            heard.append("refused")

    assert meet(client) is None and isinstance(meet(partial(client, key=b"o" * 32)), PermissionError)
    assert heard == [{"x": 1}, "refused"]


def test_nothing_is_unpickled_before_the_check(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    payload = pickle.dumps(Trap())
    trap = len(payload).to_bytes(8, "big") + payload
    assert isinstance(meet(lambda sock: sock.sendall(trap * 50)), PermissionError)
    assert not (tmp_path / "sprung").exists()


def test_an_answer_played_back_is_refused():
    def back(sock):  # the server's own challenge and its own proof
        sock.sendall(sock.recv(32))
        sock.sendall(sock.recv(32))

    def other_role(sock):  # a proof that is the server's
        theirs, mine = sock.recv(32), b"n" * 32
        sock.sendall(mine)
        sock.recv(32)
        sock.sendall(hmac.digest(KEY, b"server" + theirs + mine, hashlib.sha256))

    assert isinstance(meet(back), PermissionError) and isinstance(meet(other_role), PermissionError)


def test_who_says_nothing_does_not_hold_the_server():
    assert isinstance(meet(lambda sock: sock.recv(64) and sock.recv(64), 0.5), TimeoutError)
