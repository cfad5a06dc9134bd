"""What a node shows at /metrics."""

from pathlib import Path

from services.node.core.kv import PAGE
from tests.support.pages import page
from tests.unit.node.cluster import ALL, BLOCKS, NAME, nodes

PAGE_BYTES = PAGE * 4 * 2 * 2 * 16 * 4
"""Of 4 layers, keys and values of 2 heads of 16 numbers of 4 bytes."""


async def test_blocks_tokens_and_links(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        shown = {name: up.services[name].metrics() for name in ("a", "b")}
        await up.promoted("a")
        await up.apply("b", dict.fromkeys(ALL, "a"))
        await up.until_arrived("b", ALL)
        tokens = await up.generate("b")
        a, b = (page(shown[name]) for name in ("a", "b"))
        p = "lambdascale_node_"
        held = f'{p}held_blocks{{model="{NAME}",tier="gpu"}}'
        assert (a[held], b[held]) == (BLOCKS, BLOCKS)
        assert a[f'{p}received_blocks_total{{way="disk"}}'] == BLOCKS
        by_way = {name: count for name, count in b.items() if "received_blocks" in name}
        assert sum(by_way.values()) == BLOCKS
        assert b[f"{p}generated_tokens_total"] == len(tokens)
        assert b[f"{p}prompt_tokens_total"] > 0
        assert b[f'{p}engine_seconds_total{{model="{NAME}"}}'] > 0
        assert b[f'{p}tier_free_bytes{{tier="arena"}}'] < b[f'{p}tier_bytes{{tier="arena"}}']
        assert b["vllm:kv_cache_usage_perc"] == b[f"{p}kv_usage_ratio"]
        (way,) = {name.split('"')[1] for name in by_way}
        assert b[f'{p}peers{{way="{way}"}}'] == 1
    assert page(shown["a"]) == {}


async def test_kv_in_host_memory(tmp_path: Path, checkpoint: Path) -> None:
    """`node.kv_bytes` holds one of two prompts, and the other one comes back."""
    prompts = [tuple(3 + (n + shift) % 50 for n in range(4 * PAGE + 1)) for shift in (0, 7)]
    settings = {"kv_bytes": 8 * PAGE_BYTES, "kv_host_bytes": 1 << 20}
    async with nodes(tmp_path, checkpoint, "a", settings=settings) as up:
        await up.promoted("a")
        shown = up.services["a"].metrics()

        async def run(request: str, prompt: tuple[int, ...]) -> None:
            await up.submit(
                "a", request=request, tokens=prompt, prompt_tokens=len(prompt), max_tokens=2
            )
            await up.tokens.until(lambda: up.over(request))

        for number, prompt in enumerate([*prompts, *prompts]):
            await run(f"r{number}", prompt)
        cached = [up.tokens_of(f"r{number}")[0].cached for number in range(4)]
        assert cached == [0, 0, 4 * PAGE, 4 * PAGE]
        a, p = page(shown), "lambdascale_node_"
        assert a[f"{p}kv_host_saved_pages_total"] >= 8
        assert a[f"{p}kv_host_bytes"] == a[f"{p}kv_host_saved_pages_total"] * PAGE_BYTES
        assert a[f"{p}kv_host_restored_pages_total"] == 8
        assert a[f"{p}restored_kv_tokens_total"] == 8 * PAGE
