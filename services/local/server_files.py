"""What the machine of a nats-server gets from `lambdascale init`.

nats/HOST/nats.conf      for its operator to edit: it is written once
nats/HOST/cluster.conf   who may connect, and the other servers: written anew each time
"""

import json
from collections.abc import Sequence
from pathlib import Path

from services.local.certificates import CERTIFICATE, KEY, Authority
from services.local.credentials import Keys, authorization, shared_secret
from services.local.nats_server import ROUTES
from services.local.private import private_directory, write_private
from shared.bus.delivery import MAX_PAYLOAD

NATS = "nats"
PORT, ROUTE_PORT = 4222, 6222
_CONF = """\
# Made by `lambdascale init`, which does not change it again. Paths are from the directory in which
# nats-server is started, which is this one.

server_name: "{host}"
listen: "{host}:{port}"

# Monitoring (/healthz, /jsz): this machine only.
http: "127.0.0.1:8222"

# What the services send at most; they refuse a server that takes less.
max_payload: {max_payload}

jetstream {{
  store_dir: "/var/lib/lambdascale/nats"
  max_file_store: 10GB
}}

# TLS from the first byte, so that nobody can talk a client out of it.
tls {{
  cert_file: "{certificate}"
  key_file: "{key}"
  min_version: "1.3"
  handshake_first: true
}}

# Who may connect, and the other servers.
include "cluster.conf"
"""


def servers(directory: Path) -> list[str]:
    """The hosts whose files are there."""
    return sorted(path.parent.name for path in (directory / NATS).glob("*/nats.conf"))


def make_server(directory: Path, host: str, authority: Authority) -> None:
    """The files of one server, as far as they are missing."""
    own = directory / NATS / host
    private_directory(directory / NATS)
    private_directory(own)
    if not (own / CERTIFICATE).exists():
        authority.issue(own, f"nats {host}", [host])
    authority.trust(own)
    if not (own / "nats.conf").exists():
        text = _CONF.format(
            host=host, port=PORT, max_payload=MAX_PAYLOAD, certificate=CERTIFICATE, key=KEY
        )
        write_private(own / "nats.conf", text)


def write_cluster(directory: Path, keys: Keys, authority: Authority) -> None:
    """Writes for every server what it has to know of users and of the other servers."""
    hosts = servers(directory)
    for host in hosts:
        settings: dict[str, object] = {"authorization": authorization(keys)}
        if len(hosts) > 1:
            secret = shared_secret(directory, "routes.secret").strip()
            settings["cluster"] = _cluster(host, hosts, secret, authority)
        # Keys and values without the outer braces, as an included file has them.
        text = "\n".join(f"{key}: {json.dumps(value, indent=2)}" for key, value in settings.items())
        write_private(directory / NATS / host / "cluster.conf", text + "\n")


def _cluster(
    host: str, hosts: Sequence[str], secret: str, authority: Authority
) -> dict[str, object]:
    return {
        "name": "lambdascale",
        "listen": f"{host}:{ROUTE_PORT}",
        "ping_interval": "1s",  # a server that is cut off or hangs is noticed within seconds
        "ping_max": 2,
        "authorization": {"user": ROUTES, "password": secret},
        "tls": {
            "cert_file": CERTIFICATE,
            "key_file": KEY,
            "ca_file": f"{authority.name}.pem",
            "verify": True,
        },
        "routes": [f"nats://{ROUTES}:{secret}@{other}:{ROUTE_PORT}" for other in hosts],
    }
