"""The process that checks grammars for a gateway (`services.gateway.grammars`), because a grammar
may kill it.

It reads JSON strings from its standard input, one grammar on each line, and answers each with a
line: null, or a string that says what is wrong. A grammar that needs more than its share of
processor time, memory or stack ends the process; so does the end of its input.
"""

import resource
import signal
import sys
import threading

import msgspec

from shared import grammar
from shared.errors import BadInput

CHECK_S = 0.5
"""Seconds of processor time for one grammar. A node takes about as long to make it, while others
wait."""
MAX_MEMORY = 2 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(grammar.CHECK_STACK)
    checking = threading.Thread(target=_serve)
    checking.start()
    checking.join()


def _serve() -> None:
    for line in sys.stdin.buffer:
        text = msgspec.json.decode(line, type=str)
        signal.setitimer(signal.ITIMER_PROF, CHECK_S)  # SIGPROF then ends the process
        problem = _problem(text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(problem) + b"\n")
        sys.stdout.buffer.flush()


def _problem(text: str) -> str | None:
    try:
        grammar.check(text)
    except BadInput as error:
        return str(error)
    except MemoryError:
        return "takes too much memory"
    return None


if __name__ == "__main__":
    main()
