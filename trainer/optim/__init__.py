"""Optimisers: each module has a frozen config with its `kind` and a function that builds it from named parameters."""
