"""Finds items of evaluation sets in documents, so that no model is trained on the questions that will test it."""
