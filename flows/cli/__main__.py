"""`python -m flows.cli` is `relax-pipeline`."""

from flows.cli.app import main

main()
