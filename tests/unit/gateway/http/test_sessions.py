"""Which conversation a request belongs to, as its client says."""

from typing import Any

import aiohttp
import pytest

from tests.unit.gateway.http.builders import ASK, CHAT, post
from tests.unit.gateway.support import Cluster, replica

COUNT = 8


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"X-Session-ID": "{}"}, {}),
        ({}, {"prompt_cache_key": "{}"}),
        ({}, {"user": "{}"}),
        ({"X-Session-ID": "{}"}, {"prompt_cache_key": "another"}),
        ({}, {"prompt_cache_key": "{}", "user": "another"}),
    ],
)
@pytest.mark.parametrize(("route", "body"), [("completions", ASK), ("chat/completions", CHAT)])
async def test_a_session_goes_to_one_instance(
    cluster: Cluster,
    http: aiohttp.ClientSession,
    route: str,
    body: dict[str, Any],
    headers: dict[str, str],
    fields: dict[str, str],
) -> None:
    instances = [replica(1), replica(2)]
    await cluster.publish(*instances)
    await cluster.until(lambda: cluster.knows(instances, models=1))
    homes = set()
    for session in range(COUNT):
        before = len(cluster.nodes[1].submits), len(cluster.nodes[2].submits)
        for _ in range(3):
            asked = {**body, **{name: value.format(session) for name, value in fields.items()}}
            sent = {name: value.format(session) for name, value in headers.items()}
            status, _ = await post(http, asked, route, **sent)
            assert status == 200
        after = len(cluster.nodes[1].submits), len(cluster.nodes[2].submits)
        there = after[0] - before[0], after[1] - before[1]
        assert there in ((3, 0), (0, 3))
        homes.add(there)
    assert len(homes) == 2, "sessions are spread"
