"""What nodes measured of the models that they run: room for KV, and the time of a token."""

from collections.abc import Collection, Iterable

from shared.ids import ModelId
from shared.messages.pool import Profile


class Measured:
    def __init__(self) -> None:
        self._kv: dict[ModelId, int] = {}
        """KV positions of a replica, as a node that has the model open said last."""
        self._prefill: dict[ModelId, float] = {}
        """Seconds a prompt token takes, as a node that ran the model said last."""
        self._decode: dict[ModelId, float] = {}
        """Seconds a pass of one token takes, as such a node said."""

    def on_profile(self, profile: Profile) -> None:
        for each in profile.models:
            self._prefill[each.model_id] = each.prefill_s_per_token
            self._decode[each.model_id] = each.decode_s

    def on_kv(self, models: Iterable[ModelId], positions: int) -> None:
        """A node that has these models open says for how many positions it has room."""
        self._kv.update(dict.fromkeys(models, positions))

    def forget(self, models: Collection[ModelId]) -> None:
        """Lets go of all but these models."""
        for measured in (self._kv, self._prefill, self._decode):
            for model in measured.keys() - set(models):
                del measured[model]

    def kv_tokens(self, model: ModelId) -> int:
        """KV positions of a complete replica; 0: not known."""
        return self._kv.get(model, 0)

    def prefill_s_per_token(self, model: ModelId) -> float:
        """Of a complete replica; 0: not known."""
        return self._prefill.get(model, 0.0)

    def decode_s(self, model: ModelId) -> float:
        """A pass of one token through a complete replica; 0: not known."""
        return self._decode.get(model, 0.0)
