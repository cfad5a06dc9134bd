"""A process that others read from: `python -m tests.rdma.guest.peer`.

It first prints where its bytes lie (key, address). Then for each line of its input it prints one:
for an offer in hexadecimal its answer, or `none`; for `close` that it closed what it had accepted.
"""

import asyncio
import os
import random
import sys

from services.node.memory.arena import Arena
from services.node.transport.direct import DirectSource
from services.node.transport.rdma import RdmaDirect

DEVICE = os.environ.get("LS_RDMA_DEVICE", "")
GID_INDEX = int(os.environ.get("LS_RDMA_GID_INDEX", "0"))
NBYTES = 16 << 20


def pattern(nbytes: int = NBYTES) -> bytes:
    """No whole number of MiB is a period of it."""
    period = random.Random(7).randbytes((1 << 20) + 13)
    return (period * (nbytes // len(period) + 1))[:nbytes]


async def main() -> None:
    arena = Arena(NBYTES)
    bytes_ = arena.allocate(NBYTES).memory
    bytes_[:] = pattern()
    accepted: list[DirectSource] = []
    async with RdmaDirect([arena.memory], DEVICE, GID_INDEX) as rdma:
        source = rdma.accept(rdma.offer().data)
        assert source is not None
        place = source[1].place(bytes_)
        assert place is not None
        print(place.key, place.address, flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if line == "close":
                for end in accepted:
                    end.close()
                print("closed", flush=True)
            elif answer := rdma.accept(bytes.fromhex(line)):
                accepted.append(answer[1])
                print(answer[0].hex(), flush=True)
            else:
                print("none", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
