"""The processes that run models together with the node's own, which is rank 0: how they are
started, watched and spoken to. They are forked from a process that has imported what they need, and
end with it, as it does with the node's.
"""

import os
import socket
import threading
from collections.abc import Callable, Sequence

from services.node.engine.orders import Channel, Done, Order
from services.node.engine.rank_server import SERVER
from services.node.memory.views import Memory, find
from shared import forking
from shared.errors import BadInput, EngineFailed, LambdaScaleError, StartFailed, from_code


class RankProcesses:
    def __init__(self, most: int, arena: Memory) -> None:
        """`most`: how many ranks there are, with this process. `arena`: what blocks lie in."""
        self.spare = False
        """Whether the node can do without them."""
        self.on_loss: Callable[[], None] = lambda: None
        """Is called after some were lost that are spare, on any thread."""
        self.loss = ""
        """How the rank ended that ended first; empty: none did. Any thread may read it."""
        self._arena = arena
        self._processes: list[forking.Forked] = []
        self._channels: list[Channel] = []
        self._left = most
        """From this rank on they are lost, since one of them has ended."""
        self._ending = threading.Lock()
        """Guards `_left` and `loss`."""

    def _start(self, module: str, arguments: Sequence[object], descriptors: Sequence[int]) -> None:
        """Starts the next rank: `main` of the module, with its number, `arguments`, and the
        descriptors that it inherits: of its connection, `descriptors`, and of the arena.
        EngineFailed: it cannot be started."""
        rank = len(self._processes) + 1
        given = tuple(map(str, (rank, *arguments)))
        order = forking.Order(f"rank-{rank}", module, given, dict(os.environ))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                inherited = theirs.fileno(), *descriptors, self._arena.descriptor
                process = SERVER.fork(order, inherited)
        except StartFailed as error:
            ours.close()
            raise EngineFailed(f"rank {rank} cannot be started: {error}") from error
        self._processes.append(process)
        self._channels.append(Channel(ours, answers=True))
        name = f"rank-{rank}"
        threading.Thread(target=self._watch, args=(rank, process), name=name, daemon=True).start()

    def _watch(self, rank: int, process: forking.Forked) -> None:
        code = process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._lose(rank, f"its rank {rank} (process {process.pid}) ended with {how}")

    def _gone(self, rank: int) -> None:
        """Nobody listens at the other end: the rank ends, if it has not ended yet."""
        process = self._processes[rank - 1]
        process.kill()
        self._watch(rank, process)

    def _lose(self, rank: int, why: str) -> None:
        """The rank has ended, or will. Any thread may call it, also again."""
        with self._ending:
            if rank >= self._left:
                return  # it is lost already
            self._left, self.loss = rank, self.loss or why
        self._release(rank)

    def _release(self, rank: int) -> None:
        """Has nobody wait for a rank that was lost, as far as that has to be seen to."""

    @property
    def broken(self) -> str:
        """Why nothing can be run any more; empty: it can. Any thread may read it."""
        return "" if self.spare else self.loss

    def give_up(self, why: str) -> None:
        """Loses all ranks. Any thread may call it."""
        self._lose(1, why)
        for process in tuple(self._processes):
            process.kill()

    @property
    def staging(self) -> str:
        """How blocks get from the arena to the ranks' devices, in words. Empty: they stay there."""
        return ""

    @property
    def processes(self) -> tuple[int, ...]:
        """Their ids, without this one's."""
        return tuple(process.pid for process in self._processes)

    def close(self) -> None:
        with self._ending:
            self._left = 1
        self._end(1)

    def _end(self, first: int) -> None:
        """Ends the ranks from this one on."""
        for process in self._processes[first - 1 :]:
            process.kill()
        for process in self._processes[first - 1 :]:
            process.wait()
        for channel in self._channels[first - 1 :]:
            channel.close()
        del self._processes[first - 1 :], self._channels[first - 1 :]

    def tell(self, order: Order, descriptor: int | None = None, *, degree: int = 0) -> None:
        """`degree`: how many ranks are told, with this one, which is not; 0: all are. EngineFailed:
        one has ended, where they are not spare. If they are, whoever waits for it will know."""
        for rank, channel in enumerate(self._of(degree), start=1):
            try:
                channel.send(order, descriptor)
            except OSError as error:
                self._gone(rank)
                if not self.spare:
                    raise self.failed() from error

    def hear(self, degree: int = 0) -> list[LambdaScaleError]:
        """Waits for an answer from each of them. EngineFailed: one has ended."""
        errors: list[LambdaScaleError] = []
        lost = False
        for rank, channel in enumerate(self._of(degree), start=1):
            try:
                done, _ = channel.receive()
            except (OSError, EOFError):
                self._gone(rank)
                lost = True
                continue
            assert isinstance(done, Done)
            if done.code:
                errors.append(from_code(done.code, done.text))
        if lost:
            raise self.failed()
        return errors

    def offset(self, weights: object) -> int:
        """Where in the arena a block lies. BadInput: it does not."""
        found = find([self._arena], weights) if isinstance(weights, memoryview) else None
        if found is None:
            raise BadInput("ranks take only blocks that lie in the arena")
        return found[1]

    def failed(self) -> EngineFailed:
        return EngineFailed(f"a team of ranks is lost: {self.loss}")

    def _of(self, degree: int) -> list[Channel]:
        return self._channels[: degree - 1] if degree else self._channels
