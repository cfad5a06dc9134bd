"""How many nodes are wanted, for KEDA: an external scaler, over gRPC.

KEDA asks a service of this contract how large something should be, and tells Kubernetes. Here that
is the number of nodes; how many replicas of which model run on them stays the planner's to say. The
names and numbers of the fields are those of KEDA's `externalscaler.proto`.

Only the active planner listens, so whoever asks finds that one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from structlog.stdlib import BoundLogger

SERVICE = "externalscaler.ExternalScaler"
METRIC = "wanted_nodes"
LOOK_S = 1.0
"""A stream tells within this time that nodes are wanted, or that none are any more."""
AGAIN_S = 1.0
"""Seconds between attempts at a port that another process has."""
_TYPES = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "string": FieldDescriptorProto.TYPE_STRING,
}
_MESSAGES = {
    # Which object is scaled makes no difference here: its fields are left unread.
    "ScaledObjectRef": (),
    "IsActiveResponse": (("result", 1, "bool"),),
    "MetricSpec": (
        ("metricName", 1, "string"),
        ("targetSize", 2, "int64"),
        ("targetSizeFloat", 3, "double"),
    ),
    "GetMetricSpecResponse": (("metricSpecs", 1, "MetricSpec"),),
    "GetMetricsRequest": (("metricName", 2, "string"),),
    "MetricValue": (
        ("metricName", 1, "string"),
        ("metricValue", 2, "int64"),
        ("metricValueFloat", 3, "double"),
    ),
    "GetMetricsResponse": (("metricValues", 1, "MetricValue"),),
}
"""The fields of each message: (name, number, type). Those of a message's type are repeated."""


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="externalscaler.proto", package="externalscaler")
    file.syntax = "proto3"
    for name, fields in _MESSAGES.items():
        message = DescriptorProto(name=name)
        for field, number, kind in fields:
            added = message.field.add(name=field, number=number)
            if kind in _TYPES:
                added.type, added.label = _TYPES[kind], FieldDescriptorProto.LABEL_OPTIONAL
            else:
                added.type_name = f".externalscaler.{kind}"
                added.type = FieldDescriptorProto.TYPE_MESSAGE
                added.label = FieldDescriptorProto.LABEL_REPEATED
        file.message_type.append(message)
    pool = DescriptorPool()
    pool.Add(file)
    return {
        name: GetMessageClass(pool.FindMessageTypeByName(f"externalscaler.{name}"))
        for name in _MESSAGES
    }


_MADE = _classes()


class Scaler:
    def __init__(self, wanted: Callable[[], int]) -> None:
        """`wanted`: how many nodes are wanted now."""
        self._wanted = wanted

    async def serve(self, host: str, port: int, log: BoundLogger) -> None:
        """Answers until it is cancelled. While another process has the port, as a planner of this
        machine may that ends, it waits for it."""
        said = False
        while (server := self._begun(host, port)) is None:
            if not said:
                log.warning("the scaler's port cannot be had: tries again", host=host, port=port)
            said = True
            await asyncio.sleep(AGAIN_S)
        await server.start()
        try:
            await server.wait_for_termination()
        finally:
            await server.stop(None)

    def _begun(self, host: str, port: int) -> grpc.aio.Server | None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, self._methods()),)
        )
        try:
            server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            return None
        return server

    def _methods(self) -> dict[str, grpc.RpcMethodHandler]:
        unary, streams = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        asked, answer = "ScaledObjectRef", "IsActiveResponse"
        return {
            "IsActive": _method(unary, self._is_active, asked, answer),
            "StreamIsActive": _method(streams, self._stream_is_active, asked, answer),
            "GetMetricSpec": _method(unary, self._spec, asked, "GetMetricSpecResponse"),
            "GetMetrics": _method(unary, self._metrics, "GetMetricsRequest", "GetMetricsResponse"),
        }

    async def _is_active(self, _: Message, context: Any) -> Message:
        return self._activity(self._wanted() > 0)

    async def _stream_is_active(self, _: Message, context: Any) -> AsyncIterator[Message]:
        """Says at once how it is, and then whenever that changes."""
        said: bool | None = None
        while True:
            if (active := self._wanted() > 0) is not said:
                said = active
                yield self._activity(active)
            await asyncio.sleep(LOOK_S)

    def _activity(self, active: bool) -> Message:
        return _made("IsActiveResponse", result=active)

    async def _spec(self, _: Message, context: Any) -> Message:
        """One for each node: as many nodes as the metric says."""
        spec = _made("MetricSpec", metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return _made("GetMetricSpecResponse", metricSpecs=[spec])

    async def _metrics(self, request: Any, context: Any) -> Message:
        if request.metricName != METRIC:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"no metric {request.metricName!r}: there is {METRIC!r}",
            )
        wanted = self._wanted()
        value = _made(
            "MetricValue", metricName=METRIC, metricValue=wanted, metricValueFloat=float(wanted)
        )
        return _made("GetMetricsResponse", metricValues=[value])


def _made(name: str, **fields: Any) -> Message:
    made: Message = _MADE[name](**fields)
    return made


def _method(kind: Any, act: Any, asked: str, answer: str) -> grpc.RpcMethodHandler:
    made: grpc.RpcMethodHandler = kind(
        act,
        request_deserializer=_MADE[asked].FromString,
        response_serializer=_MADE[answer].SerializeToString,
    )
    return made
