"""One answer of an OpenAI-compatible endpoint, asked for again where that can help.

Standard library alone. The key goes into the Authorization header and nowhere else: no redirect is
followed, which would carry it to another host, and it is struck out of what the server says.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo.errors import UserError

ATTEMPTS = 6
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before the second attempt, then twice as long
PATIENCE = 600.0  # seconds; a server that wants a longer pause ends the work
PASSING = (408, 409, 425, 429)  # with 5xx: what may go well another time


@dataclass(frozen=True)
class Reply:
    """The text; whether it was cut by the length."""

    text: str
    cut: bool


class Pace:
    """Lets requests through at an even rate, all threads together.

    per_minute: 0 for no limit.
    """

    def __init__(
        self,
        per_minute: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.interval = 60.0 / per_minute if per_minute else 0.0
        self.clock, self.sleep = clock, sleep
        self._lock, self._next = threading.Lock(), 0.0

    def wait(self) -> None:
        """Sleep until it is this request's turn."""
        with self._lock:
            now = self.clock()
            at = max(now, self._next)
            self._next = at + self.interval
        if at > now:
            self.sleep(at - now)

    def pause(self, seconds: float) -> None:
        """Hold all requests that have not had their turn for so long."""
        with self._lock:
            self._next = max(self._next, self.clock() + seconds)


@dataclass
class Endpoint:
    """url ends before /chat/completions; key is "" where none is needed."""

    url: str
    model: str
    key: str
    max_tokens: int
    temperature: float
    timeout: float
    pace: Pace
    say: Callable[[str], None] = lambda line: None

    def ask(self, messages: list[dict[str, str]]) -> Reply:
        """The model's answer to a chat.

        Raises UserError for what will not go better another time (401, 404, ...), and once
        ATTEMPTS have failed.
        """
        wait = FIRST_WAIT
        for attempt in range(1, ATTEMPTS + 1):
            self.pace.wait()
            try:
                return self._request(messages)
            except _Passing as failure:
                pause = failure.retry_after
                if attempt == ATTEMPTS or (pause or 0) > PATIENCE:
                    asked = f"; it asks to wait for {pause:.0f} s" if pause else ""
                    raise UserError(
                        f"--url {self.url}: {failure}{asked}; given up after {attempt} attempts, "
                        "the same command goes on later"
                    ) from None
                pause = wait if pause is None else pause
                self.say(f"{failure}; again in {pause:.0f} s")
                if failure.for_all:
                    self.pace.pause(pause)
                else:
                    self.pace.sleep(pause)
                wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError

    def _request(self, messages: list[dict[str, str]]) -> Reply:
        import http.client  # here, since task_names imports this module at each start
        import urllib.error
        import urllib.request

        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        request = urllib.request.Request(
            f"{self.url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {self.key}"} if self.key else {}),
        )
        try:
            with _opener().open(request, timeout=self.timeout) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error  # what urllib wrapped
            raise _Passing(self._clean(f"no answer ({reason})")) from None
        return self._reply(content)

    def _reply(self, content: bytes) -> Reply:
        try:
            choice = json.loads(content)["choices"][0]
            text = choice["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, LookupError, TypeError, RecursionError):
            shown = self._clean(content[:200].decode("utf-8", "replace"))
            raise _Passing(f"the reply is no chat completion: {shown:.80}") from None
        return Reply(text, choice.get("finish_reason") == "length")

    def _refusal(self, error: Any) -> Exception:
        """An HTTP status other than 2xx, as _Passing or as a UserError."""
        try:
            said = error.read(2000).decode("utf-8", "replace")
        except OSError:
            said = ""
        what = self._clean(f"HTTP {error.code} {error.reason}: {said:.200}").rstrip(": ")
        if error.code >= 500 or error.code in PASSING:
            pause = retry_after(error.headers.get("Retry-After"))
            return _Passing(what, pause, for_all=error.code == 429)
        hints = {
            401: "the key is missing or wrong; give it in the environment (--key-variable)",
            403: "the key may not use this model",
            404: "there is no such model or address; look at --model and --url",
        }
        hint = "it redirects; give the address that it leads to" if error.code < 400 else ""
        hint = hints.get(error.code, hint)
        return UserError(f"--url {self.url}, --model {self.model}: {what}{hint and '; ' + hint}")

    def _clean(self, text: str) -> str:
        """In one line, without the key: some servers repeat it."""
        return " ".join((text.replace(self.key, "***") if self.key else text).split())


class _Passing(Exception):
    """A failure that may pass. retry_after: seconds that the server asks for, if it does."""

    def __init__(self, what: str, retry_after: float | None = None, for_all: bool = False):
        super().__init__(what)
        self.retry_after, self.for_all = retry_after, for_all


def retry_after(header: str | None) -> float | None:
    """Seconds from now; the header is a number of seconds or a date. None if it is neither.

    >>> retry_after("7"), retry_after("Fri, 31 Dec 1999 23:59:59 GMT"), retry_after("soon")
    (7.0, 0.0, None)
    """
    from email.utils import parsedate_to_datetime

    if header and header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header or "").timestamp() - time.time())
    except ValueError:
        return None


def _opener() -> Any:
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    return urllib.request.build_opener(NoRedirect)
