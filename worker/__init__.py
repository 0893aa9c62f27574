"""One process per model replica: admission, scheduling, paged KV cache, forward pass, sampling, publishing.

Never imports web or flask. Everything but runner, attention, linear, sampler, memory and model_loader imports without torch.
"""
