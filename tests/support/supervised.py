"""A supervisor over children made of Python source, run as a process of its own so that tests can send it signals.

    python -m tests.support.supervised DIRECTORY '[{"name": …, "code": …, "stop_timeout_s": …}, …]'

The whole is ready while DIRECTORY/ready exists. Children run in DIRECTORY and append to DIRECTORY/log through `say`.
"""

import json
import os
import sys
from pathlib import Path

from cli.child import Child
from cli.restart import RestartPolicy
from cli.supervisor import Supervisor

PRELUDE = """
import os, signal, subprocess, sys, time
def say(text):
    with open("log", "a") as log:
        log.write(text + "\\n")
def until_told(name):
    signal.signal(signal.SIGTERM, lambda *_: (say(name + " ends"), sys.exit(0)))
    say(f"{name} starts {os.getpid()}")
    while True:
        time.sleep(60)
"""


class FileService:
    """Ready while a file exists; says on standard output what it is told."""

    def __init__(self, directory: Path):
        self._flag = directory / "ready"

    def ready(self) -> bool:
        return self._flag.exists()

    def announce(self) -> None:
        print("ready", flush=True)

    def close(self) -> None:
        print("closed", flush=True)


def main(directory: Path, specs: list[dict[str, object]]) -> int:
    os.chdir(directory)
    children = [
        Child(
            name=str(spec["name"]),
            command=[sys.executable, "-c", PRELUDE + str(spec["code"])],
            env=os.environ,
            stop_timeout_s=float(str(spec.get("stop_timeout_s", 20))),
            policy=RestartPolicy(first_delay_s=0.05),
        )
        for spec in specs
    ]
    return Supervisor(children, FileService(directory)).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
