"""What the processes of all ranks have in common: they do what their node says."""

import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from services.node.checkpoints.architecture import read_config
from services.node.checkpoints.config import ModelConfig
from services.node.engine.orders import Channel, Done, Order


def begin(connection: str) -> Channel:
    """`connection`: the descriptor of the socket to rank 0."""
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


def decoder_config(raw: dict[str, Any]) -> ModelConfig:
    config = read_config(raw)
    assert isinstance(config, ModelConfig)
    return config
