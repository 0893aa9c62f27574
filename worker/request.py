"""One request inside the worker: what was asked, its tokens so far, and what it holds of the KV cache.

Data only. The scheduler makes every change of status; the KV cache manager alone changes `block_table` and
`block_hashes`. Runs on the engine thread.
"""

from dataclasses import dataclass, field
from enum import Enum

from common.params import SamplingParams
from common.wire import Logprobs, Submit


class RequestStatus(Enum):
    """Where a request is. Prefill and decode are not states: see `RequestState.num_computed`."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """A request on its way through the scheduler.

    `tokens` is the prompt followed by everything generated. The keys and values of its first `num_computed` tokens
    are in the cache; the scheduler hands out steps until num_computed meets len(tokens). That one rule covers
    prefill, chunked prefill, prefix hits, decode, preemption and resume. A generated token in `end_ids` is the last.

    While `scores_prompt`, the log-probabilities of the prompt's tokens after the first gather in `prompt_logprobs`.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None
    scores_prompt: bool = False
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    priority: int = 0
    tenant: str = ""
    arrival: int = 0
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    added_s: float = 0.0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0

    @classmethod
    def from_submit(cls, submit: Submit, eos_token_ids: frozenset[int] = frozenset()) -> "RequestState":
        """Build the state of a freshly received request; eos_token_ids are the model's."""
        stop_token_ids = frozenset(submit.stop_token_ids)
        return cls(
            id=submit.id,
            tokens=[*submit.prompt_ids, *submit.generated_ids],
            num_prompt=len(submit.prompt_ids),
            params=submit.params,
            max_tokens=submit.max_tokens,
            end_ids=stop_token_ids if submit.ignore_eos else stop_token_ids | eos_token_ids,
            num_logprobs=submit.num_logprobs,
            # A resumed request has told them before.
            scores_prompt=submit.prompt_logprobs and not submit.generated_ids,
            priority=submit.priority,
            tenant=submit.tenant,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt
