import asyncio
from pathlib import Path

import pytest

from shared.errors import ConfigError
from simulation.hardware import DATA, Channel, Hardware, hardware, read_data
from simulation.loop import run


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.toml")))
def test_every_file_is_right(name: str) -> None:
    read = hardware(name)
    assert read.name == name
    assert read.ssd_bytes_per_s < read.pcie_bytes_per_s
    assert read.link_bytes_per_s <= read.nic_bytes_per_s


def test_every_number_says_where_it_is_from() -> None:
    for path in [*DATA.glob("*.toml"), *(DATA.parent / "models").glob("*.toml")]:
        lines = path.read_text().splitlines()
        assert lines[0].startswith("#"), path
        if path.parent == DATA:
            assert all("#" in line for line in lines if line), path


def test_what_is_wrong_in_a_file_is_named(tmp_path: Path) -> None:
    right = (DATA / "h800-400g.toml").read_text()
    for text, wrong in (
        (right + "speed = 1\n", "speed"),
        (right.replace("mfu = 0.5", "mfu = 5"), "mfu"),
        (right.replace("alpha_s", "#"), "alpha_s"),
        (right + "[", "at end of document"),
    ):
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(ConfigError, match=rf"mine\.toml.*{wrong}.*hbm_bytes_per_s"):
            read_data(tmp_path, "mine", Hardware)
    with pytest.raises(ConfigError, match="there are mine"):
        read_data(tmp_path, "yours", Hardware)


def test_a_channel_carries_one_thing_after_the_other() -> None:
    async def main() -> list[float]:
        loop, channel, ends = asyncio.get_running_loop(), Channel(10.0), list[float]()

        async def carry(nbytes: float) -> None:
            await channel.carry(nbytes)
            ends.append(loop.time())

        async with asyncio.TaskGroup() as group:
            for nbytes in (20, 10):
                group.create_task(carry(nbytes))
        await asyncio.sleep(7)
        await carry(5)
        return ends

    assert run(main()) == pytest.approx([2, 3, 10.5])
