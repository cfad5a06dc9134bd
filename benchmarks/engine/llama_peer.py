"""llama.cpp as a peer, in a process with a Python of its own (llama_side.py)."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from shared.errors import BadInput, LambdaScaleError

NAME = "llama.cpp"
KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
"""What llama.cpp calls weights of as many bits."""
SIDE = Path(__file__).with_name("llama_side.py")


def check(python: str) -> None:
    """BadInput unless that Python has what llama_side.py needs."""
    try:
        subprocess.run(
            [python, "-c", "import gguf, llama_cpp"], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise BadInput(
            f"--llama-cpp: {python} cannot import llama_cpp and gguf "
            f"({said.strip().splitlines()[-1]}); `bench engine --help` says how to install them"
        ) from error


class LlamaCpp:
    def __init__(
        self,
        python: str,
        checkpoint: Path,
        dtype: str,
        *,
        threads: int,
        sequences: int,
        length: int,
    ) -> None:
        """`length`: the most positions of each of the `sequences`."""
        gguf = checkpoint / f"{KINDS[dtype]}.gguf"
        command = [python, SIDE, checkpoint, gguf, KINDS[dtype], threads, sequences, length]
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._hear()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        """(seconds until all have their first token, median seconds of the decode steps after
        it)."""
        asked = json.dumps({"prompts": prompts, "tokens": tokens})
        print(asked, file=_open(self._process.stdin), flush=True)
        answer = json.loads(self._hear())
        return answer["first_s"], answer["step_s"]

    def close(self) -> None:
        _open(self._process.stdin).close()
        self._process.wait()
        _open(self._process.stdout).close()

    def _hear(self) -> str:
        line = _open(self._process.stdout).readline()
        if not line:
            raise LambdaScaleError(f"llama.cpp ended with status {self._process.wait()}")
        return line


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
