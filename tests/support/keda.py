"""A client that asks for the number of nodes as KEDA does.

The messages are written down here again, from KEDA's `externalscaler.proto` with all fields, so
that a slip in the service's own cannot hide.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

CONTRACT = """
name: "contract.proto" package: "externalscaler" syntax: "proto3"
message_type { name: "ScaledObjectRef"
  field { name: "name" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "namespace" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "scalerMetadata" number: 3 type: TYPE_MESSAGE label: LABEL_REPEATED
    type_name: ".externalscaler.ScaledObjectRef.ScalerMetadataEntry" }
  nested_type { name: "ScalerMetadataEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL } } }
message_type { name: "IsActiveResponse"
  field { name: "result" number: 1 type: TYPE_BOOL label: LABEL_OPTIONAL } }
message_type { name: "GetMetricSpecResponse"
  field { name: "metricSpecs" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
    type_name: ".externalscaler.MetricSpec" } }
message_type { name: "MetricSpec"
  field { name: "metricName" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "targetSize" number: 2 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "targetSizeFloat" number: 3 type: TYPE_DOUBLE label: LABEL_OPTIONAL } }
message_type { name: "GetMetricsRequest"
  field { name: "scaledObjectRef" number: 1 type: TYPE_MESSAGE label: LABEL_OPTIONAL
    type_name: ".externalscaler.ScaledObjectRef" }
  field { name: "metricName" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL } }
message_type { name: "GetMetricsResponse"
  field { name: "metricValues" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
    type_name: ".externalscaler.MetricValue" } }
message_type { name: "MetricValue"
  field { name: "metricName" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "metricValue" number: 2 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "metricValueFloat" number: 3 type: TYPE_DOUBLE label: LABEL_OPTIONAL } }
"""


class Keda:
    """Asks as KEDA does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        file = text_format.Parse(CONTRACT, descriptor_pb2.FileDescriptorProto())
        self._pool = descriptor_pool.DescriptorPool()
        self._pool.Add(file)
        self.object = self._type("ScaledObjectRef")(
            name="nodes", namespace="models", scalerMetadata={"scalerAddress": "planner:9090"}
        )

    def _type(self, name: str) -> Any:
        found = self._pool.FindMessageTypeByName(f"externalscaler.{name}")
        return message_factory.GetMessageClass(found)

    def _method(self, name: str, answer: str, *, stream: bool = False) -> Any:
        make = self._channel.unary_stream if stream else self._channel.unary_unary
        return make(
            f"/externalscaler.ExternalScaler/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self._type(answer).FromString,
        )

    async def is_active(self) -> bool:
        answer = await self._method("IsActive", "IsActiveResponse")(self.object)
        return bool(answer.result)

    async def spec(self) -> Any:
        return await self._method("GetMetricSpec", "GetMetricSpecResponse")(self.object)

    async def metrics(self, name: str) -> Any:
        asked = self._type("GetMetricsRequest")(scaledObjectRef=self.object, metricName=name)
        return await self._method("GetMetrics", "GetMetricsResponse")(asked)

    async def stream(self) -> AsyncIterator[bool]:
        async for answer in self._method("StreamIsActive", "IsActiveResponse", stream=True)(
            self.object
        ):
            yield bool(answer.result)


@asynccontextmanager
async def asking(port: int) -> AsyncIterator[Keda]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        yield Keda(channel)
