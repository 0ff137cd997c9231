"""Which exceptions are a user's to mend: they are shown as one line, without a traceback."""

from __future__ import annotations


def known_errors() -> tuple[type[BaseException], ...]:
    """Errors whose message says file, key and remedy (imported here, late: `--help` stays fast)."""
    from pipeline.driver import TooManyErrors
    from pipeline.engine.scheduler import Interrupted, TaskFailed
    from pipeline.plan.inputs import InputError
    from pipeline.recipe.errors import RecipeError
    from pipeline.store.fs import StoreError
    from stages.catalog import UnknownName
    from stages.mix.order import CurriculumError
    from tokenizer.load import TokenizerError
    from tokenizer.shards.layout import ShardError

    return (RecipeError, InputError, StoreError, TaskFailed, Interrupted, TooManyErrors, UnknownName, CurriculumError,
            TokenizerError, ShardError, UserError)


def usage_errors() -> tuple[type[BaseException], ...]:
    """Those of them that mean bad usage or a bad recipe: exit code 2, nothing has been run."""
    from pipeline.plan.inputs import InputError
    from pipeline.recipe.errors import RecipeError
    from stages.catalog import UnknownName

    return (RecipeError, InputError, UnknownName, BadUsage)


class UserError(Exception):
    """A command cannot do what it was asked; the message says why and what to do."""


class BadUsage(UserError):
    """Arguments that make no sense: exit code 2."""
