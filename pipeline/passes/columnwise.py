"""Evaluates a function that is written for one document on many documents at once. Such a function is, for example, the
verdict of a stage (its decision to keep or drop a document). The results are the same as if the function were called
for each document.

The verdict of a stage may be `doc.signals["words"] < self.config.min_words`. A million calls take seconds. This module
calls the function with an object that stands for many documents. Each of its signals is a whole column, and a
comparison is made for all documents at once.

The documents may differ in the answer to a comparison. The call then goes on with those that have the same answer as
the first document. The function is called again for the others. In this second call, the earlier comparisons return
their stored answers, up to the one at which the documents differed. The function thus runs once for each path through
it: a dozen times instead of a million. A stage needs no second version of its rules.

`NotColumnwise` is raised if the function uses a number in another way than arithmetic and comparison
(`math.log(value)`), or reads anything but signals, language and source. The caller then calls the function for each
document. A function that depends on the type of a number may give a wrong result, because this cannot be detected.
Tokenmill's own stages do not depend on it; the user's own stages may.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np

from stages.document import Document

Result = TypeVar("Result", bound=Hashable)
#: paths through a function that are tried; more would take longer than a call for each document
MOST_PATHS = 4096
#: documents at a time: their columns fit the cache of a core
BLOCK = 1 << 16
#: beyond this, not every whole number has an exact float
EXACT = 2 ** 53


class NotColumnwise(BaseException):
    """Raised when a function cannot be evaluated on many documents at once. It is not an Exception, so that a stage
    that catches exceptions does not mistake it for an error of a document."""


@dataclass
class DocumentColumns:
    """The fields of `rows` documents as columns. `signals` maps the name of a signal (a number stored beside a
    document) to its values (float64). `present` maps the name of a signal to a bool array: whether each document has
    the signal. A signal that all documents have is not in `present`. A signal that no document has is in neither dict.
    `language` and `source` hold, for each document, an index into `languages` and `sources`."""

    rows: int
    signals: dict[str, np.ndarray] = field(default_factory=dict)
    present: dict[str, np.ndarray] = field(default_factory=dict)
    language: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    languages: list[str] = field(default_factory=list)
    source: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    sources: list[str] = field(default_factory=list)

    def document(self, row: int) -> Document:
        """Return the document of one row, without its text."""
        signals = {name: float(column[row]) for name, column in self.signals.items()
                   if name not in self.present or self.present[name][row]}
        return Document("", language=self.languages[self.language[row]], source=self.sources[self.source[row]],
                        signals=signals)


def for_all(function: Callable[[Any], Result], columns: DocumentColumns, rows: np.ndarray,
            one_by_one: bool = True) -> tuple[list[Result], np.ndarray]:
    """Evaluates `function` on the documents `rows`. Returns its distinct results, and the index of the result of each
    row.

    The function is called for each document by itself if it cannot be evaluated on many at once. With `one_by_one`
    false, NotColumnwise is raised instead.
    """
    numbers: dict[Result, int] = {}
    codes = np.empty(len(rows), np.int32)
    for start in range(0, len(rows), BLOCK):
        block = rows[start:start + BLOCK]
        into = codes[start:start + BLOCK]
        try:
            _paths(function, columns, block, into, numbers)
        except NotColumnwise:
            if not one_by_one:
                raise
            for place, row in enumerate(block):
                into[place] = numbers.setdefault(function(columns.document(row)), len(numbers))
    return list(numbers), codes


def _paths(function: Callable[[Any], Result], columns: DocumentColumns, rows: np.ndarray, into: np.ndarray,
           numbers: dict[Result, int]) -> None:
    waiting: list[tuple[np.ndarray, list[Any]]] = [(np.arange(len(rows)), [])]
    paths = 0
    while waiting:
        places, answers = waiting.pop()
        path = _Path(rows, places, answers, waiting)
        result = function(ManyDocuments(path, columns))
        into[path.places] = numbers.setdefault(result, len(numbers))
        paths += 1
        if paths + len(waiting) > MOST_PATHS:
            raise NotColumnwise


class _Path:
    """One call of the function that is evaluated on many documents. It has the documents for which the function takes
    the same branches, and the answers (such as results of comparisons) that led to these branches."""

    def __init__(self, rows: np.ndarray, places: np.ndarray, answers: list[Any],
                 waiting: list[tuple[np.ndarray, list[Any]]]) -> None:
        self._all, self.places, self._answers, self._waiting = rows, places, answers, waiting
        self._answered = 0
        self.rows = rows[places]

    def ask(self, question: Callable[[np.ndarray], np.ndarray]) -> Any:
        """Returns the answer to a question, such as a comparison, in this call of the function. `question` computes the
        answers for the given rows. The call continues with the documents that have the same answer as the first
        document; the other documents are left to later calls."""
        if self._answered < len(self._answers):
            self._answered += 1
            return self._answers[self._answered - 1]
        answers = question(self.rows)
        answer = answers[0]
        same = answers == answer
        if not same.all():
            for other in np.unique(answers[~same]):
                self._waiting.append((self.places[answers == other], [*self._answers, other.item()]))
            if len(self._waiting) > MOST_PATHS:
                raise NotColumnwise
            self.places = self.places[same]
            self.rows = self._all[self.places]
        self._answers.append(answer.item())
        self._answered += 1
        return self._answers[-1]


class ManyDocuments:
    """Stands for many documents in one call of a function. It has the fields of a document on which a verdict may
    depend: `signals`, `language` and `source`."""

    def __init__(self, path: _Path, columns: DocumentColumns) -> None:
        self._path, self._columns = path, columns
        self.signals = _StoredSignals(path, columns)

    @property
    def language(self) -> str:
        code: int = self._path.ask(lambda rows: self._columns.language[rows])
        return self._columns.languages[code]

    @property
    def source(self) -> str:
        code: int = self._path.ask(lambda rows: self._columns.source[rows])
        return self._columns.sources[code]

    def caller_column(self, values: np.ndarray, compared: list[np.ndarray] | None = None) -> CallerColumn:
        """Returns a column with the numbers `values`, one for each document, for example a threshold for each. The
        function can use it like a single number. When a signal is compared with the column, the signal's values are
        appended to `compared`, so that the caller learns them."""
        return CallerColumn(self._path, lambda rows: values[rows], compared)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotColumnwise


class _StoredSignals(Mapping[str, Any]):
    def __init__(self, path: _Path, columns: DocumentColumns) -> None:
        self._path, self._columns = path, columns

    def __contains__(self, name: object) -> bool:
        if name not in self._columns.signals:
            return False
        present = self._columns.present.get(str(name))
        return present is None or bool(self._path.ask(lambda rows: present[rows]))

    def __getitem__(self, name: str) -> Column:
        if name not in self:
            raise KeyError(name)
        values = self._columns.signals[name]
        return Column(self._path, lambda rows: values[rows])

    def __iter__(self) -> Iterator[str]:
        raise NotColumnwise

    def __len__(self) -> int:
        raise NotColumnwise


def _refuse(self: Column, *arguments: Any) -> NoReturn:
    raise NotColumnwise


def _arithmetic(operation: Callable[[Any, Any], Any], turned: bool = False) -> Callable[[Column, Any], Any]:
    def result(self: Column, other: Any) -> Any:
        if not isinstance(other, (int, float, Column)):
            return NotImplemented
        if turned:
            return Column(self.path, lambda rows: operation(_values(other, rows), self.values(rows)))
        return Column(self.path, lambda rows: operation(self.values(rows), _values(other, rows)))

    return result


def _comparison(operation: Callable[[Any, Any], Any]) -> Callable[[Column, Any], Any]:
    def result(self: Column, other: Any) -> Any:
        if not isinstance(other, (int, float, Column)):
            return NotImplemented
        for number, counterpart in ((self, other), (other, self)):
            if isinstance(number, CallerColumn) and isinstance(counterpart, Column) and number.compared is not None:
                number.compared.append(counterpart.values(counterpart.path.rows))
        return self.path.ask(lambda rows: np.asarray(operation(self.values(rows), _values(other, rows)), bool))

    return result


def _values(number: Any, rows: np.ndarray) -> Any:
    if isinstance(number, Column):
        return number.values(rows)
    if isinstance(number, int) and abs(number) > EXACT:      # compared exactly, as Python numbers
        return np.array(number, object)
    return number


class Column:
    """A column with one number for each of many documents, used in place of a single number. It supports comparison,
    and those kinds of arithmetic that give the same results with numpy as with Python's floats."""

    def __init__(self, path: _Path, values: Callable[[np.ndarray], np.ndarray]) -> None:
        self.path, self.values = path, values

    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __add__, __radd__ = _arithmetic(operator.add), _arithmetic(operator.add, True)
    __sub__, __rsub__ = _arithmetic(operator.sub), _arithmetic(operator.sub, True)
    __mul__, __rmul__ = _arithmetic(operator.mul), _arithmetic(operator.mul, True)

    def __truediv__(self, other: Any) -> Any:
        if not isinstance(other, (int, float, Column)):
            return NotImplemented
        if (other == 0) is True:                       # if `other` is a column, compares each document
            raise ZeroDivisionError("float division by zero")
        return Column(self.path, lambda rows: self.values(rows) / _values(other, rows))

    def __rtruediv__(self, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        if (self == 0) is True:
            raise ZeroDivisionError("float division by zero")
        return Column(self.path, lambda rows: other / self.values(rows))

    def __bool__(self) -> bool:
        return bool(self.path.ask(lambda rows: self.values(rows) != 0))

    def __int__(self) -> int:
        def truncated(rows: np.ndarray) -> np.ndarray:
            values = np.trunc(self.values(rows))
            if not (np.abs(values) < EXACT).all():          # NaN, too
                raise NotColumnwise
            return values.astype(np.int64)

        return int(self.path.ask(truncated))

    __hash__ = __float__ = __index__ = __round__ = __str__ = __repr__ = __format__ = _refuse
    __neg__ = __abs__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = _refuse
    __trunc__ = __floor__ = __ceil__ = __divmod__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise NotColumnwise


class CallerColumn(Column):
    """A column of numbers that the caller supplies, for example one threshold for each document. When a signal (a
    number stored for each document) is compared with the column, its values are appended to the list `compared`. So the
    caller learns what the column was compared with."""

    def __init__(self, path: _Path, values: Callable[[np.ndarray], np.ndarray],
                 compared: list[np.ndarray] | None) -> None:
        super().__init__(path, values)
        self.compared = compared
