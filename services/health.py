"""`python -m services.health URL`: asks a service of this container whether it is ready.

Prints the answer, and exits with 0 if that has status 200. A check runs every few seconds beside
the service, so this imports nothing but what it needs of the standard library.
"""

import socket
import sys

LIMIT_S = 5.0
LONGEST = 1 << 20
"""The most bytes of an answer that are read."""
USAGE = "usage: python -m services.health http://HOST:PORT/PATH"


def ask(url: str) -> tuple[bool, str]:
    """Whether the answer has status 200, and what it says. Only http, without a name to resolve in
    a proxy, a redirect or a password."""
    scheme, _, rest = url.partition("://")
    address, _, path = rest.partition("/")
    host, _, port = address.rpartition(":")
    if scheme != "http" or not host or not port.isdigit():
        return False, USAGE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), LIMIT_S) as connection:
            request = f"GET /{path} HTTP/1.0\r\nHost: {address}\r\n\r\n"
            connection.sendall(request.encode())
            head, _, body = _all(connection).partition("\r\n\r\n")
    except OSError as error:
        return False, f"no answer at {url}: {error}"
    return head.split()[1:2] == ["200"], body.strip() or f"no answer at {url}"


def _all(connection: socket.socket) -> str:
    answer = b""
    while len(answer) < LONGEST and (part := connection.recv(LONGEST)):
        answer += part
    return answer.decode(errors="replace")


def main() -> int:
    if len(sys.argv) != 2:
        print(USAGE)
        return 2
    well, answer = ask(sys.argv[1])
    print(answer)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
