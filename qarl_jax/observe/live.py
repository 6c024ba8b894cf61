# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`qarl watch RUN [RUN ...]`: serves the report of runs as a live page for a browser, while they train or later.

    GET /                        the page
    GET /data?have=[{...}, ...]  per run the news since `have`, and the new `have` (`RunData.part`)
    GET /sample?run=0&at=17      one sample in full
    GET /find?q=text             per run the numbers of the samples with that text

It reads the runs' files and writes nothing. On loopback it checks only that the Host header names this machine, so that
no page of another site can read it. Elsewhere every request needs the token of the printed address, which the browser
then keeps as a cookie. It speaks plain HTTP: over an untrusted network use `ssh -L`.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import http.server
import ipaddress
import json
import secrets
import socket
import threading
import urllib.parse
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from qarl_jax.observe import curves, html_report
from qarl_jax.observe.recorder import folder_of
from qarl_jax.observe.run_data import RunData
from qarl_jax.types import UserError, command, entry_point

COOKIE = "qarl_token"
AT_ONCE = 16 << 20
"""Bytes of a file read for one answer, so that the first ones of a long run come soon."""


def folders(paths: Sequence[str | Path]) -> list[Path]:
    """Lists the runs' folders. A folder that is no run is replaced by the runs in it.

    Raises:
      UserError: there is no run at a path.
    """
    out: list[Path] = []
    for given in map(Path, paths):
        path = folder_of(given)
        inside = sorted(file.parent for file in path.glob("*/metrics.jsonl"))
        if not given.exists() or not path.is_dir():
            raise UserError(f"{given} is not there: name the folder of a run (run_dir), or one with runs in it.")
        out += inside if inside and not (path / "metrics.jsonl").exists() else [path]
    return list(dict.fromkeys(folder.absolute() for folder in out))


class Server(http.server.ThreadingHTTPServer):
    """The HTTP server of the page and its data.

    Args:
      paths: run folders, or folders with runs in them; a run need not have trained a step yet.
      host: address to listen on. port: 0 takes a free one.
      extra: names of further metrics to show.

    Raises:
      UserError: there is nothing at a path, the port is taken, or the host is not this machine's.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[str | Path], host: str = "127.0.0.1", port: int = 0, extra: Sequence[str] = ()):
        found = folders(paths)
        self.runs = [RunData(f, name, most=AT_ONCE) for f, name in zip(found, curves.names_of(found), strict=True)]
        self.panels = curves.specs(extra)
        self.lock = threading.Lock()
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise UserError(
                f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port."
            ) from None

    @property
    def url(self) -> str:
        """The address for a browser, with the token if one is needed."""
        host, port = str(self.server_address[0]), self.server_address[1]
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{port}/" + (f"?token={self.token}" if self.token else "")

    def data(self, have: Sequence[Any]) -> dict[str, Any]:
        """Returns the news of every run since `have`. A run whose files are damaged has an `error`."""
        parts, now = [], []
        for index, run in enumerate(self.runs):
            known = have[index] if index < len(have) and isinstance(have[index], dict) else {}
            try:
                with self.lock:
                    part, counts = run.part(known)
            except UserError as error:
                part, counts = {"name": run.name, "error": str(error)}, {}
            parts.append(part)
            now.append(counts)
        return {"runs": parts, "have": now}


def is_loopback(host: str) -> bool:
    """Tells whether a host address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the server's GET and HEAD requests."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        split = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(split.query))
        if (refused := self._refused(query)) is not None:
            return self._send(403, "text/plain", refused)
        try:
            answer = self._answer(split.path, query)
        except (ValueError, KeyError, IndexError, OSError, TypeError):
            return self._send(400, "text/plain", "No such thing.")
        if answer is None:
            return self._send(404, "text/plain", "The page is at /.")
        if isinstance(answer, str):
            return self._send(200, "text/html", answer)
        return self._send(200, "application/json", json.dumps(answer, separators=(",", ":")))

    do_HEAD = do_GET  # noqa: N815 -- the library's names

    def _answer(self, path: str, query: dict[str, str]) -> Any:
        server = self.server
        if path == "/":
            names = [run.name for run in server.runs]
            return html_report.page(names, {"live": True, "runs": [], "panels": server.panels})
        if path == "/data":
            return server.data(json.loads(query.get("have", "[]")))
        if path == "/sample":
            with server.lock:
                return server.runs[int(query["run"])].sample(int(query["at"]))
        if path == "/find":
            return [run.find(query["q"]) for run in server.runs]
        return None

    def _refused(self, query: dict[str, str]) -> str | None:
        token = self.server.token
        if token is None:
            host = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            return None if is_loopback(host) else "This page is for this machine: open it as 127.0.0.1."
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        given = query.get("token") or (cookie.value if cookie else "")
        same = hmac.compare_digest(given.encode(), token.encode())
        return None if same else "Open the address that the command printed: it has the token."

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if code == 200 and self.server.token:
            self.send_header("Set-Cookie", f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; serves until Ctrl-C and returns the exit code."""
    parser = argparse.ArgumentParser(prog=command("watch"), description="Serves the page of runs, side by side.")
    parser.add_argument("runs", nargs="+", help="run directories, or a folder of them")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on; elsewhere than here the page needs a token")
    parser.add_argument("--port", type=int, default=8265, help="to listen on (default: 8265; 0: any that is free)")
    parser.add_argument("--metric", action="append", default=[], help="one more metric to show; may be repeated")
    args = parser.parse_args(argv)
    with Server(args.runs, args.host, args.port, args.metric) as server:
        print(f"{', '.join(run.name for run in server.runs)}: {server.url}   (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
