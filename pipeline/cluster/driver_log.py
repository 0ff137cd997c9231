"""Copies the output of a run's driver (the process that schedules the run) into the store, so that it can be read from
any machine."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import selectors
import sys
import threading

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.redact import redact
from pipeline.cluster.attempts import PIECE, piece_name
from pipeline.store.fs import Store

COPY_S = 2.0             # seconds between two copies of new output to the store
LONGEST = 64 << 10       # characters after which an unfinished line or private key is passed on unfinished


class DriverLog:
    """A context manager that copies everything that this process and its libraries write to stdout and stderr. The copy
    goes into the store, below runs/RUN/log/, and the output is also passed on to stderr. Secrets are masked in both.
    When the context ends, the copy is complete, unless the store could not be written.

    Object storage cannot append to a file. So the log is a series of files (pieces), and only the last piece is
    replaced as the log grows."""

    def __init__(self, store: Store, run: str, attempt: int, clock: Clock = SYSTEM,
                 copy_s: float = COPY_S) -> None:
        self._clock, self._copy_s = clock, copy_s
        self.store, self.run, self.attempt = store, run, attempt
        self._piece, self._text, self._copied = 1, b"", b""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._line = ""
        self._closing = threading.Event()

    def __enter__(self) -> DriverLog:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)      # lines appear in time and in order; this also flushes
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = [os.dup(1), os.dup(2)]
        self._read, write = os.pipe()
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        self._thread = threading.Thread(target=self._pump, name="driver-log", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, saved in zip((1, 2), self._saved):
            os.dup2(saved, fd)
        self._closing.set()          # do not wait for end of file: a process we left behind may hold the pipe
        self._thread.join(timeout=30.0)
        for fd in (*self._saved, self._read):
            os.close(fd)

    def _pump(self) -> None:
        copied = self._clock.now()
        selector = selectors.DefaultSelector()                     # select() takes no descriptor from 1,024 on
        selector.register(self._read, selectors.EVENT_READ)
        while True:
            closing = self._closing.is_set()
            ready = selector.select(0.0 if closing else 0.25)
            data = os.read(self._read, 1 << 16) if ready else b""
            if data:
                self._take(self._decode(data))
            elif closing or ready:
                break
            if self._clock.now() - copied > self._copy_s:
                copied = self._clock.now()
                self._copy()
        selector.close()
        self._take("", last=True)
        self._copy()

    def _take(self, text: str, last: bool = False) -> None:
        """Add `text` to the log, and pass whole lines on to stderr, with secrets masked in both. An unfinished line is
        held back until its end comes. So is a private key of several lines, because half a secret would not be
        recognised. Nothing is held back if no more text follows (`last`), or beyond LONGEST characters."""
        lines = self._line + text
        cut = lines.rfind("\n") + 1
        key = lines.rfind("-----BEGIN ", 0, cut)
        if key >= 0 and lines.find("-----END ", key, cut) < 0:
            cut = key
        if last or (len(lines) - cut > LONGEST):
            cut = len(lines)
        lines, self._line = lines[:cut], lines[cut:]
        if lines:
            data = redact(lines).encode("utf-8", "replace")
            with contextlib.suppress(OSError):               # the terminal may be gone
                os.write(self._saved[1], data)
            self._text += data

    def _copy(self) -> None:
        while self._text != self._copied:
            piece = self._text[:PIECE]
            if len(self._text) > PIECE:                      # end the piece with a whole line, if it has one
                piece = piece[:(piece.rfind(b"\n") + 1) or len(piece)]
            try:
                self.store.write(piece_name(self.run, self.attempt, self._piece), piece)
            except Exception:                                # the commit log reports it if the store is gone
                return
            if piece == self._text:
                self._copied = piece
                return
            self._piece, self._text, self._copied = self._piece + 1, self._text[len(piece):], b""
