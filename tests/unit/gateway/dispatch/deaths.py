"""Nodes that die under requests, for the tests of suspects."""

from services.gateway.core.commands import AskWhetherAlive, Command, End, Send
from shared.errors import RequestKillsNodes
from tests.unit.gateway.dispatch.builders import Driver
from tests.unit.gateway.support import replica


def dies(driver: Driver, number: int) -> list[Command]:
    return driver.dispatch.on_node_gone(replica(number).leader, driver.now)


def asked(commands: list[Command]) -> list[AskWhetherAlive]:
    return [command for command in commands if isinstance(command, AskWhetherAlive)]


def refused(commands: list[Command]) -> list[str]:
    return [
        command.request
        for command in commands
        if isinstance(command, End) and isinstance(command.error, RequestKillsNodes)
    ]


def judge(driver: Driver, ask: AskWhetherAlive, *, dead: bool) -> list[Command]:
    nodes = ask.nodes[:1] if dead else ()
    return driver.dispatch.on_judged(ask.request, ask.attempt, nodes, driver.now)


def suspects(driver: Driver, *names: str) -> list[Command]:
    """They run on replica 1, which dies while it is the only one."""
    driver.publish(replica(1))
    driver.admit(*names)
    commands = dies(driver, 1)
    driver.dispatch.validate()
    return commands


def alone(commands: list[Command]) -> dict[str, bool]:
    """Who is sent, and whether alone."""
    sends = [each.submit for each in commands if isinstance(each, Send)]
    return {submit.request: submit.alone_until > 0 for submit in sends}
