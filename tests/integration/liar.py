"""A node that lies: what it shows to peers has the right form, and the wrong bytes.

    python -m tests.integration.liar python -m services.cli node [--config FILE]

runs the node of these words. It pulls, keeps and runs right bytes itself.
"""

import sys

from services.cli.main import main
from services.node.transport.regions import Regions


class LyingRegions(Regions):
    def register(self, name: str, buffer: memoryview, ready: int, flow: str) -> None:
        super().register(name, memoryview(bytearray(len(buffer))), ready, flow)


if __name__ == "__main__":
    from services.node.transport import tcp

    vars(tcp)["Regions"] = LyingRegions
    words = sys.argv[sys.argv.index("services.cli") + 1 :]
    raise SystemExit(main(words))
