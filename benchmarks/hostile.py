"""How long hostile requests hold up the streams of others at a gateway.

Run: .venv/bin/python -m benchmarks.hostile, where nothing else runs. It starts a real cluster of
one node with a tiny model of a long context on this machine. While each attack is under way,
another process asks the gateway for /health every 5 ms. Its longest wait is the longest stall of
every stream, because streams and /health wait for the same loop. The limit is 20 ms more than the
longest wait without an attack.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.no_options import describe
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.publishing import import_model
from services.local.watch import Watch
from shared.bus.nats import NatsBus
from shared.ids import ModelName
from shared.messages.scaling import ImportModel

MODEL, LOOPS = ModelName("bench"), ModelName("loops")
CONTEXT = 1 << 17
SPEC = CheckpointSpec(
    layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=320,
    context_length=CONTEXT,
)  # fmt: skip
LIMIT_MS = 20.0
BEAT = "beat"
"""The argument of the process that asks for /health."""
QUIET_S = 3.0
ASK_S = 0.005
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    path: str
    body: bytes
    at_once: int = 1


def attacks() -> Sequence[Attack]:
    def one(name: str, path: str, at_once: int = 1, **body: object) -> Attack:
        data = msgspec.json.encode({"model": MODEL, "max_tokens": 1, **body})
        return Attack(f"{name} ({len(data):,} bytes)", path, data, at_once)

    said = [{"role": "user", "content": "a"}]
    return (
        one("a long prompt", COMPLETIONS, prompt="hello world " * 86_000),
        one("eight long prompts at once", COMPLETIONS, 8, prompt="hello world " * 86_000),
        one("260,000 prompts", COMPLETIONS, prompt=["a"] * 260_000),
        one("260,000 empty lists", COMPLETIONS, prompt="a", guided_json={"a": [[]] * 260_000}),
        one("500,000 token ids", COMPLETIONS, prompt=[1] * 500_000),
        one("30,000 messages", CHATS, messages=said * 30_000),
        one("4,096 messages", CHATS, messages=said * 4096),
        one("a template that loops, 4 at once", CHATS, 4, model=LOOPS, messages=said),
        one(
            "a grammar that takes minutes, 4 at once",
            COMPLETIONS,
            4,
            prompt="a",
            structured_outputs={
                "grammar": "start: X\nX: "
                + " & ".join(f"/(.*{c}.{{{20 + i}}}{c}.*)/" for i, c in enumerate("abcdefghijk"))
            },
        ),
        one(
            "16 answers of 256 tokens with 20 log probabilities each",
            CHATS,
            messages=said,
            n=16,
            max_tokens=256,
            logprobs=True,
            top_logprobs=20,
            ignore_eos=True,
        ),
        one(
            "an echoed prompt of 20,000 tokens with 20 log probabilities each",
            COMPLETIONS,
            prompt=[1] * 20_000,
            echo=True,
            logprobs=20,
        ),
        one(
            "8 stop strings of 1,000 characters, 32 answers of 128 tokens",
            COMPLETIONS,
            prompt="a",
            n=32,
            max_tokens=128,
            ignore_eos=True,
            logit_bias={"5": 100},
            stop=["!" * 999 + end for end in "abcdefgh"],
        ),
        Attack("deep nesting", COMPLETIONS, b"[" * 500_000),
    )


async def beat(url: str) -> None:
    """Asks for /health until the input ends; a line of input begins a new measurement, and has the
    last one printed: the longest wait in milliseconds."""
    worst = 0.0
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: lines.put_nowait(sys.stdin.readline()))
    async with aiohttp.ClientSession() as session:
        while True:
            if not lines.empty():
                if not lines.get_nowait():
                    return
                print(f"{1000 * worst:.1f}", flush=True)
                worst = 0.0
            started = time.perf_counter()
            async with session.get(f"{url}/health") as response:
                await response.read()
            worst = max(worst, time.perf_counter() - started)
            await asyncio.sleep(ASK_S)


class Beat:
    """The process that asks."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, url: str) -> "Beat":
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "benchmarks.hostile", BEAT, url)
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))

    async def worst_ms(self) -> float:
        """Since the last call."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(b"\n")
        return float(await self._process.stdout.readline())

    async def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        await self._process.wait()


async def attacked(session: aiohttp.ClientSession, url: str, attack: Attack) -> str:
    """The statuses of the answers."""

    async def ask() -> int:
        headers = {"Content-Type": "application/json"}
        path = f"{url}{attack.path}"
        async with session.post(path, data=attack.body, headers=headers) as response:
            await response.read()
            return response.status

    found = await asyncio.gather(*(ask() for _ in range(attack.at_once)))
    return " ".join(map(str, sorted(set(found))))


async def measure(cluster: Cluster, checkpoints: Mapping[ModelName, Path]) -> bool:
    async with NatsBus(bus_config(cluster.state), "bench") as bus, aiohttp.ClientSession() as http:
        watch = Watch()
        await watch.follow(bus)
        for name, path in checkpoints.items():
            model = ImportModel(path=str(path), name=name, min_instances=int(name == MODEL))
            await import_model(bus, model, say=lambda _: None)
        while not watch.replicas:
            await watch.change()
        url = cluster.state.gateway_url
        await attacked(http, url, attacks()[5])  # the process for templates is there
        beats = await Beat.start(url)
        await asyncio.sleep(QUIET_S)
        await beats.worst_ms()
        await asyncio.sleep(QUIET_S)
        quiet = await beats.worst_ms()
        print(f"{'the longest wait of others, ms':<74}{'status':>8}{'took, s':>9}")
        print(f"{'nothing':<66}{quiet:8.1f}")
        met = True
        for attack in attacks():
            started = time.perf_counter()
            status = await attacked(http, url, attack)
            took = time.perf_counter() - started
            await asyncio.sleep(0.2)
            worst = await beats.worst_ms()
            verdict = "" if worst - quiet <= LIMIT_MS else "  over the limit"
            met &= not verdict
            print(f"{attack.name:<66}{worst:8.1f}{status:>8}{took:9.2f}{verdict}")
        await beats.end()
        print(f"bar: at most {LIMIT_MS:g} ms more than without: {'met' if met else 'NOT met'}")
        return met


async def run() -> bool:
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = {name: Path(directory) / name for name in (MODEL, LOOPS)}
        for name, path in checkpoints.items():
            layers = SPEC.layers if name == MODEL else 1  # the same weights are the same model
            make_checkpoint(path, replace(SPEC, layers=layers))
        (checkpoints[LOOPS] / "chat_template.jinja").write_text(ENDLESS)
        settings = {"LAMBDASCALE_NODE_THREADS": "1"}
        spec = ClusterSpec(
            directory=Path(directory) / "cluster", nodes=1, gateway_port=0, settings=settings
        )
        cluster = Cluster(spec)
        await cluster.start()
        try:
            return await measure(cluster, checkpoints)
        finally:
            await cluster.stop()


def main() -> int:
    if sys.argv[1:2] == [BEAT]:
        asyncio.run(beat(sys.argv[2]))
        return 0
    describe("hostile", __doc__)
    return 0 if asyncio.run(run()) else 1


if __name__ == "__main__":
    sys.exit(main())
