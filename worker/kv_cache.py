"""The bookkeeping of the paged KV cache: which request holds which blocks, and which blocks can be shared.

Owns the block pool, the reference counts and the prefix cache. Holds integers only, never tensors; runs on the engine
thread. Every change of a request's `block_table` and `block_hashes` is made here.

Prefix caching: a full block is named by the hash of its tokens chained onto the hash of the block before it, as in
vLLM's automatic prefix caching, so equal names mean equal token histories. The chain starts from the tenant, so that no
tenant can learn from timing what another one asked. A block that nobody holds stays findable until its place is
needed; the least recently freed goes first.

A prompt that another request is computing at this moment is not computed twice: the second waits for its blocks. So
the n answers to one prompt, submitted together, cost one prefill.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from worker.request import RequestState


class KVCacheManager:
    """Hands out the blocks of a cache of `num_blocks` × `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Names of blocks that a request is about to compute, by whom.
        self._promised: dict[bytes, RequestState] = {}
        # Blocks nobody holds, in the order in which they are given away.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; cached ones among them count, for they can be given away."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks held by at least one request."""
        return self.num_blocks - len(self._free)

    @property
    def max_tokens(self) -> int:
        """Tokens that fit when one request has the whole cache."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, request: RequestState, reserve_blocks: int) -> bool:
        """Give a request that holds nothing the blocks for all its tokens, cached ones where its prefix is known.

        Sets `num_computed` to the tokens found. Returns False and changes nothing when fewer than
        `reserve_blocks` would be left free, or when the prefix goes on in blocks that are being computed now.
        """
        found, to_compute = self._find_prefix(request)
        if to_compute and to_compute[0] in self._promised:
            return False
        idle = sum(1 for block in found if not self._references[block])
        missing = self.blocks_for(request.num_tokens) - len(found)
        if self.num_free - idle - missing < reserve_blocks:
            return False
        for block in found:
            self._hold(block)
        request.block_table = found
        request.num_computed = len(found) * self.block_size
        self._take(request, missing)
        self._promised.update(dict.fromkeys(to_compute, request))
        return True

    def grow(self, request: RequestState) -> bool:
        """Make the block table cover all the request's tokens. Returns False and changes nothing when blocks lack."""
        missing = self.blocks_for(request.num_tokens) - len(request.block_table)
        if missing > self.num_free:
            return False
        self._take(request, missing)
        return True

    def commit(self, request: RequestState, num_new: int) -> None:
        """Count `num_new` more tokens as computed, and make the blocks they fill findable for later requests."""
        first = request.num_computed // self.block_size
        request.num_computed += num_new
        if not self.prefix_caching:
            return
        full = request.num_computed // self.block_size
        self._extend_hashes(request, full)
        for index in range(first, full):
            self._name(request.block_table[index], request.block_hashes[index])
            self._promised.pop(request.block_hashes[index], None)

    def free(self, request: RequestState) -> None:
        """Take back all that a request holds; its tokens stay, its cached blocks stay findable."""
        for name in request.block_hashes[request.num_computed // self.block_size :]:
            if self._promised.get(name) is request:
                del self._promised[name]
        # The tail goes first, so that the start of a history, which more requests share, lives longest.
        for block in reversed(request.block_table):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)
        request.block_table = []
        request.num_computed = 0

    def check(self, holders: Iterable[RequestState]) -> None:
        """Raise AssertionError unless the books balance: every reference is a holder's, free + held = total."""
        counted = [0] * self.num_blocks
        holders = list(holders)
        _ensure(
            {id(request) for request in self._promised.values()} <= {id(request) for request in holders},
            "blocks are promised by a request that computes nothing",
        )
        for request in holders:
            _ensure(len(set(request.block_table)) == len(request.block_table), "a request holds a block twice")
            _ensure(
                request.num_computed <= len(request.block_table) * self.block_size, "computed tokens without blocks"
            )
            for block in request.block_table:
                counted[block] += 1
        _ensure(counted == self._references, "reference counts differ from what requests hold")
        _ensure(
            {block for block, count in enumerate(counted) if not count} == set(self._free),
            "free blocks are not exactly those that nobody holds",
        )
        _ensure(
            self._block_of == {name: block for block, name in self._hash_of.items()}, "the two prefix maps disagree"
        )

    # --- the parts of the above ---------------------------------------------------------------------------------------

    def _find_prefix(self, request: RequestState) -> tuple[list[int], list[bytes]]:
        """Return the cached blocks that start this request's history, and the names of the full blocks after them.

        The last token is always left to compute.
        """
        if not self.prefix_caching:
            return [], []
        limit = (request.num_tokens - 1) // self.block_size
        if request.scores_prompt:
            # Cached blocks have keys and values, but no logits: what is not scored yet is computed.
            limit = min(limit, len(request.prompt_logprobs) // self.block_size)
        self._extend_hashes(request, limit)
        found: list[int] = []
        for name in request.block_hashes[:limit]:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found, request.block_hashes[len(found) : limit]

    def _extend_hashes(self, request: RequestState, num_blocks: int) -> None:
        hashes = request.block_hashes
        while len(hashes) < num_blocks:
            at = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else request.tenant.encode()
            tokens = array("q", request.tokens[at : at + self.block_size]).tobytes()
            hashes.append(blake2b(tokens, digest_size=16, key=blake2b(parent, digest_size=32).digest()).digest())

    def _hold(self, block: int) -> None:
        if not self._references[block]:
            del self._free[block]
        self._references[block] += 1

    def _take(self, request: RequestState, count: int) -> None:
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            name = self._hash_of.pop(block, None)
            if name is not None:
                del self._block_of[name]
            self._references[block] = 1
            request.block_table.append(block)

    def _name(self, block: int, name: bytes) -> None:
        # Two requests that computed the same tokens side by side: the first block keeps the name.
        if block not in self._hash_of and name not in self._block_of:
            self._hash_of[block] = name
            self._block_of[name] = block


def _ensure(condition: bool, message: str) -> None:
    """Like assert, but also under `python -O`: these checks guard a running server."""
    if not condition:
        raise AssertionError(message)
