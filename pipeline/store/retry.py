"""Retries requests to object storage that may succeed later, and turns the last error into one that names the cause and
the remedy.

A request is retried after:

- a time-out, a broken connection, or data that was garbled in transit
- most statuses 5xx (`_AGAIN_STATUS`)
- throttling (429, SlowDown and similar)
- a conflict of two conditional writes, which S3 reports as 409

It is not retried after a refusal (401, 403), for a missing object (404), or when the request is invalid. The waits
between tries double from 0.2 s to 20 s. Each wait is shortened at random by up to a half, so that a thousand workers do
not retry at the same moment. These random numbers need no seed, because they cannot change any result.

Exceptions of client libraries are recognised by their names and HTTP statuses. So none of botocore, aiohttp,
google-auth and httpx needs to be installed.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.redact import redact
from pipeline.store.errors import FULL, EnvironmentFailure, StoreError

TRIES = 10                  # the waits add up to 33 to 65 s, not counting the requests
FIRST_S, LONGEST_S = 0.2, 20.0
QUIET_S = 60.0              # seconds between two warnings, at least

T = TypeVar("T")
log = logging.getLogger("tokenmill")

#: HTTP statuses of failures that may be temporary. 501 (not implemented), 505 and 507 (storage full) are not among
#: them. Proxies send 520 to 530.
_AGAIN_STATUS = {408, 425, 429, 500, 502, 503, 504, 509, *range(520, 531)}
_AGAIN_CODES = {"SlowDown", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
                "RequestLimitExceeded", "BandwidthLimitExceeded", "TooManyRequestsException", "RequestTimeout",
                "RequestTimeoutException", "PriorRequestNotComplete", "InternalError", "ServiceUnavailable",
                "TransientError", "ConditionalRequestConflict", "OperationAborted",
                "BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody"}        # 400: garbled in transit
#: exceptions of botocore, aiohttp, requests, httpx and google-auth in which the connection failed, not the request
_AGAIN_NAMES = {"HTTPClientError", "ConnectionError", "IncompleteReadError", "IncompleteRead", "ResponseStreamingError",
                "ResponseParserError", "ClientConnectionError", "ClientPayloadError", "ClientOSError", "Timeout",
                "ChunkedEncodingError", "TransportError", "ProtocolError", "FSTimeoutError",
                "FlexibleChecksumError", "ChecksumError"}  # received data has a wrong checksum
_AGAIN_ERRNO = {errno.EBUSY, errno.EREMOTEIO, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE,
                errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EAGAIN, errno.EINTR}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
                   "DefaultCredentialsError", "ProfileNotFound", "LocalTokenNotFoundError", "TokenRetrievalError"}
#: exceptions that show a bug of ours, and must not be reported as errors of the store
_BUGS = (TypeError, AttributeError, NameError, AssertionError, MemoryError)


def patiently(what: str, url: str, call: Callable[[], T], tries: int | None = None, clock: Clock = SYSTEM) -> T:
    """Call `call` and return its result. If it raises an error that may be temporary, call it again, up to `tries`
    times in all (default TRIES). `what` ('read', 'write') and `url` describe the request in messages.

    Raises EnvironmentFailure if the last try fails, too, and StoreError if an error is not temporary.
    FileNotFoundError, FileExistsError, StoreError, the OSError of a full local disk and exceptions that show a bug are
    raised unchanged, without another try.
    """
    tries = tries or TRIES
    for attempt in range(1, tries + 1):
        try:
            return call()
        except (FileNotFoundError, FileExistsError, StoreError, *_BUGS):
            raise
        except Exception as e:
            if not comes_back(e):
                raise _final(what, url, e) from e
            if attempt == tries:
                raise EnvironmentFailure(
                    f"cannot {what} {redact(url)}: {error_text(e)}, {tries} times in a row; see that the endpoint can "
                    f"be reached from this machine and is not overloaded, then run again: what was committed is kept"
                ) from e
            wait = min(LONGEST_S, FIRST_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
            _warn(what, url, e, attempt, tries, wait, clock.now())
            clock.sleep(wait)
    raise AssertionError("unreachable")


def comes_back(error: Exception) -> bool:
    """Whether a request that failed with this error may succeed if it is sent again a little later."""
    status, code = answer(error)
    if any("OfflineModeIsEnabled" in _kinds(e) for e in _chain(error)):      # a ConnectionError that the user asked for
        return False
    if status is not None or code:
        return status in _AGAIN_STATUS or code in _AGAIN_CODES
    if any(_broken(e) for e in _chain(error)):
        return True
    return isinstance(error, OSError) and error.errno in _AGAIN_ERRNO and not isinstance(error, PermissionError)


def _broken(error: BaseException) -> bool:
    """Whether the error says that the connection failed. A refusal by the server is no such error."""
    return isinstance(error, (TimeoutError, ConnectionError)) or bool(_kinds(error) & _AGAIN_NAMES)


def answer(error: BaseException) -> tuple[int | None, str]:
    """Return (HTTP status, error code) of the server's response that caused an exception; (None, "") when the server
    sent no response."""
    for e in _chain(error):
        if _broken(e):  # aiohttp gives a code to such errors, too, but the server has sent no response
            break
        response = getattr(e, "response", None)
        if isinstance(response, dict):                                          # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(response.get("Error", {}).get("Code", ""))
            if status is None and code.isdecimal():
                status = int(code)
            return (status if isinstance(status, int) else None), code
        for candidate in (getattr(response, "status_code", None), getattr(e, "status", None),
                          getattr(e, "code", None) if "HttpError" in _kinds(e) else None):
            if isinstance(candidate, int) and 100 <= candidate < 600:               # httpx, requests; aiohttp; gcsfs
                return candidate, ""
    return None, ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its causes, the exception itself first."""
    e: BaseException | None = error
    for _ in range(6):
        if e is None:
            return
        yield e
        e = e.__cause__ or (None if e.__suppress_context__ else e.__context__)


