"""A runner that proves the cache bookkeeping: it has a real paged store and reads it back before every token.

Each slot holds the digest of the token history that was written there. A step checks, through the block tables alone,
that every earlier position of a request holds exactly that request's history, so a block that was given away too
early, shared wrongly or never written shows at once. The next token is a function of the whole history and the seed.
"""

from hashlib import blake2b

from worker.batch import StepBatch, StepResult

VOCAB_SIZE = 1000


def next_token(history: bytes, seed: int) -> int:
    """The token that follows a history; any change in any earlier token changes it."""
    return int.from_bytes(blake2b(history + seed.to_bytes(8, "little"), digest_size=4).digest(), "little") % VOCAB_SIZE


def extend(history: bytes, token: int) -> bytes:
    return blake2b(history + token.to_bytes(4, "little"), digest_size=16).digest()


def expected_tokens(prompt_ids: list[int], seed: int, count: int) -> list[int]:
    """What a request must generate, computed without any cache."""
    history = b""
    for token in prompt_ids:
        history = extend(history, token)
    generated = []
    for _ in range(count):
        generated.append(next_token(history, seed))
        history = extend(history, generated[-1])
    return generated


class HistoryRunner:
    """See the module."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.slots: list[bytes | None] = [None] * (num_blocks * block_size)
        self.computed_tokens = 0
        self.steps: list[StepBatch] = []

    def run(self, batch: StepBatch) -> StepResult:
        self.steps.append(batch)
        self.computed_tokens += len(batch.input_ids)
        assert len(set(batch.slots)) == len(batch.slots), "two tokens of a step are written to one slot"
        after: dict[int, bytes] = {}
        for segment in batch.segments:
            history = self._stored(segment.block_table, segment.start - 1) if segment.start else b""
            for row in range(segment.row, segment.row + segment.length):
                assert batch.positions[row] == segment.start + row - segment.row
                history = extend(history, batch.input_ids[row])
                self.slots[batch.slots[row]] = history
                after[row] = history
        for segment in batch.segments:
            self._verify(batch, segment)
        for sample in batch.samples:
            assert batch.positions[sample.row] == len(sample.tokens) - 1, "a token is drawn before its turn"
        return StepResult([next_token(after[sample.row], sample.params.seed) for sample in batch.samples])

    def _stored(self, table: list[int], position: int) -> bytes:
        history = self.slots[table[position // self.block_size] * self.block_size + position % self.block_size]
        assert history is not None, "a position was never written"
        return history

    def _verify(self, batch: StepBatch, segment) -> None:
        """After all writes of the step, the last position still holds what this request wrote."""
        last = segment.start + segment.length - 1
        history = self._stored(segment.block_table, segment.start - 1) if segment.start else b""
        for row in range(segment.row, segment.row + segment.length):
            history = extend(history, batch.input_ids[row])
        assert self._stored(segment.block_table, last) == history, "another request wrote into this one's block"
