"""Checks that a request or a message fits the model that it names."""

from collections.abc import Mapping

import torch

from services.node.core.microbatches import Forward
from shared.errors import BadInput, ProtocolViolation
from shared.ids import ModelId
from shared.layout import Manifest
from shared.messages.serving import Pooling, Submit
from shared.vectors import is_encoder
from shared.vision import is_classifier


def check_prompt(submit: Submit, manifest: Manifest) -> None:
    """BadInput for token ids that the model does not have, which would fail the whole batch, and
    for an image where the model reads text, since the tokens then mean nothing."""
    if is_classifier(manifest.config):
        return  # the engine refuses single images
    if submit.image:
        raise BadInput(f"request {submit.request} has an image, model {submit.model_id} reads text")
    if is_encoder(manifest.config):
        _check_text(submit, manifest.config["max_position_embeddings"])
    elif submit.pooling is Pooling.CLS:
        raise BadInput(
            f"request {submit.request} asks for the first state, which in model "
            f"{submit.model_id} depends on nothing else"
        )
    vocab_size = manifest.config["vocab_size"]
    named = list(submit.rules.named) if submit.rules else []
    if min(named, default=0) < 0 or max((*submit.tokens, *named), default=0) >= vocab_size:
        raise BadInput(
            f"request {submit.request} has token id {max((*submit.tokens, *named))}, "
            f"model {submit.model_id} has ids from 0 to {vocab_size - 1}"
        )


def _check_text(submit: Submit, positions: int) -> None:
    """Whether an encoder of texts can serve the request."""
    if submit.pooling is None:
        raise BadInput(f"request {submit.request} is for tokens; the model gives only vectors")
    if len(submit.tokens) > positions:
        raise BadInput(
            f"request {submit.request} has {len(submit.tokens)} tokens; the model takes {positions}"
        )


def check_width(message: Forward, hidden: torch.Tensor, models: Mapping[ModelId, Manifest]) -> None:
    """ProtocolViolation for hidden states that are not as wide as the model's. A model that is not
    open is the engine's to refuse."""
    manifest, width = models.get(message.path.model_id), hidden.shape[1]
    if manifest is not None and manifest.config["hidden_size"] != width:
        raise ProtocolViolation(
            f"hidden states {width} wide for model {message.path.model_id}, "
            f"which has {manifest.config['hidden_size']}"
        )
