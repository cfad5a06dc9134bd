"""Nodes of a real cluster read of each other what planner and registry have ordered, and nothing
else."""

from functools import partial
from pathlib import Path

import pytest

from services.local.certificates import CERTIFICATE, KEY, Authority
from services.local.credentials import NODES, NODES_SECRET
from services.local.nats_servers import Place
from services.node.moving.mover import permit_for, region_of
from services.node.transport import secret
from services.node.transport.base import NoListener
from services.node.transport.tcp import TcpTransport
from services.node.transport.tls import OF_NODE
from shared.capabilities import Signer, new_seed
from shared.errors import ReadRefused
from shared.ids import NodeId
from shared.messages.pool import Tier
from shared.pool_pages import read_pool
from tests.support.cluster import running

NODE = NodeId("node-0")


async def test_the_registry_lets_a_node_make_a_copy(tmp_path: Path, checkpoint: Path) -> None:
    settings = {"LAMBDASCALE_REGISTRY_DURABLE_COPIES": "2"}
    async with running(tmp_path, checkpoint, nodes=2, settings=settings, min_instances=0) as up:
        await up.until(
            lambda: (
                sum(
                    holding.tier is Tier.DISK and len(holding.blocks) == up.record.n_blocks
                    for status in up.statuses.values()
                    for holding in status.holdings
                )
                == 2
            ),
            "a durable copy on both nodes",
        )


async def test_a_node_reads_what_the_planner_has_ordered_and_no_more(
    tmp_path: Path, checkpoint: Path
) -> None:
    settings = {"LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1"}
    async with running(tmp_path, checkpoint, nodes=2, settings=settings, min_instances=2) as up:
        await up.replicas(2)
        pool = await read_pool(partial(up.bus.request, timeout=5.0))
        address = next(view.info.address for view in pool.nodes if view.info.node == NODE)
        own = Path(up.cluster.state.credentials) / NODES / "node-1"
        thief = TcpTransport(
            "127.0.0.1",
            0,
            link_bytes_per_s=0,
            listener=NoListener(),
            secret=secret.load(str(own / NODES_SECRET)),
        )
        model = up.record.model_id
        forged = Signer("planner", new_seed()).sign(NodeId("node-1"), model, range(100), 2**62)
        into = memoryview(bytearray(64))
        async with thief:
            for capability in (b"", forged):
                permit = permit_for(model, capability)
                with pytest.raises(ReadRefused):
                    await thief.read(
                        address, region_of(model, 0), 0, into, priority=1, permit=permit
                    )


async def test_nodes_with_certificates_read_what_was_ordered_for_them(
    tmp_path: Path, checkpoint: Path
) -> None:
    """A capability is for the node that the reader's certificate says."""
    authority = Authority.of(tmp_path / "authority", "nodes")
    places: dict[str, Place] = {}
    for name in ("node-0", "node-1"):
        own = tmp_path / "certificates" / name
        authority.issue(own, f"{OF_NODE}{name}", [name])
        authority.trust(own)
        files = {"CERTIFICATE": CERTIFICATE, "KEY": KEY, "AUTHORITY": "nodes.pem"}
        settings = {f"LAMBDASCALE_NODE_TLS_{key}": str(own / file) for key, file in files.items()}
        places[name] = Place(settings=settings)
    async with running(
        tmp_path / "cluster", checkpoint, nodes=2, places=places, min_instances=2
    ) as up:
        await up.replicas(2)
