"""What a real gateway's OpenAPI document says, held against it by another tool (schemathesis)."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.amounts import amount
from tests.support.cluster import LIMIT_S, running

pytest.importorskip("schemathesis", reason="schemathesis is not installed")
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_headers_conformance", "response_schema_conformance", "unsupported_method",
)  # fmt: skip
EXAMPLES = str(amount(8, thorough=15))
"""The number of random requests to each endpoint."""


async def test_a_real_gateway_keeps_to_its_document(tmp_path: Path, checkpoint: Path) -> None:
    async with running(tmp_path, checkpoint, nodes=1) as up:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "schemathesis.cli", "run", f"{up.url}/openapi.json",
            "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing",
            "--max-examples", EXAMPLES, "--seed", "1", "--generation-database", "none",
            "--request-timeout", "60", "--no-color",
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(2 * LIMIT_S):
            said, _ = await process.communicate()
        assert process.returncode == 0, said.decode(errors="replace")
