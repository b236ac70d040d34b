"""`python -m troth` is the `troth` command."""

from troth.cli import main

main()
