"""`python -m services.health`: asks the service of this container whether it is well.

Prints the answer of the Unix socket that telemetry.health_socket names; exits with 0 if the service
is well. A check runs every few seconds beside the service, so this imports nothing but what it
needs of the standard library.
"""

import os
import socket
import sys

VARIABLE = "LAMBDASCALE_TELEMETRY_HEALTH_SOCKET"
WELL = "well"
LIMIT_S = 5.0
LONGEST = 1000


def ask(path: str) -> str:
    """What the service says; a service that says nothing is not well."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LIMIT_S)
        try:
            connection.connect(path)
            return connection.recv(LONGEST).decode().strip() or "the service ended"
        except OSError as error:
            return f"no answer at {path}: {error}"


def main() -> int:
    path = os.environ.get(VARIABLE, "")
    answer = ask(path) if path else f"{VARIABLE} is not set: the service has no health socket"
    print(answer)
    return 0 if answer == WELL else 1


if __name__ == "__main__":
    sys.exit(main())
