"""In place of a rank, where its end is what matters."""

import os
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    _, variable, *_ = argv
    return int(os.environ[variable])
