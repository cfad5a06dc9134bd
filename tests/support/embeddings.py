"""What the tests of vectors over real clusters share."""

import openai

from tests.support.cluster import Running

SLOW_LINKS = {
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "200000",
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.1",
    "LAMBDASCALE_NODE_SLOTS": "2",
}


def client_of(up: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0)
