"""What a node shows at `/metrics`, all of it read when somebody asks."""

from collections import Counter
from collections.abc import Callable, Mapping

from services.node.core.view import NodeView
from shared.metrics import Kind, Metrics, Series

_P = "lambdascale_node"


class NodeMetrics:
    def __init__(self, metrics: Metrics, look: Callable[[], NodeView | None]) -> None:
        """`look`: the node as it is; None while it is not open."""
        self._metrics = metrics
        self._look = look
        self._view: NodeView | None = None
        self._page = 0
        """The page that it was looked at for."""
        self._engine()
        self._memory()
        self._links()

    def _engine(self) -> None:
        gauge, counter = self._gauge, self._counter
        gauge(
            "running_sequences",
            "Sequences that the node leads or is a stage of",
            lambda view: view.load.running,
        )
        gauge(
            "waiting_sequences",
            "Sequences that the node leads and has no room for yet",
            lambda view: view.load.waiting,
        )
        gauge(
            "kv_used_positions", "Positions of the KV cache in use", lambda view: view.load.kv_used
        )
        gauge(
            "kv_capacity_positions",
            "Positions of the KV cache; 0 while no model is open",
            lambda view: view.load.kv_capacity,
        )
        gauge(
            "kv_usage_ratio",
            "Share of the KV cache that is in use",
            lambda view: view.load.kv_used / max(1, view.load.kv_capacity),
        )
        counter("generated_tokens", "Tokens drawn here", lambda view: view.load.tokens_out)
        counter(
            "prompt_tokens",
            "Prompt tokens of sequences that the node leads",
            lambda view: view.load.prompt_tokens,
        )
        counter(
            "cached_prompt_tokens",
            "Of these, found in the prefix cache",
            lambda view: view.load.cached_tokens,
        )
        counter(
            "received_kv_tokens",
            "Tokens whose KV came from another node",
            lambda view: view.load.received_tokens,
        )
        counter(
            "restored_kv_tokens",
            "Tokens whose KV came back from host memory, so that they were not computed again",
            lambda view: view.load.host_tier.tokens,
        )
        gauge(
            "kv_host_bytes",
            "Bytes of KV in host memory (`node.kv_host_bytes`)",
            lambda view: view.load.host_tier.used,
        )
        counter(
            "kv_host_saved_pages",
            "Pages of KV copied to host memory",
            lambda view: view.load.host_tier.saved,
        )
        counter(
            "kv_host_restored_pages",
            "Pages of KV copied back from host memory",
            lambda view: view.load.host_tier.restored,
        )
        counter(
            "preemptions",
            "Times that a sequence gave its KV back to make room for others",
            lambda view: view.load.preemptions,
        )
        counter(
            "proposed_tokens",
            "Tokens proposed by speculation",
            lambda view: view.load.tokens_proposed,
        )
        counter("accepted_tokens", "Of these, drawn", lambda view: view.load.tokens_accepted)
        counter(
            "violations",
            "Malformed stage messages of peers that were refused",
            lambda view: view.load.violations,
        )
        counter(
            "engine_faults", "Bugs that ended requests: see the log", lambda view: view.load.faults
        )
        self._watch(
            "counter", "engine_seconds_total", "Seconds that the engine spent in sweeps of a model",
            lambda view: [((view.name(model),), s) for model, s in view.engine_s.items()],
            "model",
        )  # fmt: skip
        gauge("unfit", "Whether nothing new may come to it", lambda view: bool(view.unfit))
        for name, of in (
            ("kv_cache_usage_perc", "kv_usage_ratio"),
            ("num_preemptions_total", "preemptions_total"),
        ):
            self._metrics.alias(f"vllm:{name}", f"{_P}_{of}", {})

    def _memory(self) -> None:
        self._watch(
            "gauge", "tier_bytes", "Size of what blocks lie in: arena, host cache, disk",
            lambda view: [
                (("arena",), view.info.arena_bytes),
                (("cache",), view.info.host_bytes),
                (("disk",), view.disk_bytes),
            ],
            "tier",
        )  # fmt: skip
        self._watch(
            "gauge", "tier_free_bytes", "Free bytes of it",
            lambda view: [
                (("arena",), view.arena_free),
                (("cache",), view.host_free),
                (("disk",), view.disk_free),
            ],
            "tier",
        )  # fmt: skip
        self._watch("gauge", "held_blocks", "Blocks of a model that lie in a tier",
            lambda view: [
                ((view.name(held.model_id), held.tier.value), len(held.blocks))
                for held in view.holdings
            ],
            "model", "tier",
        )  # fmt: skip
        self._watch(
            "gauge", "running_copies", "Copies that the registry ordered and that are being made",
            _copies, "tier",
        )  # fmt: skip

    def _links(self) -> None:
        self._watch(
            "gauge", "peers", "Nodes that it is connected to, by what carries the bytes",
            lambda view: [((way,), len(nodes)) for way, nodes in view.peers.items()],
            "way",
        )  # fmt: skip
        self._watch(
            "counter", "received_blocks_total",
            "Blocks of scaling events that came, by what carried them: tcp, shm, rdma, disk, "
            "host cache",
            lambda view: _by_key(view.blocks), "way",
        )  # fmt: skip
        self._watch(
            "counter", "received_bytes_total", "Their bytes",
            lambda view: _by_key(view.received_bytes), "way",
        )  # fmt: skip
        self._watch(
            "counter", "failed_blocks_total",
            "Blocks that could not be had, by the error: `digest` if what came was wrong",
            lambda view: _by_key(view.failures), "code",
        )  # fmt: skip
        self._counter(
            "sent_bytes", "Bytes of blocks sent to other nodes", lambda view: view.sent_bytes
        )

    def _gauge(self, name: str, text: str, value: Callable[[NodeView], float]) -> None:
        self._watch("gauge", name, text, lambda view: [((), value(view))])

    def _counter(self, name: str, text: str, value: Callable[[NodeView], float]) -> None:
        self._watch("counter", f"{name}_total", text, lambda view: [((), value(view))])

    def _watch(
        self, kind: Kind, name: str, text: str, read: Callable[[NodeView], Series], *labels: str
    ) -> None:
        def read_now() -> Series:
            if self._page != self._metrics.pages:
                self._page, self._view = self._metrics.pages, self._look()
            return [] if self._view is None else read(self._view)

        self._metrics.watch(kind, f"{_P}_{name}", text, *labels, read=read_now)


def _by_key(counts: Mapping[str, float]) -> Series:
    return [((key,), count) for key, count in counts.items()]


def _copies(view: NodeView) -> Series:
    running = Counter(copy.tier.value for copy in view.copying if copy.running)
    return [((tier,), running[tier]) for tier in ("disk", "cache")]
