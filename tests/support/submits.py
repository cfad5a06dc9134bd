"""Requests as gateways submit them, over paths of up to three nodes. It imports no torch."""

from shared.ids import GatewayId, InstanceId, ModelId, NodeId, RequestId
from shared.messages.instances import Stage
from shared.messages.serving import LogitRules, Pooling, Sampling, Submit

MODEL = ModelId("m")
BLOCKS = 6
GATEWAY = GatewayId("g")


def stages(*parts: tuple[str, int, int]) -> tuple[Stage, ...]:
    return tuple(Stage(NodeId(n), f"mem://{n}", start, stop) for n, start, stop in parts)


WHOLE = stages(("a", 0, BLOCKS))
TWO = stages(("a", 0, 2), ("b", 2, BLOCKS))
THREE = stages(("a", 0, 1), ("b", 1, 4), ("c", 4, BLOCKS))


def submit(
    name: str,
    path: tuple[Stage, ...],
    *,
    prompt: tuple[int, ...] = (3, 1, 4, 1, 5),
    so_far: tuple[int, ...] = (),
    max_tokens: int = 8,
    attempt: int = 1,
    seed: int = 0,
    temperature: float = 0.0,
    stop_ids: tuple[int, ...] = (),
    gateway: GatewayId = GATEWAY,
    logprobs: int | None = None,
    rules: LogitRules | None = None,
    image: bytes = b"",
    score_from: int = 0,
    pooling: Pooling | None = None,
) -> Submit:
    return Submit(
        request=RequestId(name),
        attempt=attempt,
        gateway=gateway,
        model_id=MODEL,
        instance=InstanceId("i"),
        stages=path,
        tokens=prompt + so_far,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        sampling=Sampling(seed=seed, temperature=temperature, logprobs=logprobs),
        rules=rules,
        image=image,
        score_from=score_from,
        pooling=pooling,
    )
