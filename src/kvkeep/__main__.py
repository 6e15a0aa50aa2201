"""`python -m kvkeep`."""

from kvkeep.cli.app import main

main()
