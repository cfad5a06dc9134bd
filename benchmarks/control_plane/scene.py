"""The cluster that is simulated: its nodes, its models, what lies where, and its load."""

import msgspec

from shared.ids import GatewayId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages.pool import Holding, ModelRecord, NodeInfo, Tier

BLOCKS = 16
BLOCK_BYTES = 160_000_000
CHUNK_BYTES = 4 << 20
LINK_BYTES_PER_S = 1_250_000_000
ARENA_BYTES = 4 * BLOCKS * BLOCK_BYTES
SLOTS = 16
SPREADS = "spreads"
"""The model that goes from one node to all of them. It is on no other node's disk."""


class Scene(msgspec.Struct, frozen=True):
    """Every disk has every model but one. Each node serves one model, and each model is served by
    as many nodes as any other, as far as they go."""

    nodes: int
    models: int
    gateways: int
    fill: float = 0.4
    """The share of all slots that requests take at any time."""
    stay_s: float = 10.0
    """How long a request runs, in the mean."""

    def node(self, index: int) -> NodeInfo:
        return NodeInfo(
            node=NodeId(f"node-{index:04}"),
            generation=Generation(1),
            address=f"tcp://10.{index >> 8}.{index & 255}.1:7001",
            host=f"host-{index:04}",
            device="cuda:0",
            arena_bytes=ARENA_BYTES,
            link_bytes_per_s=LINK_BYTES_PER_S,
            slots=SLOTS,
        )

    def holdings(self, index: int) -> tuple[Holding, ...]:
        """What the node holds at the beginning."""
        every = tuple(range(BLOCKS))
        running = [self.served_by(index), *([SPREADS] if index == 0 else [])]
        in_memory = [Holding(model_id(name), Tier.GPU, every) for name in running]
        on_disk = [f"model-{number:03}" for number in range(self.models)]
        on_disk += [SPREADS] if index == 0 else []
        return (*in_memory, *(Holding(model_id(name), Tier.DISK, every) for name in on_disk))

    def served_by(self, index: int) -> str:
        return f"model-{index % self.models:03}"

    def instances(self) -> list[tuple[ModelName, InstanceId]]:
        """Those that serve before anything spreads."""
        return [
            (ModelName(self.served_by(i)), InstanceId(f"replica-{self.node(i).node}"))
            for i in range(self.nodes)
        ]

    def record(self, name: str) -> ModelRecord:
        replicas = 1
        if name != SPREADS:
            first = int(name.removeprefix("model-"))
            replicas = len(range(first, self.nodes, self.models))
        return ModelRecord(
            name=ModelName(name),
            model_id=model_id(name),
            manifest="0" * 64,
            files={},
            nbytes=BLOCKS * BLOCK_BYTES,
            n_blocks=BLOCKS,
            block_bytes=(BLOCK_BYTES,) * BLOCKS,
            context_length=8192,
            created_ns=1,
            min_instances=replicas,
            chunk_bytes=CHUNK_BYTES,
        )

    @property
    def names(self) -> list[str]:
        return [*(f"model-{number:03}" for number in range(self.models)), SPREADS]

    def requests(self, gateway: int) -> int:
        """How many requests of a gateway run at any time."""
        total = round(self.fill * self.nodes * SLOTS)
        return len(range(gateway, total, self.gateways))

    def gateway(self, index: int) -> GatewayId:
        return GatewayId(f"gateway-{index:03}-0123456789")


def model_id(name: str) -> ModelId:
    return ModelId(f"{name:x<32}")
