"""`python -m headway`."""

from headway.cli import main

main()
