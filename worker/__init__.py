"""One process per model replica: admission, scheduling, paged KV cache, forward pass, sampling, publishing.

Never imports web or flask. The pure half (requests, scheduling, cache bookkeeping, wire) imports without torch; the
modules of the torch half are listed in tests/unit/test_layout.py.
"""
