"""What the processes of all ranks have in common: they end with their node, and do what it says."""

import ctypes
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from services.node.checkpoints.architecture import read_config
from services.node.checkpoints.config import ModelConfig
from services.node.engine.orders import Channel, Done, Order

_PR_SET_PDEATHSIG = 1


def begin(parent: str, connection: str) -> Channel:
    """`parent`: the id of the process that started this one. `connection`: the descriptor of the
    socket to it."""
    die_with(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):  # the node's to obey: it ends its ranks
        signal.signal(number, signal.SIG_IGN)
    return Channel(socket.socket(fileno=int(connection)), answers=False)


def obey(channel: Channel, act: Callable[[Order, int | None], Done | None]) -> None:
    """`act`: obeys an order, with the descriptor that came with it. Returns the answer, if the
    order is answered."""
    with suppress(EOFError, ConnectionError):  # rank 0 is gone
        while True:
            order, descriptor = channel.receive()
            answer = act(cast(Order, order), descriptor)
            if answer is not None:
                channel.send(answer)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request took effect
        os._exit(1)


def decoder_config(raw: dict[str, Any]) -> ModelConfig:
    config = read_config(raw)
    assert isinstance(config, ModelConfig)
    return config
