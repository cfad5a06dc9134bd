"""How long a gateway takes to admit a request, and to choose one of many instances for it."""

import random
import time

from benchmarks.control_plane.scene import BLOCKS, SLOTS, Scene, model_id
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.ledger import Rules
from services.gateway.core.requests import Request
from shared.ids import GatewayId, InstanceId, ModelName, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState, Stage
from shared.messages.serving import Sampling

NAME = ModelName("routed")
ROUNDS = 400
PROMPT = tuple(range(128))


def replica(scene: Scene, index: int) -> Instance:
    node = scene.node(index)
    return Instance(
        id=InstanceId(f"replica-{node.node}"),
        stages=(Stage(node.node, node.address, 0, BLOCKS),),
        state=InstanceState.SERVING,
        capacity=1.0,
        slots=SLOTS,
        event=None,
    )


def route_us(scene: Scene) -> float:
    """Microseconds of processor time for each request, in a gateway that has one model with one
    instance on each node."""
    draw = random.Random(0).random
    dispatch = Dispatch(
        Rules(
            draw=draw,
            max_queue=ROUNDS,
            queue_timeout_s=60.0,
            stall_s=60.0,
            max_attempts=8,
        )
    )
    dispatch.take_id(GatewayId("gateway"), 0.0)
    id_ = model_id(NAME)
    dispatch.add_model(NAME, id_)
    instances = tuple(replica(scene, index) for index in range(scene.nodes))
    dispatch.on_instances(
        InstanceSet(name=NAME, model_id=id_, epoch=1, revision=1, instances=instances), 0.0
    )
    requests = [
        Request(
            id=RequestId(f"r{number}"),
            model_id=id_,
            prompt=PROMPT,
            max_tokens=64,
            stop_ids=(),
            sampling=Sampling(),
            waiting_since=0.0,
        )
        for number in range(min(ROUNDS, scene.nodes * SLOTS))
    ]
    began = time.thread_time()
    for request in requests:
        dispatch.admit([request], 0.0)
    return (time.thread_time() - began) / len(requests) * 1e6
