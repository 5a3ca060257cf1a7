from __future__ import annotations

import pytest

from shared.wire.paths import no_such_path

PATHS = {"/v1/chat/completions", "/v1/models", "/tokenize"}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/chat/completions", "Did you mean '/v1/chat/completions'? The base URL ends with /v1."),
        ("/models/", "Did you mean '/v1/models'? The base URL ends with /v1."),
        ("/v1/models/", "Did you mean '/v1/models'?"),
        ("//v1/models", "Did you mean '/v1/models'?"),
        ("/v1/v1/chat/completions", "Did you mean '/v1/chat/completions'?"),
        ("/v1/tokenize", "Did you mean '/tokenize'?"),
        ("/v1/files", "send their text in the request."),
        ("/v1/files/file-1/content", "send their text in the request."),
        ("/v1/batches/", "if others are to go first."),
        ("/v1/conversations/conv_1/items", "that keeps responses."),
        ("/v1/filesystem", "There is nothing at '/v1/filesystem'."),
        ("/v1", "There is nothing at '/v1'."),
        ("/", "There is nothing at '/'."),
        ("", "There is nothing at ''."),
        ("/nowhere", "There is nothing at '/nowhere'."),
        ("/" + "x" * 8000, f"There is nothing at '/{'x' * 99}'."),
        ("/\x1b[2J", r"There is nothing at '/\x1b[2J'."),
    ],
)
def test_a_404_names_the_path_that_was_meant(path: str, says: str) -> None:
    assert no_such_path(path, PATHS.__contains__).endswith(says)
