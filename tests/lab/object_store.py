"""A server of S3 for the lab: moto's, which counts the requests, and one that accepts connections and says nothing."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from . import Host
from .process import Rank
from .rank import report

PORT = 5000
BUCKET = "place"


def credentials(server: str) -> dict[str, str]:
    """Return the environment of a process that uses the server at this address, and asks nobody else."""
    return {
        "AWS_ENDPOINT_URL": f"http://{server}:{PORT}",
        "AWS_ACCESS_KEY_ID": "lab",
        "AWS_SECRET_ACCESS_KEY": "lab",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def serve_s3(answer_refusal: bool = False, tell: bool = True) -> None:
    """Serve S3 until killed.

    Args:
        answer_refusal: whether to answer every request as for credentials that are not valid.
        tell: whether to report every request. A report blocks once a test has left some hundred of them unread.
    """
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    inner = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if tell:
            with lock:
                report(
                    "request", method=environ["REQUEST_METHOD"], path=environ["PATH_INFO"], by=environ["REMOTE_ADDR"]
                )
        if answer_refusal:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>InvalidAccessKeyId</Code><Message>The key does not exist</Message></Error>"]
        return inner(environ, start_response)  # type: ignore[no-any-return]

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

    server = make_server("0.0.0.0", PORT, application, threaded=True, request_handler=Handler)
    from urllib.request import Request, urlopen

    threading.Thread(target=server.serve_forever, daemon=True).start()
    if not answer_refusal:
        with urlopen(Request(f"http://127.0.0.1:{PORT}/{BUCKET}", method="PUT", data=b"")):
            pass
    report("listening")
    threading.Event().wait()


def serve_silence() -> None:
    """Accept connections until killed, and say nothing."""
    held = []
    with socket.create_server(("0.0.0.0", PORT)) as server:
        report("listening")
        while True:
            held.append(server.accept())
            report("accepted")


def start(host: Host, serve: Callable[..., None] = serve_s3, **arguments: Any) -> Rank[None]:
    """Start a server on a host, and wait until it listens."""
    server = host.start(serve, **arguments)
    server.wait_for("listening")
    return server


def requests(server: Rank[None]) -> Counter[str]:
    """Return how many requests of each method came, from other hosts."""
    return Counter(event["method"] for event in server.events if event.name == "request" and event["by"] != "127.0.0.1")


def left(server: Rank[None]) -> set[str]:
    """Return the objects that were written and not deleted."""
    there: set[str] = set()
    for event in server.events:
        if event.name == "request" and event["path"].count("/") > 1:
            if event["method"] == "PUT":
                there.add(event["path"])
            elif event["method"] == "DELETE":
                there.discard(event["path"])
    return there
