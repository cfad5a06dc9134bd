"""What tests have a fork server run."""

import os
import sys
import threading
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int | None:
    what, *more = arguments
    match what:
        case "end":
            return int(more[0]) if more else None
        case "fail":
            raise ValueError("as asked")
        case "say":
            print(*more, file=sys.stderr)
        case "tell":  # a variable, through a descriptor
            name, descriptor = more
            os.write(int(descriptor), os.environ.get(name, "unset").encode())
        case "threads":
            return threading.active_count()
        case "wait":
            threading.Event().wait()
    return None
