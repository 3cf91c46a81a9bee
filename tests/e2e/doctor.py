"""Asks for /health every half second, over a new connection each time, as probes do: `python doctor.py URL`.

A process of its own, and of the standard library alone: clients that keep a loop busy would be late by themselves, and
what they wait for would count as the server's. A line each, "STATUS SECONDS", until standard input ends.
"""

import http.client
import sys
import threading
import time
from urllib.parse import urlsplit

PAUSE_SECONDS = 0.5
TIMEOUT_SECONDS = 60.0


def look(address: str) -> int:
    """The reply's status."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/health")
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def main() -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    address = urlsplit(sys.argv[1]).netloc
    while True:
        began = time.perf_counter()
        status = look(address)
        print(status, time.perf_counter() - began, flush=True)
        if ended.wait(PAUSE_SECONDS):
            return


if __name__ == "__main__":
    main()
