"""One process per model replica: admission, scheduling, paged KV cache, forward pass, sampling, publishing.

Never imports web or flask. The pure half (requests, scheduling, cache bookkeeping, wire) imports without torch; the
torch half is runner, attention, linear, sampler, memory, model_loader and assemble.
"""
