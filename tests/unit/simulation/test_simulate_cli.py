"""`lambdascale simulate`: arguments to a setting, processes of their own, and what is printed."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from services.cli.main import main
from shared.errors import BadInput
from simulation import launch
from simulation.launch import SimulationFailed, run_all
from simulation.results import SystemRun
from simulation.setting import Setting
from simulation.systems import COMPARED
from tests.unit.simulation.runs import made_up, setting

SPIKE = "spike:rate=5,seconds=4"
PLAIN = "arrival_s,prompt_tokens,output_tokens,model\n"
FAKE = """
import os, sys, time, msgspec
from pathlib import Path
from simulation.setting import Setting
from tests.unit.simulation.runs import made_up
system, setting, result = sys.argv[1:]
assert os.environ["PYTHONHASHSEED"] == "0"
assert msgspec.msgpack.decode(Path(setting).read_bytes(), type=Setting).nodes == 12
BODY
print(300.0, flush=True)
Path(result).write_bytes(msgspec.msgpack.encode(made_up(system)))
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    structlog.reset_defaults()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Setting]:
    """The settings of the comparisons that ran, which are made up."""
    found: list[Setting] = []

    async def run_all(
        setting: Setting, systems: Sequence[str], *, jobs: int, tell: Callable[[str], None]
    ) -> dict[str, SystemRun]:
        found.append(setting)
        name = setting.models[0][0]
        return {
            system: replace(run, requests=tuple(replace(r, model=name) for r in run.requests[:50]))
            for system, run in ((system, made_up(system)) for system in systems)
        }

    monkeypatch.setattr(launch, "run_all", run_all)
    return found


# --- the command ------------------------------------------------------------


