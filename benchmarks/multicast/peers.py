"""The peers for the same task, in the same namespaces: torch.distributed over gloo; plain sockets.

    gloo-broadcast              `broadcast` of one block after the other, in a group that stands
    gloo-broadcast-with-group   the same, its group made first, as a cluster that scales has to
    gloo-chain                  built by hand from `isend` and `irecv`: each rank passes on what it
                                gets, piece by piece; all of its receives are posted beforehand
    plain-chain                 the same over bare sockets, `recv` into place and `sendall` of what
                                came: what moving bytes costs on this machine. Nothing is checked

Run by itself (`python -m benchmarks.multicast.peers`), this module is the processes of the ranks:
torch is imported once, and a process is forked into each namespace. They begin together, at an
agreed time, and every mode has a group of its own.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from benchmarks.testbed import Testbed, control_address, data_address, join
from shared.errors import LambdaScaleError
from shared.parents import die_with_parent

BROADCAST, WITH_GROUP, CHAIN = "gloo-broadcast", "gloo-broadcast-with-group", "gloo-chain"
PLAIN = "plain-chain"
MODES = (BROADCAST, WITH_GROUP, CHAIN, PLAIN)
PIECE = 512 << 10
STORE_PORT = 29400
TIMEOUT = timedelta(seconds=120)
LEAD_S = 0.1
"""Seconds from the agreement on a time to that time."""


Links = tuple[socket.socket | None, socket.socket | None]
"""Plain connections from the rank before and to the next one."""


class PeerFailed(LambdaScaleError):
    code = "peer_failed"


@dataclass(frozen=True, slots=True)
class PeerRun:
    mode: str
    makespan_s: float
    cpu_s: float
    """CPU seconds of all ranks."""


def run_peers(testbed: Testbed, ranks: int, nbytes: int, runs: int) -> list[PeerRun]:
    """Runs every mode `runs` times, between the first hosts. PeerFailed says what went wrong."""
    namespaces = [host.path for host in testbed.hosts[:ranks]]
    process = testbed.hub.start(
        [sys.executable, "-m", "benchmarks.multicast.peers", str(nbytes), str(runs), *namespaces],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = process.communicate()
    if process.returncode:
        raise PeerFailed(f"gloo between {ranks} ranks: {errors[-2000:]}")
    return [PeerRun(**run) for run in json.loads(output)]


# --- the processes of the ranks -------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bytes", type=int)
    parser.add_argument("runs", type=int)
    parser.add_argument("namespaces", nargs="+", help="a rank each")
    arguments = parser.parse_args()
    read_end, write_end = os.pipe()
    prepare = die_with_parent()
    children: list[int] = []
    for rank, namespace in enumerate(arguments.namespaces):
        child = os.fork()
        if not child:
            prepare()
            _live(partial(_rank, rank, namespace, arguments, write_end))
        children.append(child)
    os.close(write_end)
    with open(read_end) as lines:
        records = [json.loads(line) for line in lines]
    endings = [os.waitpid(child, 0)[1] for child in children]
    if any(endings):
        sys.exit("a rank failed")
    runs = [_together(records, run) for run in range(len(MODES) * arguments.runs)]
    print(json.dumps([asdict(run) for run in runs]))


def _live(life: Callable[[], None]) -> None:
    """The forked child's life, which ends here."""
    try:
        life()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _rank(rank: int, namespace: str, arguments: argparse.Namespace, results: int) -> None:
    join(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "data"
    torch.set_num_threads(1)
    ranks = len(arguments.namespaces)
    store = TCPStore(control_address(0), STORE_PORT, ranks, is_master=rank == 0, timeout=TIMEOUT)
    data = torch.full((arguments.bytes,), 7 if rank == 0 else 0, dtype=torch.uint8)
    pieces = list(torch.split(data, PIECE))
    for number, mode in enumerate(mode for mode in MODES for _ in range(arguments.runs)):
        if rank:
            data.zero_()
        make_group = partial(
            dist.init_process_group,
            "gloo",
            store=PrefixStore(f"group {number}", store),
            rank=rank,
            world_size=ranks,
            timeout=TIMEOUT,
        )
        links: Links = (None, None)
        if mode == PLAIN:
            links = _links(store, number, rank, ranks)
        elif mode != WITH_GROUP:
            make_group()
        began = _agree(store, number, rank, ranks)
        cpu_s = _cpu_s()
        if mode == WITH_GROUP:
            make_group()
        if mode == PLAIN:
            _plain_chain(data, links)
        else:
            (_chain if mode == CHAIN else _broadcast)(pieces, rank, ranks)
        record = {"run": number, "mode": mode, "took_s": time.monotonic() - began}
        os.write(results, json.dumps(record | {"cpu_s": _cpu_s() - cpu_s}).encode() + b"\n")
        if not bool((data == 7).all()):
            raise PeerFailed(f"{mode}: rank {rank} got other bytes than were sent")
        store.add(f"over {number}", 1)
        if rank == 0:
            _all(store, f"over {number}", ranks)
            store.set(f"all over {number}", "yes")
        else:
            with suppress(
                dist.DistNetworkError
            ):  # all is over, and rank 0 has ended with its store
                store.wait([f"all over {number}"])
        if mode == PLAIN:
            for link in filter(None, links):
                link.close()
        else:
            dist.destroy_process_group()


def _broadcast(pieces: list[torch.Tensor], rank: int, ranks: int) -> None:
    for piece in pieces:
        dist.broadcast(piece, 0)


def _chain(pieces: list[torch.Tensor], rank: int, ranks: int) -> None:
    coming = [dist.irecv(piece, rank - 1) for piece in pieces] if rank else []
    going = []
    for index, piece in enumerate(pieces):
        if coming:
            _wait(coming[index])
        if rank + 1 < ranks:
            going.append(dist.isend(piece, rank + 1))
    for sending in going:
        _wait(sending)


def _links(store: Store, run: int, rank: int, ranks: int) -> Links:
    """Connections from the rank before and to the next one."""
    coming = going = listener = None
    if rank:
        listener = socket.create_server((data_address(rank), 0))
        store.set(f"port {run} {rank}", str(listener.getsockname()[1]))
    if rank + 1 < ranks:
        port = int(store.get(f"port {run} {rank + 1}"))
        going = socket.create_connection((data_address(rank + 1), port))
    if listener is not None:
        with listener:
            coming, _ = listener.accept()
    return coming, going


def _plain_chain(data: torch.Tensor, links: Links) -> None:
    coming, going = links
    whole = memoryview(data.numpy()).cast("B")  # type: ignore[arg-type]
    for start in range(0, len(whole), PIECE):
        piece = left = whole[start : start + PIECE]
        while coming and left:
            received = coming.recv_into(left, len(left), socket.MSG_WAITALL)
            if not received:
                raise PeerFailed("the rank before closed the connection")
            left = left[received:]
        if going:
            going.sendall(piece)


def _wait(work: Any) -> None:
    work.wait()


def _agree(store: Store, run: int, rank: int, ranks: int) -> float:
    """Returns at the time, on the machine's monotonic clock, at which all ranks begin the run."""
    store.add(f"ready {run}", 1)
    if rank == 0:
        _all(store, f"ready {run}", ranks)
        store.set(f"begin {run}", str(time.monotonic() + LEAD_S))
    began = float(store.get(f"begin {run}"))
    time.sleep(max(0.0, began - time.monotonic()))
    return began


def _all(store: Store, key: str, ranks: int) -> None:
    while store.add(key, 0) < ranks:
        time.sleep(0.001)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _together(records: list[dict[str, Any]], run: int) -> PeerRun:
    of_run = [record for record in records if record["run"] == run]
    return PeerRun(
        of_run[0]["mode"],
        max(record["took_s"] for record in of_run),
        sum(record["cpu_s"] for record in of_run),
    )


if __name__ == "__main__":
    main()
