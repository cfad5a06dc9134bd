"""A node whose engine's thread does not return from the first step after a file is there.

    HANG_FILE=PATH python -m tests.integration.hanging python -m services.cli node [--config FILE]

runs the node of these words. One process hangs for each file: it takes the file away.
"""

import os
import sys
import threading
from pathlib import Path

from services.cli.main import main
from services.node.engine.engine import TorchEngine
from services.node.engine.sweep import TorchSweep
from shared.ids import ModelId

FILE = "HANG_FILE"


def hang_once(file: Path) -> None:
    begin = TorchEngine.begin

    def begin_or_hang(self: TorchEngine, model_id: ModelId) -> TorchSweep:
        if file.exists():
            file.unlink()
            threading.Event().wait()
        return begin(self, model_id)

    TorchEngine.begin = begin_or_hang  # type: ignore[method-assign]


if __name__ == "__main__":
    hang_once(Path(os.environ[FILE]))
    words = sys.argv[sys.argv.index("services.cli") + 1 :]
    raise SystemExit(main(words))
