"""What nodes measured of the models that they run: room for KV, and the time of a token."""

from collections.abc import Collection, Iterable, Mapping
from math import inf
from statistics import median_low

from shared.ids import ModelId, NodeId
from shared.messages.pool import ModelProfile, Profile

ALIKE = 1.5
"""Speeds that differ by less than this factor count as the same, so that noise changes nothing: the
length of contexts, and what else runs on a machine."""
WHOLE = 0.8
"""The part of a model from which on a pass counts as one over the whole model."""
MOST = 16.0
"""The factor by which a node may be faster or slower than the others. What it claims beyond that is
not believed."""


class Measured:
    def __init__(self) -> None:
        self._kv: dict[ModelId, dict[NodeId, int]] = {}
        """KV positions that each node has which has the model open. Where none has, what the last
        one had."""
        self._open: dict[NodeId, frozenset[ModelId]] = {}
        """The models that nodes have open."""
        self._times: dict[ModelId, dict[NodeId, ModelProfile]] = {}
        """What each node that ran the model says of it."""
        self._middle: dict[ModelId, ModelProfile] = {}
        """The medians of what nodes say. Absent: they have to be found anew."""

    def on_profile(self, node: NodeId, profile: Profile) -> None:
        for each in profile.models:
            self._times.setdefault(each.model_id, {})[node] = each
            self._middle.pop(each.model_id, None)

    def on_gone(self, node: NodeId) -> None:
        """Forgets a node: the next process of its name may run on another machine."""
        for model, times in self._times.items():
            if times.pop(node, None) is not None:
                self._middle.pop(model, None)
        self.on_kv(node, {})
        self._open.pop(node, None)

    def on_kv(self, node: NodeId, shares: Mapping[ModelId, int]) -> None:
        """Takes in the KV positions that a node has for each of its open models."""
        known = self._open.get(node, frozenset())
        if known != shares.keys():
            self._open[node] = frozenset(shares)
            for model in known ^ shares.keys():
                said = self._kv.get(model, {})
                if still := {n: had for n, had in said.items() if model in self._open.get(n, ())}:
                    self._kv[model] = still
                elif model in shares:
                    self._kv[model] = {}
        for model, positions in shares.items():
            self._kv.setdefault(model, {})[node] = positions

    def forget(self, models: Collection[ModelId]) -> None:
        """Forgets all but these models."""
        for model in self._kv.keys() - set(models):
            del self._kv[model]
        for model in self._times.keys() - set(models):
            del self._times[model]
            self._middle.pop(model, None)

    def kv_tokens(self, model: ModelId, *, group: bool = False) -> int:
        """KV positions of an ordinary replica; 0: not known. `group`: a replica takes several
        devices, and each needs KV for every position: what the device with the least room has
        counts."""
        positions = self._kv.get(model, {}).values()
        return min(positions, default=0) if group else int(_middle(positions))

    def prefill_s_per_token(self, model: ModelId) -> float:
        """Seconds that a complete replica takes for each further token; 0: not known."""
        return self._ordinary(model).prefill_s_per_token

    def decode_s(self, model: ModelId) -> float:
        """Seconds of a pass of one token through a complete replica; 0: not known."""
        return self._ordinary(model).decode_s

    def decode_s_per_token(self, model: ModelId) -> float:
        """Seconds that each further sequence adds to such a pass; 0: not known."""
        return self._ordinary(model).decode_s_per_token

    def kv_s_per_token(self, model: ModelId) -> float:
        """Seconds in which the KV of a position moves to another node; 0: it does not."""
        return self._ordinary(model).kv_s_per_token

    def speed(self, node: NodeId, model: ModelId, tokens: int, known: float = 1.0) -> float:
        """How fast the node runs a pass of `tokens` tokens, relative to the median of the nodes.
        `known`: its last result, which stays unless the speed has clearly changed. 1 for a node
        that cannot be compared."""
        own = self._times.get(model, {}).get(node)

        def pass_s(times: ModelProfile) -> float:
            return times.decode_s + (tokens - 1) * times.prefill_s_per_token

        if own is None or not 0 < pass_s(own) < inf or not _is_whole(own):
            return 1.0
        speed = float(f"{pass_s(self._ordinary(model)) / pass_s(own):.2g}")
        alike = (each for each in (known, 1.0) if each / ALIKE < speed < each * ALIKE)
        return next(alike, min(max(1 / MOST, speed), MOST))

    def _ordinary(self, model: ModelId) -> ModelProfile:
        """The medians of what nodes measured; 0: nothing is known."""
        if model not in self._middle:
            every = self._times.get(model, {}).values()
            said = list(filter(_is_whole, every)) or list(every)
            self._middle[model] = ModelProfile(
                model_id=model,
                decode_s=_middle(each.decode_s for each in said),
                decode_s_per_token=_middle(each.decode_s_per_token for each in said),
                prefill_s_per_token=_middle(each.prefill_s_per_token for each in said),
                kv_s_per_token=_middle(each.kv_s_per_token for each in said),
            )
        return self._middle[model]


def _is_whole(times: ModelProfile) -> bool:
    """Whether the node ran the whole model, and knows the two times apart, so that it can be
    compared with others."""
    return times.share >= WHOLE and times.prefill_s_per_token > 0


def _middle(values: Iterable[float]) -> float:
    """The lower median of the values that are positive and finite. 0 if no value is."""
    return median_low([value for value in values if 0 < value < inf] or [0.0])
