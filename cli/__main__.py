"""Where the `tokenloom` command begins; `python -m cli` is the same, for children that must use this very interpreter.

Imports nothing of weight before it has seen to Ctrl-C.
"""

import signal


def main() -> None:
    """Run the command line and exit. Ctrl-C during the imports ends the process without showing what was imported."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in a script's background job
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cli.main import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
