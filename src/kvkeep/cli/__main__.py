"""`python -m kvkeep.cli`."""

from kvkeep.cli.app import main

main()
