"""The HTTP routes, a module for each group. Only these, the application and its error handlers know Flask."""
