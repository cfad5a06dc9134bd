"""What `lambdascale init` makes: a real nats-server runs with it, and lets in who belongs."""

import asyncio
import re
import signal
import socket
import stat
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.cli.main import main
from services.local.nats_server import find_server
from services.local.nats_servers import free_ports
from shared import subjects
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from shared.errors import BusError, ConfigError
from shared.messages import Ok

WAIT_S = 60.0


def init(directory: Path, *words: str) -> None:
    assert main(["init", str(directory), *words]) == 0


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    directory = tmp_path / "credentials"
    init(directory, "--nats", "127.0.0.1", "--node", "n1", "--node", "n2")
    return directory


class Server:
    """nats-server with what `init` has made for it, but for its ports and its store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "nats" / "127.0.0.1"
        port, monitor = free_ports(2)
        path = self.directory / "nats.conf"
        text = path.read_text().replace("/var/lib/lambdascale/nats", str(directory / "store"))
        path.write_text(text.replace(":4222", f":{port}").replace(":8222", f":{monitor}"))
        self.port = port
        self.process = subprocess.Popen([find_server(), "-c", "nats.conf"], cwd=self.directory)

    async def ready(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self._answers():  # noqa: ASYNC110 - another process tells us nothing
                await asyncio.sleep(0.02)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Server]:
    server = Server(directory)
    try:
        await server.ready()
        yield server
    finally:
        server.process.terminate()
        await asyncio.to_thread(server.process.wait)


def bus(server: Server, own: Path, authority: Path | None = None) -> NatsBus:
    config = BusConfig(
        url=f"nats://127.0.0.1:{server.port}",
        credentials=str(own),
        tls_authority=str(authority or own / "servers.pem"),
        connect_timeout_s=5.0,
    )
    return NatsBus(config, "test")


async def test_nats_speaks_tls_to_who_has_credentials(made: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    init(others)
    async with served(made) as server:
        async with bus(server, made / "registry") as registry:
            await (await registry.kv(subjects.KV_MODELS)).put("key", b"value")
        with pytest.raises(BusError, match="certificate verify failed"):
            async with bus(server, made / "registry", others / "registry" / "servers.pem"):
                pass
        with pytest.raises(BusError, match="refuses"):
            async with bus(server, others / "registry", made / "registry" / "servers.pem"):
                pass
        plain = BusConfig(url=f"nats://127.0.0.1:{server.port}", connect_timeout_s=1.0)
        with pytest.raises(BusError, match="no NATS server"):
            async with NatsBus(plain, "plain"):
                pass


async def test_who_is_removed_is_shut_out_when_nats_reads_its_configuration(made: Path) -> None:
    kept = made.parent / "n1"
    (made / "nodes" / "n1").rename(kept)  # on its machine; init must not need it
    async with served(made) as server:
        async with bus(server, kept) as node:
            await node.publish(subjects.POOL_STATUS, Ok())
        init(made, "--remove", "nodes/n1", "--rotate", "nodes/n2")
        server.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(WAIT_S):
            while await gets_in(server, kept):  # noqa: ASYNC110 - another process tells us nothing
                await asyncio.sleep(0.05)
        assert await gets_in(server, made / "nodes" / "n2")


async def gets_in(server: Server, own: Path) -> bool:
    try:
        async with bus(server, own):
            return True
    except BusError as error:
        if "refuses" not in str(error):
            raise
        return False


def test_nothing_is_readable_by_others_and_nothing_is_made_twice(made: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made.rglob("*") if path.is_file()}
    assert modes == {0o600}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in made.rglob("*") if path.is_dir()}
    assert folders == {0o700}
    before = files(made)
    init(made)
    assert files(made) == before
    init(made, "--node", "n3")
    after = files(made)
    changed = {path.relative_to(made) for path in before if before[path] != after[path]}
    assert changed == {Path("authority/users.json"), Path("nats/127.0.0.1/cluster.conf")}
    assert (made / "nodes" / "n3" / "nats.seed").exists()


def test_each_of_three_servers_knows_the_others(tmp_path: Path) -> None:
    hosts = ("10.0.0.1", "10.0.0.2", "nats-3")
    init(tmp_path, *(word for host in hosts for word in ("--nats", host)))
    for host in hosts:
        text = (tmp_path / "nats" / host / "cluster.conf").read_text()
        assert set(re.findall(r"@([^:]+):6222", text)) == set(hosts)
        checked = subprocess.run(
            [find_server(), "-t", "-c", "nats.conf"],
            cwd=tmp_path / "nats" / host, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert checked.returncode == 0, checked.stderr


async def test_credentials_that_others_may_read_or_that_are_missing_are_refused(made: Path) -> None:
    own = made / "registry"
    (own / "nats.seed").chmod(0o644)
    with pytest.raises(ConfigError, match=r"bus\.credentials: .*chmod 600"):
        await NatsBus(BusConfig(credentials=str(own)), "one").__aenter__()
    (own / "nats.seed").unlink()
    with pytest.raises(ConfigError, match=r"bus\.credentials: .*nats\.seed cannot be read"):
        await NatsBus(BusConfig(credentials=str(own)), "one").__aenter__()
    (own / "nats.seed").write_text("no key")
    (own / "nats.seed").chmod(0o600)
    with pytest.raises(ConfigError, match="holds no nkey"):
        await NatsBus(BusConfig(credentials=str(own)), "one").__aenter__()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--node", "a.b"], "node 'a.b' is not valid"),
        (["--nats", "a:b"], "no host name"),
        (["--remove", "nodes/n9"], "there is no user 'nodes/n9'; there are gateway"),
        (["--rotate", "nobody"], "there is no user 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_changes(
    made: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(made)
    assert main(["init", str(made), *words]) != 0
    assert said in capsys.readouterr().err
    assert files(made) == before
