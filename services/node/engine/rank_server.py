"""What the ranks of this process are forked from. It has imported torch, and opens no device."""

import os

from shared.forking import ForkServer

SERVER = ForkServer("ranks", ("services.node.engine.rank",), None, os.environ)
