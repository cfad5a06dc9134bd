"""The result of one simulated run of one system: plain values, from which everything is reported.

All times are virtual seconds since time 0 of the trace, the earliest time at which a request could
arrive.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestResult:
    model: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    """Tokens asked for, as in the trace."""
    tokens: int
    """Tokens received."""
    first_token_s: float | None
    last_token_s: float | None
    error: str = ""
    """Empty if it got all its tokens."""
    second_token_s: float | None = None
    """The first that needs the KV of the prompt where it is decoded."""

    @property
    def completed(self) -> bool:
        return not self.error and self.tokens == self.output_tokens

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each token after the first. None if there is no such token."""
        if self.first_token_s is None or self.last_token_s is None or self.tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class EventResult:
    """A scaling event. Times count from the run's start. None: it did not happen."""

    model: str
    state: str
    strategy: str
    sources: int
    targets: int
    decided_s: float
    first_path_s: float | None
    first_complete_s: float | None
    all_complete_s: float | None
    predicted_s: float | None
    """The prediction of all_complete_s - decided_s."""
    bytes_moved: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster's memory from this time on, until the next sample."""

    at_s: float
    gpus: int
    """Nodes with device memory set aside for some model, filled or not."""
    serving: int
    """Complete replicas that take requests."""
    host_bytes: float
    """Bytes of copies of models in host memory, over all nodes."""


@dataclass(frozen=True, slots=True)
class SystemRun:
    system: str
    requests: tuple[RequestResult, ...]
    events: tuple[EventResult, ...]
    samples: tuple[Sample, ...]
    """A sample at every change, in order of time."""
    token_bin_s: float
    tokens_by_bin: tuple[int, ...]
    """Tokens that clients received, in bins of `token_bin_s` from time 0."""
    virtual_s: float
    """The length of the run."""
    wall_s: float
    """The time that it took to simulate, in this process."""
    cpu_s: float = 0.0
    peak_bytes: int = 0
    """The most memory that the process ever had resident."""
