"""Loads recipes: turns a YAML file into a checked model (a pydantic object). `load_recipe` is the entry point."""

from pipeline.recipe.errors import RecipeError
from pipeline.recipe.load import load_recipe, ready_recipes
from pipeline.recipe.model import Recipe

__all__ = ["Recipe", "RecipeError", "load_recipe", "ready_recipes"]
