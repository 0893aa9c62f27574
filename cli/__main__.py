"""`python -m cli`: the same as the `tokenloom` command, for children that must use this very interpreter."""

from cli.main import main

main()
