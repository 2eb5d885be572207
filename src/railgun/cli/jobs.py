"""Find a running job, and call its HTTP API. Only the standard library is used, so that commands start at once."""

from __future__ import annotations

import difflib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from railgun.cli.errors import FAILED, NO_JOB, USAGE, CommandError
from railgun.transport.registry import Entry, Registry

TIMEOUT_S = 10.0
_CODES = {400: USAGE, 404: USAGE, 409: NO_JOB}
_BY_KIND = {"no-key": FAILED}
_LOST = (URLError, ConnectionError, TimeoutError, http.client.HTTPException)


class Client:
    """A client of the HTTP API of one job."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        # Never through a proxy: the job runs on this machine.
        self._opener = build_opener(ProxyHandler({}))

    def get(self, path: str) -> Any:
        """Send a GET request, and return the JSON of the response; raise `CommandError` if the job refuses it."""
        return self._json(self._request(path))

    def post(self, path: str, **body: Any) -> Any:
        """Send a POST request with a JSON body, and return the JSON of the response."""
        return self._json(self._request(path, json.dumps(body).encode()))

    def events(self, after: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of the job after this number, as (kind, data).

        The kind is `happened`, `status` or, at last, `end`.
        """
        kind, data = "", ""
        with self._open(self._request(f"/events?after={after}")) as response:
            while True:
                try:
                    line = response.readline().decode().rstrip("\n")
                except (*_LOST, OSError) as error:
                    raise self._lost(error) from error
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: "):
                    data = line[6:]
                elif not line and kind:
                    yield kind, json.loads(data)
                    if kind == "end":
                        return
                    kind = ""
                elif not line:
                    raise self._lost(None)

    def _request(self, path: str, body: bytes | None = None) -> Request:
        headers = {
            "Authorization": f"Bearer {self.entry.token}",
            "Content-Type": "application/json",
        }
        return Request(self.entry.url + path, body, headers)

    def _json(self, request: Request) -> Any:
        with self._open(request) as response:
            try:
                return json.loads(response.read())
            except (*_LOST, ValueError) as error:
                raise self._lost(error) from error

    def _open(self, request: Request) -> Any:
        try:
            return self._opener.open(request, timeout=TIMEOUT_S)
        except HTTPError as error:
            with error:
                raise _error_of(error) from error
        except _LOST as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception | None) -> CommandError:
        why = getattr(error, "reason", error) or "it closed the connection"
        return CommandError(
            NO_JOB, "job-gone", f"job {self.entry.name!r} does not answer any more: {why}"
        )


def _error_of(error: HTTPError) -> CommandError:
    try:
        error_data = json.loads(error.read())["error"]
        kind, message = str(error_data["kind"]), str(error_data["message"])
    except (ValueError, KeyError, TypeError, OSError):
        kind, message = "http", f"the job answered {error.code} {error.reason}"
    return CommandError(_BY_KIND.get(kind, _CODES.get(error.code, FAILED)), kind, message)


def find(name: str, registry: Registry) -> Client:
    """Return a client of the job with this name; raise `CommandError`, which lists the running jobs."""
    entry = registry.find(name)
    if entry is not None:
        return Client(entry)
    names = [job.name for job in registry.jobs()]
    if not names:
        hint = "no jobs are running"
    else:
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        hint += f"running: {', '.join(names)}"
    raise CommandError(
        NO_JOB, "no-job", f"there is no job {name!r}, or it has ended; {hint}", running=names
    )
