"""Finds items of evaluation sets in documents, so that a training does not learn the answers of its tests."""
