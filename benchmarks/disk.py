"""How fast a packed model comes from the disk into host memory, with its digests checked.

It is measured beside a plain direct reader of the same files in the same run (as fio's psync engine
does it: as many threads, requests of the same size, O_DIRECT, into the same memory, and nothing
else), and beside a buffered sequential read.

    python -m benchmarks.disk [--mib 1024] [--runs 7] [--dir DIR] [--json]

Bar: at least 0.9 of the plain reader. Before each run the files are taken out of the page cache.
"""

import argparse
import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from unittest import mock

from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.node.checkpoints import reading
from services.node.checkpoints.packer import block_file
from services.node.checkpoints.reading import DEPTH, REQUEST, Verified, Wanted
from services.node.checkpoints.store import Imported, Store
from services.node.memory.arena import PAGE, Arena, ModelSpace

MIB = 1 << 20
BAR = 0.9
HIDDEN = 1024
LAYER_BYTES = 4 * HIDDEN * HIDDEN * 23 // 2
"""Bytes of a layer of the checkpoint that is made, in fp32. Its embedding and its head are about as
large."""


@dataclass
class Way:
    name: str
    read: Callable[[], None]
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self) -> None:
        cpu, began = time.process_time(), time.perf_counter()
        self.read()
        self.seconds.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - cpu)


class Bench:
    def __init__(self, root: Path, mib: int) -> None:
        layers = max(1, round(mib * MIB / LAYER_BYTES) - 2)
        checkpoint = root / "checkpoint"
        make_checkpoint(
            checkpoint,
            CheckpointSpec(
                layers=layers,
                hidden=HIDDEN,
                intermediate=3 * HIDDEN,
                heads=HIDDEN // 32,
                kv_heads=HIDDEN // 128,
                vocab_size=LAYER_BYTES // 4 // HIDDEN,
            ),
        )
        self.store = Store(root / "store")
        began = time.perf_counter()
        self.imported: Imported = self.store.import_checkpoint(checkpoint)
        self.import_s = time.perf_counter() - began
        manifest = self.imported.manifest
        self.nbytes = manifest.nbytes
        folder = root / "store" / self.imported.model_id
        self.files = [folder / block_file(spec.index) for spec in manifest.blocks]
        self.arena = Arena(ModelSpace.size(manifest))
        self.space = ModelSpace(manifest, self.arena.allocate(self.arena.nbytes))
        self.blocks = [self.space.block(spec.index) for spec in manifest.blocks]

    def forget(self) -> None:
        """Takes the files out of the page cache."""
        for path in self.files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def ours(self) -> None:
        async def load() -> int:
            wanted = [Wanted(index, into) for index, into in enumerate(self.blocks)]
            chunks = 0
            async with aclosing(self.store.read(self.imported.model_id, wanted)) as outcomes:
                async for outcome in outcomes:
                    if not isinstance(outcome, Verified):
                        raise outcome.error
                    chunks += len(outcome.chunks)
            return chunks

        manifest = self.imported.manifest
        if asyncio.run(load()) != sum(map(manifest.n_chunks, range(manifest.n_blocks))):
            raise SystemExit("not every chunk was read")

    def unchecked(self) -> None:
        def any_digest(_: memoryview) -> object:
            return mock.ANY

        with mock.patch.object(reading, "digest", any_digest):
            self.ours()

    def plain(self) -> None:
        """Reads whole pages only, which is a few hundred bytes less for each block."""
        descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in self.files]
        requests = (
            (descriptor, offset, into[offset : min(offset + REQUEST, len(into) // PAGE * PAGE)])
            for descriptor, into in zip(descriptors, self.blocks, strict=True)
            for offset in range(0, len(into) // PAGE * PAGE, REQUEST)
        )
        taking = threading.Lock()

        def work() -> None:
            while True:
                with taking:
                    request = next(requests, None)
                if request is None:
                    return
                descriptor, offset, into = request
                if os.preadv(descriptor, [into], offset) != len(into):
                    raise SystemExit("a short read")

        threads = [threading.Thread(target=work) for _ in range(DEPTH)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for descriptor in descriptors:
            os.close(descriptor)

    def buffered(self) -> None:
        for path, into in zip(self.files, self.blocks, strict=True):
            with path.open("rb", buffering=0) as file:
                for offset in range(0, len(into), MIB):
                    file.readinto(into[offset : offset + MIB])


def measure(bench: Bench, runs: int) -> list[Way]:
    ways = [
        Way("store", bench.ours),
        Way("plain direct reader", bench.plain),
        Way("store, unchecked", bench.unchecked),
        Way("buffered, in sequence", bench.buffered),
    ]
    for run in range(runs):
        for way in (*ways[run % 4 :], *ways[: run % 4]):
            bench.forget()
            way.run()
    return ways


def report(bench: Bench, ways: Sequence[Way], as_json: bool) -> None:
    rows = [
        {
            "way": way.name,
            "mb_per_s": round(bench.nbytes / median(way.seconds) / 1e6),
            "runs": [round(bench.nbytes / seconds / 1e6) for seconds in way.seconds],
            "cpu_s_per_gb": round(median(way.cpu) / bench.nbytes * 1e9, 3),
        }
        for way in ways
    ]
    store, plain, unchecked, buffered = (median(way.seconds) for way in ways)
    ratio = plain / store
    if as_json:
        said = {
            "rows": rows,
            "ratio": round(ratio, 3),
            "bar": BAR,
            "digests": round(store / unchecked, 3),
            "bytes": bench.nbytes,
            "request": REQUEST,
            "depth": DEPTH,
            "import_s": round(bench.import_s, 2),
        }
        print(json.dumps(said))
        return
    print(
        f"{bench.nbytes / MIB:.0f} MiB in {len(bench.files)} files, {DEPTH} requests of "
        f"{REQUEST // MIB} MiB under way; medians of {len(ways[0].seconds)} (least, most)"
    )
    for row, way in zip(rows, ways, strict=True):
        rates = sorted(bench.nbytes / seconds / 1e6 for seconds in way.seconds)
        print(
            f"  {way.name:22} {row['mb_per_s']:6} MB/s ({rates[0]:.0f}, {rates[-1]:.0f}), "
            f"{row['cpu_s_per_gb']} s of CPU a GB"
        )
    verdict = "met" if ratio >= BAR else "MISSED"
    print(f"store / plain reader: {ratio:.3f} (bar {BAR}: {verdict})")
    print(f"digests cost {store / unchecked - 1:+.1%}; {buffered / store:.2f} x buffered")
    print(f"import: {bench.import_s:.1f} s, {bench.nbytes / bench.import_s / 1e6:.0f} MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="on the disk to be measured")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        bench = Bench(Path(directory), arguments.mib)
        report(bench, measure(bench, arguments.runs), arguments.json)


if __name__ == "__main__":
    main()