def test_a_table(asked: list[Setting], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", SPIKE]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"synthetic workload {SPIKE}: ")
    for system in COMPARED:
        assert f"\n{system} " in out
    assert asked[0].synthetic
    assert asked[0].models == (("llama-2-13b", "llama-2-13b"),)
    assert "rate scaled" not in out


def test_json_and_nothing_else(asked: list[Setting], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", SPIKE, "--systems", "ideal,faasnet", "--json", "--slo-ttft-ms", "700"]
    assert main(["simulate", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["systems"]) == ["ideal", "faasnet"]
    assert document["setting"]["workload"] == SPIKE
    assert document["setting"]["slo"] == "TTFT 700 ms, TPOT 5 x that of an idle node"


def test_plots(asked: list[Setting], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", SPIKE, "--systems", "ideal", "--plots", "figures"]) == 0
    assert len(list((tmp_path / "figures").glob("*.png"))) == 5
    assert str(tmp_path / "figures" / "ttft.png") in capsys.readouterr().err


def test_a_sweep(asked: list[Setting], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", SPIKE, "--sweep", "0.5,8:0,1", "--target", "0.25"]
    assert main(["simulate", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(each.keep_alive_s, each.min_instances) for each in asked] == [
        (0.5, 0), (0.5, 1), (8.0, 0), (8.0, 1),
    ]  # fmt: skip
    assert {each["system"] for each in document["points"]} == {"lambdascale"}
    assert "keep_alive_s" not in document["setting"]
    assert main(["simulate", *words, "--systems", "ideal,nccl-own"]) == 0
    assert "nccl-own " in capsys.readouterr().out


def test_streams_and_seeds(asked: list[Setting], tmp_path: Path) -> None:
    trace = tmp_path / "plain.csv"
    trace.write_text(PLAIN + "".join(f"{at},10,5,m\n" for at in range(1, 20)))
    words = ["--trace", str(trace), "--rate-factor", "1", "--until", "20", "--streams", "4"]
    for seed in ("0", "1", "2"):
        assert main(["simulate", *words, "--systems", "ideal", "--seed", seed]) == 0
    first, *others = (each.trace for each in asked)
    assert len(first) == 4 * 19
    assert asked[0].models == tuple((f"stream-{i}", "llama-2-13b") for i in range(4))
    assert first[0].arrival_s == 0.0
    assert len({first, *others}) == 3


def test_a_recorded_trace_is_clipped_and_fitted(asked: list[Setting], tmp_path: Path) -> None:
    rows = "".join(f"{n / 50},{9000 if n % 2 else 500},50,m{n % 3}\n" for n in range(2000))
    (tmp_path / "trace.csv").write_text(PLAIN + rows)
    assert main(["simulate", "--trace", "trace.csv", "--from", "5", "--nodes", "2"]) == 0
    found = asked[0]
    assert not found.synthetic
    assert len(found.notes) == 3
    assert found.notes[0].startswith("only 5 s to the end: 1750 of 2000")
    assert "875 of 1750 requests (50.0 %) clipped to the context of 4096" in found.notes[1]
    assert "so that the peak of 10 s just fits when every node serves" in found.notes[2]
    assert len(found.trace) < 1000
    assert {row.model for row in found.trace} == {"llama-2-13b"}

    more = ["--nodes", "4", "--hardware", "h100-400g", "--seed", "3", "--slots", "8"]
    assert main(["simulate", "--trace", "trace.csv", "--from", "5", *more]) == 0
    assert len(asked[1].trace) == pytest.approx(2 * len(found.trace), rel=0.35)
    assert (asked[1].nodes, asked[1].hardware, asked[1].seed) == (4, "h100-400g", 3)

    assert main(["simulate", "--trace", "trace.csv", "--rate-factor", "0.5"]) == 0
    assert len(asked[2].trace) == pytest.approx(1000, abs=2)


def test_a_model_for_each_of_the_traces(asked: list[Setting], tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(PLAIN + "0,5,5,code\n1,5,5,chat\n2,5,5,other\n")
    words = ["simulate", "--trace", "trace.csv", "--rate-factor", "1", "--model"]
    assert main([*words, "code=llama-2-7b,*=llama-2-13b"]) == 0
    assert asked[0].models == (
        ("chat", "llama-2-13b"), ("code", "llama-2-7b"), ("other", "llama-2-13b"),
    )  # fmt: skip
    assert [row.model for row in asked[0].trace] == ["code", "chat", "other"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trace", "none.csv"], "none.csv: No such file or directory"),
        (["--trace", "spike:rate=1"], "seconds must be given"),
        (["--trace", SPIKE, "--model", "gpt-9"], "no 'gpt-9'"),
        (["--trace", SPIKE, "--model", "llama-2-70b"], "more than a node of h800-400g has"),
        (["--trace", SPIKE, "--model", "a=llama-2-7b"], "the trace's models are synthetic; none"),
        (["--trace", SPIKE, "--model", "synthetic="], "each needs one that serves it"),
        (["--trace", SPIKE, "--hardware", "abacus"], "no 'abacus'"),
        (["--trace", SPIKE, "--from", "9", "--until", "3"], "--from 9 is not before --until 3"),
        (["--trace", SPIKE, "--from", "90"], "no requests from 90 s"),
        (["--trace", SPIKE, "--rate-factor", "0.001"], "leaves none"),
        (["--trace", SPIKE, "--streams", "3"], "--streams needs --until"),
    ],
)
def test_bad_input_is_one_line(
    asked: list[Setting], words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not asked


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--trace"),
        (["--trace", SPIKE, "--systems", "ideal,vllm"], "no system 'vllm'; there are lambdascale"),
        (["--trace", SPIKE, "--nodes", "0"], "0 is not a whole number of at least 1"),
        (["--trace", SPIKE, "--jobs", "two"], "two is not a whole number"),
        (["--trace", SPIKE, "--rate-factor", "-1"], "-1 is not more than 0"),
        (["--trace", SPIKE, "--rate-factor", "fits"], "fits is not a number"),
        (["--trace", SPIKE, "--from", "-1"], "-1 is less than 0"),
        (["--trace", SPIKE, "--slo-ttft-ms", "0"], "0 is not more than 0"),
        (["--trace", SPIKE, "--sweep", "2,8"], "'2,8': give keep-alive times"),
        (["--trace", SPIKE, "--target", "1.5"], "1.5: must be at most 1"),
    ],
)
def test_wrong_usage(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["simulate", *words])
    assert info.value.code == 2
    assert says in capsys.readouterr().err


# --- the processes ----------------------------------------------------------


def fake(body: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", FAKE.replace("BODY", body))


async def test_runs_come_back_whole_and_in_order() -> None:
    told: list[str] = []
    systems = ["serverlessllm", "ideal"]
    runs = await run_all(setting(), systems, jobs=2, tell=told.append, command=fake())
    assert list(runs) == systems
    assert runs == {system: made_up(system) for system in systems}
    assert {line.split(":")[0] for line in told} == set(systems)


async def test_progress_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "TELL_EVERY_S", 0.0)
    told: list[str] = []
    await run_all(setting(), ["ideal"], jobs=1, tell=told.append, command=fake())
    assert told[0].startswith("ideal: 300 of ")
    assert told[1:] == ["ideal: done"]


async def test_no_more_than_so_many_at_once(tmp_path: Path) -> None:
    """Each fails that meets another's mark."""
    body = f"""
mark = Path({str(tmp_path / "mark")!r})
mark.touch(exist_ok=False)
print(1.0, flush=True)
mark.unlink()
"""
    systems = ["serverlessllm", "ideal", "nccl"]
    runs = await run_all(setting(), systems, jobs=1, tell=lambda _: None, command=fake(body))
    assert list(runs) == systems


async def test_a_failure_ends_the_others_and_says_why(tmp_path: Path) -> None:
    body = f"""
if system == "nccl":
    while not Path({str(tmp_path / "ideal")!r}).exists():
        time.sleep(0.01)
    raise ValueError("no such thing")
Path({str(tmp_path / "ideal")!r}).write_text(str(os.getpid()))
time.sleep(1000)
"""
    with pytest.raises(ExceptionGroup) as info:
        await run_all(setting(), ["ideal", "nccl"], jobs=2, tell=lambda _: None, command=fake(body))
    (error,) = info.value.exceptions
    assert isinstance(error, SimulationFailed)
    assert "the simulation of nccl failed: ValueError: no such thing" in str(error)
    log, text = the_log(tmp_path)
    assert f"(more in {log})" in str(error)
    assert "Traceback" in text
    assert not alive(int((tmp_path / "ideal").read_text()))


async def test_what_cannot_be_run_is_bad_input() -> None:
    body = "print('needs 2 nodes', file=sys.stderr); sys.exit(2)"
    with pytest.raises(ExceptionGroup) as info:
        await run_all(setting(), ["ideal"], jobs=1, tell=lambda _: None, command=fake(body))
    (error,) = info.value.exceptions
    assert isinstance(error, BadInput)
    assert str(error) == "ideal: needs 2 nodes"


async def test_cancelling_ends_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "TELL_EVERY_S", 0.0)
    started = asyncio.Event()
    body = f"""
Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
print(1.0, flush=True)
time.sleep(1000)
"""
    running = asyncio.create_task(
        run_all(setting(), ["ideal"], jobs=1, tell=lambda _: started.set(), command=fake(body))
    )
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(int((tmp_path / "pid").read_text()))


def the_log(folder: Path) -> tuple[Path, str]:
    (log,) = folder.glob("lambdascale-nccl-*.log")
    return log, log.read_text()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
