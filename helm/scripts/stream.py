"""The chart's `helm test`: one streamed answer through the gateway, with a key from an existing Secret."""

import http.client
import json
import os
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

url = urlsplit(os.environ["BASE_URL"])
key_file, model = Path(os.environ["KEY_FILE"]), os.environ["MODEL"]
timeout_s = float(os.environ["TIMEOUT_S"])
if not key_file.exists():
    sys.exit("helmTest.keySecret names no Secret with an API key: nothing was asked")
if url.scheme == "https":
    context = ssl.create_default_context()
    context.check_hostname = False  # the Service's name is not the public one
    context.verify_mode = ssl.CERT_NONE
    connection: http.client.HTTPConnection = http.client.HTTPSConnection(
        url.netloc, timeout=timeout_s, context=context
    )
else:
    connection = http.client.HTTPConnection(url.netloc, timeout=timeout_s)
question = {"role": "user", "content": "Say hello."}
asked = {"model": model, "messages": [question], "stream": True, "max_tokens": 16}
head = {"authorization": f"Bearer {key_file.read_text().strip()}", "content-type": "application/json"}
connection.request("POST", "/v1/chat/completions", json.dumps(asked), head)
answer = connection.getresponse()
request_id = answer.headers.get("x-request-id")
if answer.status != 200:
    sys.exit(f"status {answer.status}, x-request-id {request_id}: {answer.read(4096)!r}")
events = [line[6:].strip() for line in answer if line.startswith(b"data: ")]
if len(events) < 3 or events[-1] != b"[DONE]":
    sys.exit(f"the stream was not whole, x-request-id {request_id}: {events[-1:]!r}")
deltas = [choice for event in events[:-1] for choice in json.loads(event).get("choices", [])]
text = "".join(choice["delta"].get("content") or "" for choice in deltas)
if not text:
    sys.exit(f"the answer was empty, x-request-id {request_id}")
print(f"{len(events)} events, x-request-id {request_id}: {text!r}")
