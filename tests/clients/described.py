"""`/openapi.json` held to the server by schemathesis, which makes requests of it: some that the document allows, bounds above
all, and some that it forbids. No answer is a server's failure; each has a status, a type and a shape that is documented; what
is forbidden is refused. The number of requests is bounded, and their seed is fixed.

    PYTHON tests/clients/described.py URL [EXAMPLES [SEED]]    by hand, with as many examples of each operation as one likes
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


# Routes of what is not there, or not to be had: nothing is answered with 200.
NEVER = {"/v1/responses/{id}", "/v1/responses/{id}/input_items", "/v1/responses/{id}/cancel", "/models/unload"}


def run(url, document, examples=EXAMPLES, seed=SEED, seconds=SECONDS, more=()):
    """Exit status and output of schemathesis, with a document in place of the server's own."""
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


def the_document_is_kept_to(server):
    document = get(server.url + "/openapi.json")[1]
    before = answered(server.url)
    status, output = run(server.url, document)
    assert status == 0, output[-3000:]
    # Requests that are all refused would show little.
    after = answered(server.url)
    for path in document["paths"].keys() - NEVER:
        more = after.get(path, 0) - before.get(path, 0)
        assert more > 0, f"{path} answered none"
    operations = sum(len(path) for path in document["paths"].values())
    tested = re.search(r"Operations:\s+(\d+) selected / (\d+) total", output)
    assert tested and int(tested[2]) == operations, f"{operations} operations; {output[-1500:]}"
    print(summary(output))


def a_lie_is_found(server):
    """What finds nothing in a document that is wrong would show nothing."""
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


TESTS = [the_document_is_kept_to, a_lie_is_found]


if __name__ == "__main__":
    url, *numbers = sys.argv[1:]
    status, output = run(url, get(url + "/openapi.json")[1], *map(int, numbers), seconds=24 * 3600)
    print(output)
    sys.exit(status)
