"""A mistyped --data is told at once: no retries, whether the name could be one of the hub or not."""

import socket
import threading
import time

import datasets  # noqa: F401  (its import is not what is timed)
import huggingface_hub
import pytest

from odevit.data import DataConfig, load_data

SECONDS = 3


@pytest.fixture
def broken_hub(monkeypatch):
    """A hub that hangs up; the connections made to it."""
    server = socket.create_server(("127.0.0.1", 0))
    connections = []

    def hang_up():
        while True:
            try:
                connection, address = server.accept()
            except OSError:
                return
            connections.append(address)
            connection.close()

    threading.Thread(target=hang_up, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    yield connections
    server.close()


@pytest.mark.parametrize(("name", "asked"), [("digts", 0), ("nobody/digts", 1)])
def test_a_mistyped_name_answers_at_once(name, asked, broken_hub):
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"cannot load '{name}'"):
        load_data(DataConfig(name=name))
    assert time.monotonic() - start < SECONDS
    assert asked <= len(broken_hub) <= 2 * asked  # a dropped connection is tried once more, at once
