"""What lies between a client and an HTTP server, and can be broken."""

import contextlib
import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[[str, str], str | None]


class Line(ThreadingHTTPServer):
    """Forwards requests to a server, except those for which `fault(method, path)` names what happens to them:

    "500" is answered with that error, "silence" is read and never answered, "stall" is not even read, and "slow" comes
    a while later.
    """

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.server = server.removeprefix("http://")
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.fault: Fault = lambda method, path: None
        self.over = threading.Event()
        self.seen: list[str] = []


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Line

    def _forward(self) -> None:
        line, fault = self.server, self.server.fault(self.command, self.path)
        line.seen.append(f"{self.command} {self.path}")
        if fault == "stall":
            line.over.wait()
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault == "silence":
            line.over.wait()
            self.close_connection = True
        elif fault == "500":
            text = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
            self._answer(500, [("Content-Type", "application/xml")], text)
        else:
            if fault == "slow":
                line.over.wait(0.3)
            connection = http.client.HTTPConnection(line.server, timeout=120)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body, dict(self.headers))
                told = connection.getresponse()
                self._answer(told.status, told.getheaders(), told.read())

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass
