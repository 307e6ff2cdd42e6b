"""The pytest plugin with which tools/conformance.py runs another project's tests against a running server.

A proxy between the tests and the server records every request of a test and the answer. Stubs replace packages that the
tests import and that are not installed, and the servers that they would start. A test is *not run*, and never passed,
if it called a stub, needed a server option that the running server does not have, or sent no request.

The report is one JSON object a line, in the file that CONFORMANCE_REPORT names:

    {"collected": [TEST, ...]}
    {"module": FILE, "reason": WHY}                                        a file that could not be imported
    {"test": TEST, "outcome": "passed" | "failed" | "not run", "reason": WHY, "error": TYPE, "message": TEXT,
     "statement": SOURCE, "exchanges": [{"method", "path", "asked", "status", "refusal", "ignored"}, ...]}

`statement` is the line of the suite that failed, which only the classifier reads.
"""

import http.client
import importlib.abc
import importlib.machinery
import json
import linecache
import os
import sys
import threading
import types
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

UPSTREAM = urlsplit(os.environ["CONFORMANCE_SERVER"])
REPORT = Path(os.environ["CONFORMANCE_REPORT"])
RELAXED = os.environ["CONFORMANCE_RELAXED"] == "1"
EXCHANGE_SECONDS = 300
REFUSAL_BYTES = 4096
STATEMENT_LINES = 5

# Packages that suites import, and that would install an inference engine or a machine-learning framework.
NOT_INSTALLED = {
    "fastapi", "huggingface_hub", "hypothesis", "lm_eval", "mcp", "openai_harmony", "schemathesis", "starlette", "torch", "transformers",
    "vllm", "wget",
}

# Start options of llama-server. A test that needs one of them is not run. The running server sets some of them in other
# ways (keys, origins), and has its own tests for those.
LLAMA_OPTIONS = [
    "api_key", "cache_ram", "chat_template", "chat_template_file", "cors_origins", "enable_ctx_shift", "gcp_compat", "log_path",
    "lora_files", "mcp_servers_config", "mcp_servers_json", "media_path", "mmproj_url", "model_draft", "model_tags", "models_dir",
    "models_max", "models_preset", "no_cache_idle_slots", "no_mmproj", "no_models_autoload", "no_ui", "pooling", "reasoning",
    "reasoning_format", "server_reranking", "server_slots", "server_tools", "sleep_idle_seconds", "slot_save_path", "spec_synth_len",
    "spec_synth_rates", "spec_type", "swa_full", "ui_mcp_proxy",
]
# The same for options of `vllm serve`.
VLLM_OPTIONS = [
    "--api-key", "--chat-template", "--enable-force-include-usage", "--enable-per-request-metrics", "--enable-prompt-embeds",
    "--exclude-tools-when-tool-choice-none", "--limit-mm-per-prompt", "--load-format", "--max-logprobs", "--reasoning-config",
    "--reasoning-parser", "--return-tokens-as-token-ids", "--root-path", "--runner", "--skip-tokenizer-init", "--speculative-config",
    "--tool-server", "--trust-request-chat-template", "--watermark-config",
]


class Current:
    """What the plugin knows about the current test."""

    def __init__(self):
        self.lock = threading.Lock()
        self.begin()

    def begin(self):
        self.exchanges, self.not_run, self.failure = [], "", None


current = Current()
adapters = set()
modules_not_run = set()


def not_run(reason):
    """Ends the current test, or the import of its file."""
    current.not_run = current.not_run or reason
    pytest.skip(reason, allow_module_level=True)


# --- the proxy ------------------------------------------------------------------------------------------


class Routes:
    """The routes and fields of the server, from its OpenAPI document."""

    def __init__(self, document):
        self.document = document
        self.paths = document["paths"]

    def served(self, path):
        return any(matches(template, path) for template in self.paths)

    def fields(self, method, path):
        """Names of the fields of a body in the document: fields that the server reads, and fields of other servers that
        it refuses or ignores on purpose. None = the document has no such body."""
        try:
            operation = next(entry for template, entry in self.paths.items() if matches(template, path))[method.lower()]
            return self.properties(operation["requestBody"]["content"]["application/json"]["schema"])
        except (KeyError, StopIteration):
            return None

    def properties(self, schema):
        while "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        names = set(schema.get("properties", {})) | {field["name"] for field in schema.get("x-other-fields", [])}
        for part in schema.get("allOf", []):
            names |= self.properties(part)
        return names


def matches(template, path):
    """Whether a path matches a route whose parameters are in braces."""
    wanted, given = template.split("/"), path.split("/")
    return len(wanted) == len(given) and all(w.startswith("{") or w == g for w, g in zip(wanted, given))


def fetch(path):
    with urllib.request.urlopen(f"{UPSTREAM.scheme}://{UPSTREAM.netloc}{path}", timeout=EXCHANGE_SECONDS) as answer:
        return json.load(answer)


class Proxy(BaseHTTPRequestHandler):
    """Forwards requests and streams the answers back. In relaxed mode, it adapts the requests."""

    protocol_version = "HTTP/1.1"
    routes = None
    model = None

    def relay(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        target = self.path
        asked = urlsplit(target).path
        exchange = {"method": self.command, "path": asked, "asked": [], "status": 0, "refusal": "", "ignored": []}
        with current.lock:
            current.exchanges.append(exchange)
        if RELAXED and not self.routes.served(asked) and self.routes.served("/v1" + asked):
            target, asked = "/v1" + target, "/v1" + asked
        body = self.adapt(asked, body, exchange)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "content-length", "connection")}
        upstream = http.client.HTTPConnection(UPSTREAM.netloc, timeout=EXCHANGE_SECONDS)
        self.close_connection = True
        try:
            upstream.request(self.command, target, body if body or self.command == "POST" else None, headers)
            answer = upstream.getresponse()
            exchange["status"] = answer.status
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while piece := answer.read1(65536):
                if answer.status >= 400 and len(exchange["refusal"]) < REFUSAL_BYTES:
                    exchange["refusal"] += piece.decode(errors="replace")
                self.wfile.write(piece)
                self.wfile.flush()
        except OSError:
            pass  # One side closed its connection, as tests of cancellation do.
        finally:
            upstream.close()

    do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = do_PATCH = relay

    def adapt(self, path, body, exchange):
        """The body to send. Records its fields, and which of them the server does not read."""
        try:
            fields = json.loads(body)
        except ValueError:
            return body
        if not isinstance(fields, dict):
            return body
        exchange["asked"] = sorted(fields)
        known = self.routes.fields(self.command, path)
        if known is not None:
            exchange["ignored"] = sorted(name for name, value in fields.items() if name not in known and value is not None)
        if fields.get("model") in adapters:
            current.not_run = "the test asks for a LoRA adapter"
        if RELAXED and isinstance(fields.get("model"), str) and fields["model"]:
            return json.dumps({**fields, "model": self.model}).encode()
        return body

    def log_message(self, *_):
        pass


def start_proxy():
    """Starts the proxy, and returns its port."""
    Proxy.routes = Routes(fetch("/openapi.json"))
    Proxy.model = fetch("/v1/models")["data"][0]["id"]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


# --- stubs ------------------------------------------------------------------------------------------


class Absent(type):
    """The class of everything in an absent module. It may be named, subclassed and caught, but not called."""

    def __call__(cls, *_, **__):
        not_run(f"{cls.absent} is not installed")

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        current.not_run = current.not_run or f"{cls.absent} is not installed"
        return absent(f"{cls.absent}.{name}")

    def __iter__(cls):
        return iter(())

    def __getitem__(cls, _):
        return cls

    def __truediv__(cls, _):
        return cls


def absent(name):
    return Absent(name.rsplit(".", 1)[-1], (Exception,), {"absent": name})


class AbsentModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{self.__name__}.{name}")


class NoPlatform:
    """vLLM's `current_platform` without a platform."""

    def __getattr__(self, _):
        return lambda *_, **__: False


class NoHub:
    """The hub for a fixture that downloads an adapter: the fixture gets a path, and tests of the adapter are not
    run."""

    def snapshot_download(self, *_, **__):
        return "absent"


