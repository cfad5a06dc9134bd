"""A cluster on this machine that serves a small model with a chat template."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.clients.teaching import teach
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.demo_tokenizer import EOS
from services.local.publishing import import_model
from services.local.watch import Watch
from services.node.checkpoints.config import HEAD
from shared.bus.nats import NatsBus
from shared.ids import ModelName
from shared.messages.scaling import ImportModel

MODEL = ModelName("small")
SPEC = CheckpointSpec(
    layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=2048, context_length=2048
)
"""Its weights are random, so what it says means nothing but what it was taught; otherwise only its
form can be judged."""


LOUDER_END, LOUDER_QUOTE = 60.0, 4.0
"""How much longer the head's rows are made for the end of a text, and for tokens that end a string
of JSON. Then both come soon; without that, random weights hardly ever end one."""


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    checkpoint: Path


@asynccontextmanager
async def served(nodes: int, lessons: Path | None = None) -> AsyncIterator[Served]:
    """`lessons`: what the model is taught. None: nothing, but its texts end."""
    with tempfile.TemporaryDirectory(prefix="clients-") as directory:
        checkpoint = Path(directory) / "model"
        make_checkpoint(checkpoint, SPEC)
        if lessons is None:
            _let_texts_end(checkpoint)
        else:
            teach(checkpoint, lessons)
        spec = ClusterSpec(directory=Path(directory) / "cluster", nodes=nodes, gateway_port=0)
        cluster = Cluster(spec)
        await cluster.start()
        try:
            async with NatsBus(bus_config(cluster.state), "clients") as bus:
                watch = Watch()
                await watch.follow(bus)
                model = ImportModel(path=str(checkpoint), name=MODEL, min_instances=nodes)
                await import_model(bus, model, say=lambda _: None)
                while len(watch.replicas) < nodes:
                    await watch.change()
            yield Served(cluster.state.gateway_url, checkpoint)
        finally:
            await cluster.stop()


def _let_texts_end(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    weights = load_file(file)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for token, index in tokenizer.get_vocab().items():
        if token == EOS:
            weights[HEAD][index] *= LOUDER_END
        elif token.startswith('"'):
            weights[HEAD][index] *= LOUDER_QUOTE
    save_file(weights, file)
