"""Keys of tenants over HTTP."""

import asyncio
import hashlib
from collections.abc import Callable

import aiohttp
import msgspec

from shared.ids import KeyId, ModelName, TenantId
from shared.messages.access import KeyRecord, TenantRecord
from tests.unit.gateway.http.builders import ASK, post
from tests.unit.gateway.support import NAME, Cluster, replica, running

ACME = TenantRecord(id=TenantId("acme"))
KEY = KeyRecord(id=KeyId("k1"), tenant=ACME.id, digest=hashlib.sha256(b"s").digest())
MINE = {"Authorization": "Bearer ls-k1-s"}


async def until(http: aiohttp.ClientSession, right: Callable[[int], bool], **headers: str) -> int:
    """Asks again until the status is right."""
    while True:
        async with http.get("/v1/models", headers=headers) as response:
            if right(response.status):
                return response.status
        await asyncio.sleep(0.01)


async def test_keys_count_as_they_come_and_go(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    status, _ = await post(http, ASK)
    assert status == 200
    cluster.access += [ACME, KEY]
    await until(http, lambda status: status == 401)
    status, _ = await post(http, ASK, **MINE)
    assert status == 200
    async with http.get("/health") as response:
        assert response.status == 200
    cluster.access.append(msgspec.structs.replace(KEY, revoked_ns=1))
    await until(http, lambda status: status == 401, **MINE)
    status, answer = await post(http, ASK, **MINE)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert "revoked" in answer["error"]["message"]


async def test_models_that_a_key_does_not_reach_seem_not_to_be_there() -> None:
    async with running(replica(1)) as cluster:
        await cluster.add(await cluster.store_model(name=ModelName("other")))
        cluster.access += [ACME, msgspec.structs.replace(KEY, models=(ModelName("other"),))]
        async with aiohttp.ClientSession(cluster.service.url) as http:
            await until(http, lambda status: status == 401)
            async with http.get("/v1/models", headers=MINE) as response:
                listed = [card["id"] for card in (await response.json())["data"]]
            assert listed == ["other"]
            hidden = await post(http, ASK, **MINE)
            missing = await post(http, {**ASK, "model": "none"}, **MINE)
            assert hidden[0] == missing[0] == 404
            assert hidden[1]["error"]["code"] == missing[1]["error"]["code"] == "model_not_found"
            async with http.get(f"/v1/models/{NAME}", headers=MINE) as response:
                assert response.status == 404
