"""What web and worker share: wire messages, sampling parameters, configuration, ids, error codes.

Standard library and msgpack only. Imports neither web nor worker.
"""

__version__ = "0.1.0"