def _kinds(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _final(what: str, url: str, error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno in FULL and answer(error)[0] is None:
        return error                                                            # of the local disk
    status, _ = answer(error)
    if _kinds(error) & _NO_CREDENTIALS:
        remedy = ("there are no credentials for it: give them by environment variables, a profile or the machine's "
                  "role (docs/storage.md)")
    elif "OfflineModeIsEnabled" in _kinds(error):
        remedy = "HF_HUB_OFFLINE is set: unset it, or download the files and name them"
    elif status in (401, 403) or isinstance(error, PermissionError):
        remedy = f"access was refused: see that the credentials of this process may {what} there (docs/storage.md)"
    else:
        remedy = "see that the address and the credentials are right and the service supports this (docs/storage.md)"
    return StoreError(f"cannot {what} {redact(url)}: {error_text(error)}; {remedy}")


def error_text(error: BaseException) -> str:
    """Format an error as 'Kind: message', with the HTTP status and without secrets."""
    status, code = answer(error)
    text = " ".join(str(error).split())[:300]
    details = " ".join(x for x in (str(status or ""), code if not code.isdecimal() else "") if x and x not in text)
    return redact(f"{type(error).__name__}: {text}" + (f" ({details})" if details else "")).rstrip(": ")


# -- messages ---------------------------------------------------------------------------------------------------------
class _LastWarning:
    """When the last warning about a retry was logged, in seconds of the clock, and how many requests have failed since
    then."""

    lock = threading.Lock()
    time = -QUIET_S
    failures = 0


def _warn(what: str, url: str, error: Exception, attempt: int, tries: int, wait: float, now: float) -> None:
    """Log a warning that a request will be retried. At most one such warning a minute is logged, so that storage which
    often fails does not fill the log. The warning says how many requests have failed since the last warning."""
    with _LastWarning.lock:
        _LastWarning.failures += 1
        if now - _LastWarning.time < QUIET_S:
            return
        count, _LastWarning.failures, _LastWarning.time = _LastWarning.failures, 0, now
    more = f" ({count} such failures since the last message)" if count > 1 else ""
    log.warning("storage: cannot %s %s yet: %s; try %d of %d failed, the next in %.1f s%s", what, redact(url),
                error_text(error), attempt, tries, wait, more)
