"""`python -m pipeline.cli` is the `tokenmill` command."""

from pipeline.cli import main

main()
