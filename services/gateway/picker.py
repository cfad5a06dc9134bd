"""What a gateway shows to endpoint pickers of Kubernetes' Gateway API Inference Extension.

A picker chooses among the pods of an InferencePool by what each of them says of itself, under
vLLM's names. It reads one series of a name. So the page has one for the whole gateway, where
`/metrics` has one for each model.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from services.gateway.core.pressure import Pressure
from shared.ids import ModelId, ModelName
from shared.messages.pool import ModelRecord
from shared.metrics import Metrics, Series

PATH = "/metrics/picker"


class PickerPage:
    def __init__(
        self,
        pressure: Callable[[], Pressure],
        records: Callable[[], Mapping[ModelName, ModelRecord]],
    ) -> None:
        """`records`: of the published models."""
        self._records = records
        self._now: Pressure
        self._page = 0
        """The page that it was looked at for."""
        self.families = families = Metrics()

        def look() -> Pressure:
            """Once for each page, since the requests are counted for it."""
            if self._page != families.pages:
                self._page, self._now = families.pages, pressure()
            return self._now

        self._look = look

        def gauge(name: str, text: str, value: Callable[[Pressure], float]) -> None:
            families.watch("gauge", f"vllm:{name}", text, read=lambda: [((), value(look()))])

        gauge("num_requests_waiting", "Requests that wait here", lambda now: now.waiting)
        gauge("num_requests_running", "Requests on instances", lambda now: now.running)
        gauge(
            "kv_cache_usage_perc",
            "Share of the KV caches in use, of the nodes that run requests of this gateway (mean)",
            lambda now: now.kv_used,
        )
        families.watch(
            "gauge", "vllm:lora_requests_info",
            "When it was so (s): adapters of requests that run and wait, and how many there are",
            "max_lora", "running_lora_adapters", "waiting_lora_adapters", read=self._adapters,
        )  # fmt: skip

    def _adapters(self) -> Series:
        """Nodes load an adapter when a request comes for it, so there may be as many as there are.
        Nothing, if there are none."""
        names = {record.model_id: record.name for record in self._records().values() if record.base}
        if not names:
            return []
        now = self._look()
        running, waiting = (
            _listed(names, adapters) for adapters in (now.running_adapters, now.waiting_adapters)
        )
        return [((str(len(names)), running, waiting), time.time())]


def _listed(names: Mapping[ModelId, ModelName], adapters: Iterable[ModelId]) -> str:
    return ",".join(sorted(names[adapter] for adapter in adapters if adapter in names))
