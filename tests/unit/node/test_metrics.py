"""What a node shows at /metrics."""

from pathlib import Path

from tests.support.pages import page
from tests.unit.node.cluster import ALL, BLOCKS, NAME, nodes


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
