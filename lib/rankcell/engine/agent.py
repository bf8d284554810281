"""On a node: holds the node's ranks, does what the notebook says, and passes on what comes from them.

Started by `srun`, one per node (`nodes.py`); it ends with the notebook, and its ranks with it.
"""

import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .. import errors
from . import channel, launch, system
from .local import Local, room
from .messages import Clock, Ended, Hello, Order, Started

MAX_WAITING = 8 << 20  # bytes that an agent holds for a notebook that does not read: then its ranks wait


class Agent:
    """The ranks of one node, and the notebook at the other end of `talk`."""

    def __init__(self, talk: channel.Channel, interface: str) -> None:
        self._talk, self._interface = talk, interface
        self.ranks: Local | None = None

    def serve(self) -> None:
        """Until the notebook is gone."""
        talk = self._talk
        with selectors.DefaultSelector() as selector:
            selector.register(talk, selectors.EVENT_READ)
            listening = False
            while True:
                if self.ranks is not None:
                    wanted = talk.unsent < MAX_WAITING
                    if wanted and not listening:
                        selector.register(self.ranks, selectors.EVENT_READ)
                    elif listening and not wanted:
                        selector.unregister(self.ranks)
                    listening = wanted
                write = selectors.EVENT_WRITE if talk.unsent else 0
                selector.modify(talk, selectors.EVENT_READ | write)
                for key, ready in selector.select():
                    if key.fileobj is self.ranks:
                        self._pass_on()
                    elif ready & selectors.EVENT_READ:
                        for order in talk.poll():
                            self._do(order)
                    else:
                        talk.push()

    def _pass_on(self) -> None:
        assert self.ranks is not None
        for event in self.ranks.pump(0.0):
            self._talk.post(event)

    def _do(self, order: Order) -> None:
        if order.what == "world":
            self.ranks = Local(*order.arguments, interface=self._interface)
        elif order.what == "clock":
            self._talk.post(Clock(order.arguments[0], time.monotonic()))
        elif order.what == "start":
            assert self.ranks is not None
            try:
                self.ranks.start(*order.arguments)
            except errors.StartError as error:
                self._talk.post(Started({}, str(error)))
            else:
                self._talk.post(Started(self.ranks.pids))
        else:
            assert self.ranks is not None
            getattr(self.ranks, order.what)(*order.arguments, **order.options)
            if order.what == "end":
                self._talk.post(Ended(tuple(order.arguments[0])))


def main(arguments: Sequence[str]) -> NoReturn:
    """The life of an agent: connect, serve, end all ranks."""
    told = json.loads(Path(arguments[0]).read_text())
    launch.warm_up()  # imports torch in the background, while we connect
    sock = _connect(told["addresses"], told["port"], bytes.fromhex(told["key"]))
    system.keep_alive(sock, reads_always=False)
    talk = channel.Channel(sock)
    import torch

    mine = sock.getsockname()[0]
    talk.send(
        Hello(
            index=int(os.environ.get("SLURM_NODEID", "0")),
            name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            gpus=torch.cuda.device_count(),
            room=room(),
        )
    )
    agent = Agent(talk, system.interface_of(mine) or system.LOOPBACK)
    try:
        agent.serve()
    except (EOFError, OSError):  # the notebook has ended, or has no more use for us
        pass
    finally:
        if agent.ranks is not None:
            agent.ranks.stop()
        os._exit(0)


def _connect(addresses: Sequence[str], port: int, key: bytes) -> socket.socket:
    """A connection to the notebook, which proved that it knows the key."""
    try:
        return channel.connect(addresses, port, key)
    except OSError as error:
        sys.exit(
            f"{socket.gethostname()} cannot reach the notebook. Its machine must accept connections from the "
            f"nodes. Tried:\n{error}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