class RemoteOpenAIServer:
    """Replaces vLLM's helper, which starts `vllm serve`. This one returns the address of the proxy."""

    DUMMY_API_KEY = "none"
    host = "127.0.0.1"

    def __init__(self, model, vllm_serve_args, **_):
        options = [str(option).split("=")[0] for option in vllm_serve_args]
        for option in VLLM_OPTIONS:
            if option in options:
                not_run(f"needs a server that was started with {option}")
        adapters.update(str(option).split("=")[0] for option in vllm_serve_args if "=absent" in str(option))
        self.model, self.port = model, int(os.environ["PORT"])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def url_root(self):
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts):
        return "/".join([self.url_root, *(part.strip("/") for part in parts)])

    def get_client(self, **options):
        return self.client("OpenAI", options)

    def get_async_client(self, **options):
        return self.client("AsyncOpenAI", options)

    def client(self, kind, options):
        import openai

        options = {"timeout": EXCHANGE_SECONDS, "max_retries": 0, **options}
        return getattr(openai, kind)(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, **options)


# Replacements for single names of absent modules.
PRESENT = {
    "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer, "ROCM_EXTRA_ARGS": [], "ROCM_ENV_OVERRIDES": {}},
    "vllm.platforms": {"current_platform": NoPlatform()},
    "vllm.transformers_utils.repo_utils": {"hf_api": NoHub},
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent modules. It is the last finder, so installed packages have priority."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in NOT_INSTALLED or name in PRESENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        vars(module).update(PRESENT.get(module.__name__, {}))


# This runs before the hooks, because pytest imports the conftest.py of a suite first.
sys.meta_path.append(Finder())


def start_of_llama_server(server, *_, **__):
    """Replaces `ServerProcess.start` of llama.cpp's utils.py. The server is already running."""
    for option in LLAMA_OPTIONS:
        if getattr(server, option, None) != getattr(type(server), option, None):
            not_run(f"needs a server that was started with {option}")
    if server.model_hf_repo is None:
        not_run("needs a router, which starts a server for each model")


# --- hooks ----------------------------------------------------------------------------------------------


def pytest_configure(config):
    os.environ["PORT"] = str(start_proxy())
    for marker in ["slow", "serial", "slow_test", "skip_global_cleanup", "core_model", "optional", "asyncio"]:
        config.addinivalue_line("markers", f"{marker}: a marker of the suite")


def pytest_sessionstart():
    helper = sys.modules.get("utils")
    if hasattr(helper, "ServerProcess"):
        helper.ServerProcess.start = start_of_llama_server
        helper.ServerPreset.load_all = lambda: None  # The original downloads models.


def write(entry):
    with REPORT.open("a") as report:
        report.write(json.dumps(entry) + "\n")


def pytest_runtest_logstart():
    current.begin()


def pytest_collectreport(report):
    if report.outcome != "passed":
        text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        reason = (text.strip().splitlines() or ["no reason"])[-1]
        write({"module": report.nodeid, "reason": reason.removeprefix("Skipped: ")})


def pytest_collection_finish(session):
    write({"collected": [item.nodeid for item in session.items]})


def statement(entry):
    """The source of a traceback entry, up to its closing parenthesis. pytest's own function parses the whole file,
    which takes seconds."""
    text = ""
    for line in range(entry.lineno + 1, entry.lineno + 1 + STATEMENT_LINES):
        text += linecache.getline(str(entry.path), line)
        if text.count("(") <= text.count(")"):
            break
    return text


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if call.when == "setup":
        current.failure = None
    if report.skipped and not current.not_run:
        # The suite's own reason, without a command of this machine that may follow.
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "expected to fail"
        current.not_run = reason.removeprefix("Skipped: ").split(":")[0]
    if report.failed and current.failure is None:
        suite = [entry for entry in call.excinfo.traceback if Path(str(entry.path)).is_relative_to(item.config.rootpath)]
        current.failure = {
            "error": call.excinfo.typename,
            "message": str(call.excinfo.value)[:1000],
            "statement": statement(suite[-1]) if suite else "",
        }
    if call.when != "teardown":
        return
    entry = {"test": item.nodeid, "outcome": "passed", "reason": "", "error": "", "message": "", "statement": "", "exchanges": current.exchanges}
    if current.not_run:
        entry |= {"outcome": "not run", "reason": current.not_run}
    elif current.failure and not (current.exchanges or current.failure["error"] == "Failed"):
        entry |= {"outcome": "not run", "reason": f"it failed before it asked the server anything: {current.failure['error']}"}
    elif current.failure:
        entry |= {"outcome": "failed", **current.failure}
    elif not current.exchanges:
        entry |= {"outcome": "not run", "reason": "it asks the server nothing"}
    write(entry)
