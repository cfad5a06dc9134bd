"""What the ranks of a team on several devices do together in a step: sum, gather, and hand on
(torch.distributed).

By NCCL, where each rank has a GPU of its own. By gloo on CPUs, and where ranks share a GPU, which
NCCL refuses.
"""

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from services.node.engine.share import Share

dist: Any = torch.distributed  # whose types leave out what is used here
PATIENCE = timedelta(minutes=10)
"""A rank that waits for the others longer than this fails. The node gives up before
(`node.engine_timeout_s`)."""
MEETING = timedelta(seconds=30)
"""So long a rank waits until all have found each other by gloo. Nothing else notices a rank that
ends meanwhile."""


class Group:
    """A rank's view. All ranks call the same in the same order. RuntimeError: another rank is
    gone. (NCCL may wait for it instead, until `abort`.)"""

    def __init__(self, share: Share, devices: Sequence[torch.device], meeting: int) -> None:
        """`devices`: of all ranks. `meeting`: the descriptor of a memfd that all ranks inherit,
        empty at first, in which they find each other."""
        self.share = share
        self.device = devices[share.rank]
        descriptor = os.dup(meeting)
        self._kept = weakref.finalize(self, os.close, descriptor)
        store = dist.FileStore(f"/proc/self/fd/{descriptor}", share.of)
        self._all = _backend(devices, store, share)

    def meet(self) -> None:
        """Returns once all ranks are here. To be called first: NCCL connects at its first call."""
        self.sum(torch.zeros(1, device=self.device))

    def sum(self, x: torch.Tensor) -> None:
        """Replaces x by the sum of all ranks', which has the same bits at all of them."""
        self._all.allreduce([x]).wait()

    def hand_on(self, x: torch.Tensor) -> None:
        """Replaces x by that of rank 0."""
        self._all.broadcast(x, 0).wait()

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns all ranks' x, which have the same shape."""
        gathered = [torch.empty_like(x) for _ in range(self.share.of)]
        self._all.allgather([gathered], [x]).wait()
        return gathered

    def abort(self) -> None:
        """Ends what waits for another rank, here. Nothing can be done together afterwards. Any
        thread may call it."""
        self._all.abort()


def _backend(devices: Sequence[torch.device], store: Any, share: Share) -> Any:
    if devices[0].type == "cuda" and len(set(devices)) == len(devices):
        # Else torch ends the process when a rank is lost, and a node could not hand its requests
        # over. 2: it only ends what waits for that rank.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        # The ranks find each other over TCP. All are on this machine.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        return dist.ProcessGroupNCCL(store, share.rank, share.of, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = MEETING
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(store, share.rank, share.of, options)
    group._set_default_timeout(PATIENCE)
    return group
