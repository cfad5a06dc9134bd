"""What this node has answered to the known tokens: the first time, and lately.

A gateway that says that a node's answers are wrong may be broken or in a stranger's hands. The node
cannot know what is right, but it knows what it said when it was asked first, and weights and
processors that are well do not change their minds.
"""

from shared.ids import ModelId, RequestId
from shared.known_tokens import TOKENS, Answer, alike
from shared.messages.serving import Submit, Tokens

MOST = 256
"""Questions that may be open, and models that are known. Of more, the oldest are given up."""
_Attempt = tuple[RequestId, int]


class KnownAnswers:
    def __init__(self) -> None:
        self._open: dict[_Attempt, tuple[ModelId, list[float]]] = {}
        """Questions, and what was answered so far."""
        self._first: dict[ModelId, Answer] = {}
        self._last: dict[ModelId, Answer] = {}

    def asked(self, submit: Submit) -> None:
        """An attempt comes. It counts if it asks for the known tokens, of this node alone."""
        alone = len(submit.stages) == 1 and not submit.takes_over
        bare = not (submit.adapter or submit.image or submit.pooling)
        if alone and bare and submit.tokens == TOKENS and submit.score_from == 1:
            self._open[submit.request, submit.attempt] = submit.model_id, []
            if len(self._open) > MOST:
                del self._open[next(iter(self._open))]

    def told(self, tokens: Tokens) -> None:
        """What the node says of its attempts."""
        if not self._open:
            return
        for scores in tokens.scores:
            if found := self._open.get((scores.request, scores.attempt)):
                found[1].extend(each.drawn for each in scores.logprobs)
        for token in tokens.tokens:
            if found := self._open.pop((token.request, token.attempt), None):
                self._keep(found[0], tuple(found[1]))
        for failed in tokens.failed:
            self._open.pop((failed.request, failed.attempt), None)

    def _keep(self, model: ModelId, answer: Answer) -> None:
        if len(answer) == len(TOKENS) - 1:
            self._first.setdefault(model, answer)
            self._last[model] = answer
            if len(self._first) > MOST:
                oldest = next(iter(self._first))
                del self._first[oldest], self._last[oldest]

    def changed(self) -> list[ModelId]:
        """The models for which the last answer is not the first one."""
        return [model for model, said in self._last.items() if not alike(self._first[model], said)]
