"""Compares `/openapi.json` with the server. schemathesis generates requests: some that the document allows, mainly
boundary values, and some that it forbids. No answer may be a server error. Each answer must have a documented status,
type and schema. Forbidden requests must be refused. The number of requests is limited, and their seed is fixed.

    PYTHON tests/clients/described.py URL [EXAMPLES [SEED]]    run alone, with EXAMPLES examples of each operation
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from server import ANSWER_SECONDS, get

EXAMPLES = 25
SEED = 5
SECONDS = 300
CHECKS = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance",
]


# Routes of resources that do not exist or are not available: no request is answered with 200.
NEVER = {"/v1/responses/{id}", "/v1/responses/{id}/input_items", "/v1/responses/{id}/cancel", "/api/delete"}


def run(url, document, examples=EXAMPLES, seed=SEED, seconds=SECONDS, more=()):
    """Exit status and output of schemathesis, with a document instead of the server's own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "openapi.json"
        path.write_text(json.dumps(document))
        command = [
            Path(sys.executable).with_name("schemathesis"), "run", path, "--url", url, "--phases", "examples,coverage,fuzzing",
            "--checks", ",".join(CHECKS), "--mode", "all", "--max-examples", str(examples), "--seed", str(seed),
            "--suppress-health-check", "all", "--continue-on-failure", "--no-color", *more,
        ]
        here = Path(__file__).parent
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "described_hooks", "PYTHONPATH": str(here), "UNICORN_MODEL": model(url)}
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=seconds, check=False,
        )
        return done.returncode, done.stdout


def answered(url):
    """How many requests each route has answered with 200."""
    with urllib.request.urlopen(url + "/metrics", timeout=ANSWER_SECONDS) as metrics:
        text = metrics.read().decode()
    counts = re.findall(r'^unicorn_http_requests_total{.*endpoint="([^"]+)",status="200"} (\d+)$', text, re.MULTILINE)
    return {path.replace("{*", "{"): int(n) for path, n in counts}


def model(url):
    return get(url + "/v1/models")[1]["data"][0]["id"]


def the_server_follows_its_document(server):
    document = get(server.url + "/openapi.json")[1]
    before = answered(server.url)
    status, output = run(server.url, document)
    assert status == 0, output[-3000:]
    # If all requests were refused, the test would show little.
    after = answered(server.url)
    for path in document["paths"].keys() - NEVER:
        more = after.get(path, 0) - before.get(path, 0)
        assert more > 0, f"{path} answered none"
    operations = sum(len(path) for path in document["paths"].values())
    tested = re.search(r"Operations:\s+(\d+) selected / (\d+) total", output)
    assert tested and int(tested[2]) == operations, f"{operations} operations; {output[-1500:]}"
    print(summary(output))


def a_wrong_document_is_detected(server):
    """The check would be useless if it found nothing in a wrong document."""
    for lie in [
        lambda schemas: schemas["Model"]["properties"].update(created={"type": "string"}),
        lambda schemas: schemas["DetokenizeRequest"]["properties"]["tokens"].update(maxItems=1),
    ]:
        document = get(server.url + "/openapi.json")[1]
        lie(document["components"]["schemas"])
        status, output = run(server.url, document, more=["--include-path-regex", "^(/v1/models|/detokenize)$"])
        assert status == 1, output[-1500:]


def summary(output):
    return output[output.rfind("SUMMARY"):]


TESTS = [the_server_follows_its_document, a_wrong_document_is_detected]


if __name__ == "__main__":
    url, *numbers = sys.argv[1:]
    status, output = run(url, get(url + "/openapi.json")[1], *map(int, numbers), seconds=24 * 3600)
    print(output)
    sys.exit(status)
