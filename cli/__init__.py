"""The command line: starts the processes and talks to them. Thin; imports web or worker only inside a command."""
