"""Asks the gateway of compose.yaml for an answer until there is one, then says how others ask: the last line
of `docker compose up` works."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

FILE: Final = Path("/var/lib/penstock/keys.json")
PATIENCE_S: Final = 900.0
"""A model may have to be downloaded first."""
AGAIN_S: Final = 2.0


def asked(url: str, key: str, model: str) -> str:
    """Empty once there was an answer, else why there was none."""
    body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    head = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            json.load(answer)["choices"]
    except (OSError, ValueError, KeyError) as error:
        return str(error)
    return ""


def told(keys: dict[str, str], model: str) -> str:
    """What to do with it, with the ports that are published."""
    port, admin, grafana = (os.environ[name] for name in ("GATEWAY_PORT", "ADMIN_PORT", "GRAFANA_PORT"))
    chat = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello"}]})
    return f"""
Penstock is ready.

  API key    {keys["api"]}
  Console    http://127.0.0.1:{admin}/console
  Admin key  {keys["admin"]}
  Grafana    http://127.0.0.1:{grafana}

curl -N http://127.0.0.1:{port}/v1/chat/completions -H 'Authorization: Bearer {keys["api"]}' \
-H 'Content-Type: application/json' -d '{chat}'
"""


def main() -> int:
    """Wait, and tell. Returns the process's exit code."""
    url, model = os.environ["BASE_URL"], os.environ["MODEL"]
    deadline_s = time.monotonic() + PATIENCE_S
    problem = "the gateway has not started"
    while time.monotonic() < deadline_s:
        if FILE.exists():
            keys = json.loads(FILE.read_text() or "{}")
            if keys and not (problem := asked(url, keys["api"], model)):
                print(told(keys, model), flush=True)
                return 0
        time.sleep(AGAIN_S)
    sys.stderr.write(f"no answer within {PATIENCE_S:g} s: {problem}; see docker compose logs\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
