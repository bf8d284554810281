"""The channel between two machines: who does not know the key is refused before a byte is believed."""

import hashlib
import hmac
import pickle
import socket
import threading

import pytest

from rankcell.engine import channel

KEY, OTHER = b"k" * 32, b"o" * 32


def meet(server_key, client):
    """What `authenticate` did at the server, while `client(socket)` acted at the other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=client, args=(theirs,))
        thread.start()
        try:
            channel.authenticate(ours, server_key, server=True, timeout=1.0)
            return None
        except (OSError, EOFError) as error:
            return error
        finally:
            ours.close()
            thread.join(5)


def quietly(key):
    def act(sock):
        with pytest.raises((PermissionError, EOFError, ConnectionError)):
            channel.authenticate(sock, key, server=False, timeout=1.0)

    return act


def test_two_ends_with_the_same_key_talk():
    heard = []

    def client(sock):
        channel.authenticate(sock, KEY, server=False)
        heard.append(channel.Channel(sock).receive())

    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=client, args=(theirs,))
        thread.start()
        channel.authenticate(ours, KEY, server=True)
        channel.Channel(ours).send({"x": 1})
        thread.join(5)
    assert heard == [{"x": 1}]


def test_another_key_is_refused_at_both_ends():
    assert isinstance(meet(KEY, quietly(OTHER)), PermissionError)


def test_nothing_is_unpickled_before_the_check(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    payload = pickle.dumps(Trap())
    trap = len(payload).to_bytes(8, "big") + payload

    def client(sock):
        sock.sendall(trap * 50)

    assert isinstance(meet(KEY, client), PermissionError)
    assert not (tmp_path / "sprung").exists()


def test_an_answer_played_back_is_refused():
    def client(sock):  # sends back the server's own challenge and its own proof
        challenge = sock.recv(32)
        sock.sendall(challenge)
        sock.sendall(sock.recv(32))

    assert isinstance(meet(KEY, client), PermissionError)


def test_a_proof_for_the_other_role_is_refused():
    def client(sock):
        theirs, mine = sock.recv(32), b"n" * 32
        sock.sendall(mine)
        sock.recv(32)
        sock.sendall(hmac.digest(KEY, b"server" + theirs + mine, hashlib.sha256))

    assert isinstance(meet(KEY, client), PermissionError)


def test_who_says_nothing_does_not_hold_the_server():
    done = threading.Event()
    error = meet(KEY, lambda sock: done.wait(1.5))
    assert isinstance(error, TimeoutError)
