"""Whether an attempt that a gateway submits makes sense, and this node leads its path."""

from services.node.core.wellformed import END, wrong_rules, wrong_sampling
from shared.errors import BadInput
from shared.ids import NodeId
from shared.messages.serving import Submit


def check_submit(submit: Submit, node: NodeId, n_blocks: int) -> None:
    """BadInput unless the attempt makes sense and this node leads its path."""
    stages = submit.stages
    ends = [stage.stop for stage in stages]
    if not stages or stages[0].node != node:
        raise BadInput(f"node {node} does not lead the path of request {submit.request}")
    if [stage.start for stage in stages] != [0, *ends[:-1]] or ends[-1] != n_blocks:
        raise BadInput(f"the path of request {submit.request} does not cover {n_blocks} blocks")
    if any(stage.start >= stage.stop for stage in stages):
        raise BadInput(f"the path of request {submit.request} has a stage without blocks")
    if len({stage.address for stage in stages}) < len(stages):
        raise BadInput(f"the path of request {submit.request} comes to a node twice")
    if not 0 < submit.prompt_tokens <= len(submit.tokens) or min(submit.tokens) < 0:
        raise BadInput(f"request {submit.request} has no prompt, or token ids below 0")
    wrong = wrong_sampling(submit.sampling) or (submit.rules and wrong_rules(submit.rules))
    if wrong:
        raise BadInput(f"request {submit.request} asks for {wrong}")
    if min(submit.stop_ids, default=0) < 0 or max(submit.stop_ids, default=0) >= END:
        raise BadInput(f"request {submit.request} has stop ids that are no token ids")
    scores = submit.score_from > 0
    if scores and (submit.image or submit.sampling.logprobs is None):
        raise BadInput(f"request {submit.request} has no log probabilities for its prompt to have")
    if not 0 <= submit.score_from <= submit.prompt_tokens:
        raise BadInput(f"request {submit.request} has no token {submit.score_from} in its prompt")
    if submit.pooling and (
        submit.image or submit.rules or scores or submit.max_tokens != 1 or submit.stop_ids
    ):
        raise BadInput(f"request {submit.request} is for a vector, which has no settings of tokens")
    if len(submit.tokens) - submit.prompt_tokens >= submit.max_tokens:
        raise BadInput(f"request {submit.request} has all its {submit.max_tokens} tokens already")
