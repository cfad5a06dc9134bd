"""`lambdascale key`: a fresh API key, and the digest of it that the gateway is configured with."""

import argparse
import hashlib
import secrets
import sys
from typing import Any

from services.cli.client import add_json_option, print_json


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "key",
        help="make an API key for the gateway",
        description="Prints a fresh API key and its SHA-256. Clients send the key "
        "(Authorization: Bearer KEY). The gateway gets only the digest, in gateway.api_keys.",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    key = f"sk-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    if args.json:
        print_json({"key": key, "sha256": digest})
        return 0
    sys.stdout.write(f"key:    {key}\nsha256: {digest}\n")
    return 0
