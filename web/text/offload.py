"""Keeps long computations from holding up the other requests of this process.

Under gevent every request of a process shares one thread, so work that takes milliseconds goes to gevent's pool of real
threads; the work must release the GIL to gain anything, as `tokenizers` does. Under threads there is nothing to do.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def offload(work: Callable[..., T], *args: Any) -> T:
    """Return work(*args), computed so that other requests go on meanwhile. Exceptions pass through."""
    if "gevent" in sys.modules:
        import gevent
        from gevent import monkey

        if monkey.is_module_patched("threading"):
            result: T = gevent.get_hub().threadpool.apply(work, args)
            return result
    return work(*args)
