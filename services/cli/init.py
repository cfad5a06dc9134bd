"""`lambdascale init`: the credentials of a cluster on servers."""

import argparse
import re
from pathlib import Path
from typing import Any

from services.cli.client import add_json_option, print_json, say
from services.local.credentials import (
    AUTHORITY,
    NODES,
    Keys,
    User,
    all_users,
    forget,
    make_users,
    read_users,
)
from shared.errors import BadInput, NotFound
from shared.ids import NodeId, check_name
from shared.permissions import Role

DEFAULT_DIRECTORY = Path("lambdascale-credentials")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "init",
        help="make the credentials of a cluster on servers",
        description="Makes what each machine of a cluster has to have so that nobody else can take "
        "part: a directory for each role and each node, with its key for NATS and its "
        "certificates, and for each nats-server its configuration, in which each role has no more "
        "rights than it needs. What is there stays as it is: call it again to add nodes, or after "
        "an upgrade. (`up` makes its own.) docs/deploy.md says what goes where.",
    )
    parser.add_argument(
        "directory", type=Path, nargs="?", default=DEFAULT_DIRECTORY, metavar="DIR",
        help="where to make them (default: %(default)s). DIR/authority must stay secret and is "
        "needed on no machine of the cluster",
    )  # fmt: skip
    parser.add_argument(
        "--nats", action="append", default=[], metavar="HOST",
        help="the address or name of a nats-server (default, the first time: 127.0.0.1); give each "
        "of several",
    )  # fmt: skip
    parser.add_argument(
        "--node", action="append", default=[], metavar="ID", help="a node, by its id; give each"
    )
    parser.add_argument(
        "--gateway", action="append", default=[], metavar="HOST",
        help="a name or address by which clients reach the gateways: makes them a certificate for "
        "HTTPS",
    )  # fmt: skip
    parser.add_argument(
        "--rotate", action="append", default=[], metavar="USER",
        help="make a user's key and certificate anew, such as `gateway` or `nodes/gpu1-0`",
    )  # fmt: skip
    parser.add_argument(
        "--remove", action="append", default=[], metavar="USER",
        help="take a user's rights, such as those of a node that is gone for good",
    )  # fmt: skip
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from services.local import server_files  # imports cryptography
    from services.local.certificates import CERTIFICATE, Authority

    nodes = [NodeId(check_name("node", node)) for node in args.node]
    for host in (*args.nats, *args.gateway):
        if not _HOST.fullmatch(host):
            raise BadInput(f"{host!r} is no host name or IPv4 address")
    directory: Path = args.directory
    known = read_users(directory)
    changed = [_known(name, known) for name in (*args.rotate, *args.remove)]
    removed = changed[len(args.rotate) :]
    for user in changed:
        forget(directory, user)
    wanted = [user for user in (*all_users(nodes), *known) if user not in removed]
    keys = make_users(directory, wanted)
    of_servers = Authority.of(directory / AUTHORITY, "servers")
    of_nodes = Authority.of(directory / AUTHORITY, "nodes")
    for user in keys:
        own = directory / user.directory
        if not own.is_dir():
            continue  # it lies on its machine only
        of_servers.trust(own)
        if user.node:
            of_nodes.trust(own)
            if not (own / CERTIFICATE).exists():
                of_nodes.issue(own, f"node {user.node}", [user.node])
    own = directory / Role.GATEWAY
    if args.gateway:
        of_servers.issue(own, "gateway", args.gateway)
    for host in args.nats or server_files.servers(directory) or ["127.0.0.1"]:
        server_files.make_server(directory, host, of_servers)
    server_files.write_cluster(directory, keys, of_servers)
    _tell(args, keys, known, server_files.servers(directory))
    return 0


def _known(name: str, known: Keys) -> User:
    user = User.of_directory(name)
    if user not in known:
        there = ", ".join(sorted(each.directory for each in known)) or "none"
        raise NotFound(f"there is no user {name!r}; there are {there}")
    return user


def _tell(args: argparse.Namespace, keys: Keys, before: Keys, servers: list[str]) -> None:
    directory: Path = args.directory
    new = sorted(user.directory for user, key in keys.items() if before.get(user) != key)
    if args.json:
        users = sorted(user.directory for user in keys)
        print_json({"directory": str(directory.absolute()), "users": users, "new": new,
                    "nats": servers})  # fmt: skip
        return
    say(f"made {', '.join(new)}" if new else "every user has a key already; nothing was changed")
    where = {
        **{f"nats/{host}": f"the nats-server {host}, as /etc/lambdascale/nats" for host in servers},
        **{str(role): f"where a {role} runs" for role in Role if role is not Role.NODE},
        **{f"{NODES}/ID": "the machine of the node ID"},
    }
    where[Role.OPERATOR] = "wherever you run `lambdascale status` and other commands"
    say(f"copy from {directory}, each to its own machines and to no others:")
    for name, machine in where.items():
        say(f"  {name:<20} {machine}")
    say(f"  {AUTHORITY:<20} nowhere: it makes credentials. Keep it secret, and safe")
    say("then have each nats-server read its configuration: systemctl reload lambdascale-nats")
