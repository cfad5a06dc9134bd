"""The engine under its scheduler, driven as a node's engine thread drives it (worker.py)."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.node.checkpoints.store import Imported, Store
from services.node.core.profile import Profiler, token_s
from services.node.engine.engine import Measure, TorchEngine
from services.node.engine.linear import Form
from services.node.engine.ranks import Ranks
from services.node.execution.steps import Steps
from services.node.memory.arena import Arena
from shared.errors import EngineFailed
from shared.ids import GatewayId, InstanceId, ModelId, NodeId, RequestId
from shared.messages.instances import Stage
from shared.messages.serving import Cancel, LogitRules, Sampling, Submit, Tokens

Step = Callable[[], None]
NODE, ADDRESS = NodeId("bench"), "bench"
STEP_TOKENS = 512
"""The default of node.step_tokens."""


@dataclass(slots=True)
class Answer:
    """Times are from perf_counter."""

    began: float
    came: list[float] = field(default_factory=list)
    """When each token came."""


class Ours:
    """A node's engine with one model, from a store and in an arena, as in a node."""

    def __init__(
        self,
        store: Store,
        imported: Imported,
        *,
        slots: int,
        threads: int,
        form: Form = "packed",
        speculation: int = 0,
        tensor_parallel: int = 1,
        measure: Measure | None = None,
        positions: int = 0,
        kv_host_bytes: int = 0,
    ) -> None:
        """`measure`: see TorchEngine. `positions`: of KV; 0: as many as all slots can take."""
        manifest = imported.manifest
        self.model: ModelId = imported.model_id
        self.manifest = manifest
        self._form = form
        context = int(manifest.config["max_position_embeddings"])
        self._arena = Arena(sum(block.nbytes for block in manifest.blocks) + (1 << 20))
        ranks = Ranks((tensor_parallel,), self._arena.memory) if tensor_parallel > 1 else None
        self._profiler = Profiler()
        self.engine = TorchEngine(
            "cpu",
            positions or slots * context,
            threads,
            cpu_weights=form,
            kv_host_bytes=kv_host_bytes,
            token_s=lambda model: token_s(self._profiler.profile(), model),
            ranks=ranks,
            measure=measure,
        )
        self.steps = Steps(
            node=NODE,
            engine=self.engine,
            slots=slots,
            step_tokens=STEP_TOKENS,
            speculation=speculation,
            send=lambda *_: None,
            emit=self._hear,
            ran=self._swept,
        )
        self.steps.open_model(self.model, manifest)
        for index, block in enumerate(manifest.blocks):
            buffer = self._arena.allocate(block.nbytes).memory
            store.fill(self.model, index, buffer)
            self.steps.attach(self.model, index, buffer)
        self._answers: dict[RequestId, Answer] = {}
        self._made = 0
        self._sweeps = 0

    @property
    def step_bytes(self) -> int:
        """Bytes read in a decode step, without KV: all weights but the embedding, of which it reads
        a few rows."""
        blocks = self.manifest.blocks
        table = next(t for t in blocks[0].tensors if t.name == "model.embed_tokens.weight")
        rounded = 2 if self._form == "int8" else 1  # bfloat16 to 8 bits
        return (sum(t.nbytes for b in blocks for t in b.tensors) - table.nbytes) // rounded

    def submit(self, prompt: Sequence[int], tokens: int, rules: LogitRules | None = None) -> Answer:
        self._made += 1
        request = RequestId(f"r{self._made}")
        answer = self._answers[request] = Answer(time.perf_counter())
        stages = (Stage(NODE, ADDRESS, 0, self.manifest.n_blocks),)
        self.steps.submit(
            Submit(
                request=request,
                attempt=0,
                gateway=GatewayId("bench"),
                model_id=self.model,
                instance=InstanceId("bench"),
                stages=stages,
                tokens=tuple(prompt),
                prompt_tokens=len(prompt),
                max_tokens=tokens,
                stop_ids=(),
                sampling=Sampling(),
                rules=rules,
            )
        )
        return answer

    def sweep(self) -> None:
        """Sweeps once through the model with everything that can run."""
        swept = self._sweeps
        while self._sweeps == swept:
            if self.steps.begin(time.monotonic()) is None:
                raise EngineFailed("there is nothing to run")
            self.steps.finish(time.monotonic())
            self.steps.flush()

    def first(self, prompt: Sequence[int]) -> float:
        """Seconds until the only token of an answer."""
        answer = self.submit(prompt, 1)
        while not answer.came:
            self.sweep()
        return answer.came[0] - answer.began

    def rate(self, prompt: Sequence[int], tokens: int, rules: LogitRules) -> float:
        """Tokens/s of an answer after its first token."""
        answer = self.submit(prompt, 1 + tokens, rules)
        while len(answer.came) <= tokens:
            self.sweep()
        return tokens / (answer.came[-1] - answer.came[0])

    @contextmanager
    def decoding(self, prompts: Sequence[Sequence[int]], tokens: int) -> Iterator[Step]:
        """Gives a function that runs a decode step of all prompts; it may be called `tokens`
        times."""
        meanwhile = len(prompts) + sum(map(len, prompts)) // STEP_TOKENS
        answers = [self.submit(prompt, tokens + 1 + meanwhile) for prompt in prompts]
        while not all(answer.came for answer in answers):
            self.sweep()
        yield self.sweep
        for request in self._answers:
            self.steps.cancel(Cancel(request=request, attempt=0))
        self._answers.clear()

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> list[float]:
        """Seconds of each decode step of all prompts."""
        times = []
        with self.decoding(prompts, steps) as step:
            for _ in range(steps):
                began = time.perf_counter()
                step()
                times.append(time.perf_counter() - began)
        return times

    def _hear(self, _: GatewayId, message: Tokens) -> None:
        now = time.perf_counter()
        for failed in message.failed:
            raise EngineFailed(failed.message)
        for token in message.tokens:
            self._answers[token.request].came.append(now)

    def _swept(self, model: ModelId, share: float, tokens: float, seconds: float) -> None:
        self._sweeps += 1
        self._profiler.ran(model, share, tokens, seconds)
