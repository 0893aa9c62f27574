"""The web process's side of the wire: open calls, the sockets to the worker, and who has hung up."""
