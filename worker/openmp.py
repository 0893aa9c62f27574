"""How the threads of torch's CPU kernels wait for each other; must be settled before torch is imported.

OpenMP's threads spin where they wait, for milliseconds or for ever. That is harmless while every one of them has a core
of its own. As soon as another process wants a core (a web process, a client, anything on a small machine), a spinning
thread holds the very core that the thread it waits for needs, and each of a step's hundreds of operations may cost a
whole time slice of the scheduler. Measured on two cores, default model, one request: beside one busy process a token
took 3.2 s, and 0.07 s with short spinning. Alone, short spinning costs up to 10 %.

The library stops spinning by itself when there are more of its threads in the process than cores. Every thread that
ever computed has a team of them, so only the engine's may be left when it starts (worker/main.py sees to it).
"""

from collections.abc import MutableMapping

SHORT_SPIN = {
    "GOMP_SPINCOUNT": "2000",  # GNU's library, in torch's builds for Linux: turns of the waiting loop
    "KMP_BLOCKTIME": "0",  # LLVM's and Intel's: milliseconds
}

_DECIDED_BY_USER = frozenset({*SHORT_SPIN, "OMP_WAIT_POLICY"})


def spin_briefly(env: MutableMapping[str, str]) -> None:
    """Make OpenMP's threads go to sleep soon, unless the environment says already how they shall wait."""
    if not _DECIDED_BY_USER & env.keys():
        env.update(SHORT_SPIN)
