#!/usr/bin/env python3
"""Runs the tests of llama.cpp's and vLLM's servers against `unicorn serve`, and writes docs/conformance.md.

The tests come from source distributions of the package index, at pinned versions, and stay in .cache/conformance.
Nothing of them is built, installed or copied into the repository. tools/conformance_plugin.py runs them. RULES assigns
a class to every failure. The exit status is 1 if a failure has no class, or if a suite did not run.

    tools/conformance.py                      starts the demo model on software Vulkan, and runs both suites
    tools/conformance.py --url URL            tests a server that is already running
    tools/conformance.py --again              classifies the last run's failures again (after a change of RULES)
    tools/conformance.py --suite vllm --out FILE --test-seconds 30 --suite-seconds 1800
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections import Counter
from dataclasses import dataclass
from importlib import util
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin

from revision import revision

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache/conformance"
REQUIREMENTS = ROOT / "tests/clients/requirements-conformance.txt"
DOCUMENT = ROOT / "docs/conformance.md"
# The section of docs/conformance.md that tools/lemonade_tests.py writes. It is the last one, and stays as it is.
LEMONADE = "## Lemonade's tests of Ollama's API"
FACTS = CACHE / "facts.json"
FETCH_SECONDS = 300


@dataclass(frozen=True)
class Suite:
    """Tests of another server, inside a source distribution. Paths are relative to the distribution's folder."""

    name: str
    title: str
    package: str
    version: str
    sha256: str
    root: str  # where pytest runs
    tests: str  # the tests to run, relative to `root`
    unpacked: tuple  # the paths that are unpacked, which may be folders

    def folder(self):
        return f"{self.package.replace('-', '_')}-{self.version}"


SUITES = [
    Suite(
        "llama.cpp", "llama.cpp's server tests", "llama-cpp-python", "0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        "vendor/llama.cpp/tools/server/tests", "unit", ("vendor/llama.cpp/tools/server/tests",),
    ),
    Suite(
        "vllm", "vLLM's entrypoint tests", "vllm", "0.33.0",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        ".", "tests/entrypoints/openai", ("tests/__init__.py", "tests/entrypoints"),
    ),
]

# The modes of a run. A relaxed run has a proxy that writes the served model's name into requests, and adds /v1 to
# routes that are served only there.
MODES = {"as is": "0", "relaxed": "1"}


class ConformanceError(Exception):
    """An error that ends the run, in one line."""


# --- the suites -----------------------------------------------------------------------------------------


def index_url():
    """The package index of pip: the configured one, or pip's default, which no pip command prints."""
    tell = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    configured, default = (
        subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False).stdout.strip()
        for command in (["-m", "pip", "config", "get", "global.index-url"], ["-c", tell])
    )
    return (os.environ.get("PIP_INDEX_URL") or configured or default).rstrip("/")


def fetch_suite(suite):
    """Returns the folder with the tests of the suite. Fetches and unpacks them if necessary."""
    folder = CACHE / "suites" / suite.folder()
    if folder.is_dir():
        return folder
    name = suite.folder() + ".tar.gz"
    archive = CACHE / name
    if not archive.is_file():
        download(source_url(suite, name), archive)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != suite.sha256:
        archive.unlink()
        raise ConformanceError(f"{name} has another SHA-256 than the pinned one: try again, or see whether the index is to be trusted")
    partial = folder.with_name(folder.name + ".partial")
    unpack(archive, suite, partial)
    partial.rename(folder)
    archive.unlink()
    return folder


def source_url(suite, name):
    request = urllib.request.Request(f"{index_url()}/{suite.package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=FETCH_SECONDS) as answer:
        files = json.load(answer)["files"]
    for file in files:
        if file["filename"] == name:
            return urljoin(answer.url, file["url"])
    raise ConformanceError(f"{index_url()} has no {name}")


def download(url, archive):
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(".partial")
    with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer, partial.open("wb") as file:
        while piece := answer.read(1 << 20):
            file.write(piece)
    partial.rename(archive)


def unpack(archive, suite, target):
    """Unpacks only the files of the suite. Links, devices and paths outside of the folder are ignored."""
    written = 0
    with tarfile.open(archive) as source:
        for member in source:
            path = PurePosixPath(member.name)
            if not member.isfile() or path.is_absolute() or ".." in path.parts or path.parts[:1] != (suite.folder(),):
                continue
            inner = PurePosixPath(*path.parts[1:])
            if not any(inner.is_relative_to(wanted) for wanted in suite.unpacked):
                continue
            place = target / inner
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(source.extractfile(member).read())
            written += 1
    if not (target / suite.root / suite.tests).is_dir():
        raise ConformanceError(f"{archive.name} has no tests at {PurePosixPath(suite.root) / suite.tests}: {written} files unpacked")


def report_of(suite, mode):
    return CACHE / f"{suite.name}-{mode.replace(' ', '-')}.jsonl"


def run_suite(suite, python, url, mode, test_seconds, suite_seconds):
    """Runs a suite, which writes its report (see tools/conformance_plugin.py)."""
    root = (fetch_suite(suite) / suite.root).resolve()
    report = report_of(suite, mode)
    log = report.with_suffix(".log")
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "CONFORMANCE_SERVER": url, "CONFORMANCE_REPORT": str(report), "CONFORMANCE_RELAXED": MODES[mode],
        "PYTHONPATH": str(ROOT / "tools"),
        # With this variable, llama.cpp's tests do not start a server.
        "DEBUG_EXTERNAL": "1",
    }
    command = [
        python, "-m", "pytest", "-p", "conformance_plugin", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(root), "-q", "--tb=native",
        # Without this option, a timeout may interrupt pytest itself.
        "-o", "timeout_func_only=true",
        "--continue-on-collection-errors", f"--timeout={test_seconds}", f"--session-timeout={suite_seconds}", suite.tests,
    ]
    with log.open("w") as output:
        try:
            # The extra time is for the last test and for pytest's summary.
            ended = subprocess.run(command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False,
                                   timeout=suite_seconds + 2 * test_seconds)
            if ended.returncode not in (0, 1, 2):  # passed, failed, out of time
                raise ConformanceError(f"{suite.name}: pytest ended with status {ended.returncode}; its output is in {log}")
        except subprocess.TimeoutExpired:
            print(f"{suite.name}, {mode}: out of time")
    if not report.exists():
        raise ConformanceError(f"{suite.name}: pytest wrote no report; its output is in {log}")


# --- classes of failures --------------------------------------------------------------------------------


@dataclass
class Failure:
    """A failed test, as the report has it."""

    test: str
    error: str
    message: str
    statement: str
    exchanges: list

    def refusals(self):
        return [Refusal(exchange) for exchange in self.exchanges if exchange["status"] >= 400]

    def ends_refused(self):
        """Whether the last answer was an error. Tests that expect an earlier error continue after it."""
        return bool(self.exchanges) and self.exchanges[-1]["status"] >= 400

    def ignored(self):
        return sorted({name for exchange in self.exchanges for name in exchange["ignored"]})


class Refusal:
    """An exchange that the server answered with an error."""

    def __init__(self, exchange):
        self.status, self.route = exchange["status"], f"{exchange['method']} {exchange['path']}"
        try:
            error = json.loads(exchange["refusal"])["error"]
            self.code, self.param, self.message = error.get("code"), error.get("param"), error.get("message", "")
        except (ValueError, KeyError, TypeError, AttributeError):
            self.code, self.param, self.message = None, None, exchange["refusal"]
        # Anthropic's errors have no code and no param: the message begins with the field.
        if self.code is None and (found := re.match(r"([a-z_]+(?:\[\d+\]|\.[a-z_]+)*): ", self.message)):
            self.param = found[1]


def route_not_served(failure):
    """The server does not have the route, and its error says so."""
    nothing = re.compile(r"there is nothing at |[A-Z]+ is not allowed at ")
    return next((r.route for r in failure.refusals() if nothing.match(r.message)), None)


# Fields for which another server accepts more types of values than OpenAI or Anthropic. This server follows OpenAI and
# Anthropic.
WIDER_ELSEWHERE = re.compile(r"input(\[\d+\])*|messages|messages\[\d+\]\.role|logit_bias\..*")


def field_refused(failure):
    """The error of the server names a field, or a value of it, that it does not support."""
    def is_refused(r):
        return r.param and (r.code == "unsupported_value" or "this server" in r.message and r.param != "model"
                            or WIDER_ELSEWHERE.fullmatch(r.param) and r.status == 400)

    return next((f"{r.param}: {r.message.removeprefix(f'{r.param}: ')}" for r in failure.refusals() if is_refused(r)), None)


# Patterns of failed lines that compare something that depends on the test's own model: its text, its name, or its
# tokens.
OF_A_MODEL = [
    ("the words of its own model", r"match_regex\(|re_content|expect_content|in (?:text|content|output_text)\b|\.startswith\(\"[A-Z]"),
    ("the number of tokens of its own tokenizer", r"n_prompt|n_tokens|prompt_tokens|completion_tokens|\bUsage\("),
    ("the name of its own build", r"system_fingerprint.*startswith"),
    ("an end that its own model does not reach", r"finish_reason\"\] is None"),
    ("the name of its own model", r"model_alias|model_name|MODEL_NAME|\.model ==|\"model\"\] =="),
]


def text_of_a_model(failure):
    """The test names its own model, which is not served. Or: all requests were answered, no field was ignored, and the
    test compares something that depends on its own model."""
    if any(re.search(r"the model \".*\" does not exist", refusal.message) for refusal in failure.refusals()):
        return "the name of its own model"
    if failure.error != "AssertionError" or failure.refusals() or failure.ignored():
        return None
    if "tool_calls" in failure.statement and not any("tool_choice" in exchange["asked"] for exchange in failure.exchanges):
        return "a call that its own model chooses to make"
    return next((what for what, pattern in OF_A_MODEL if re.search(pattern, failure.statement)), None)


# Tests whose failures no pattern recognizes. They compare the text of their own model, or behaviour that is specific to
# their own server, where this server follows OpenAI or docs/api.md.
LISTED = {
    "test_chat.py::test_complex_message_content": ("text", "the words of its own model"),
    "test_chat.py::test_response_format_json_object": ("text", "the words of its own model"),
    "test_chat.py::test_response_format_json_schema": ("text", "the words of its own model"),
    "test_chat.py::test_structured_outputs_json_chat": ("text", "the words of its own model, which fit into its context"),
    "test_completion.py::test_parallel_streaming": ("text", "the words of its own model, which differ from answer to answer"),
    "test_tokenize.py::test_tokenize_with_bos": ("text", "the number of the first token in its own vocabulary"),
    "test_tool_call.py::test_hello_world": ("text", "what its own model hands to the tool that it calls"),
    "test_chat.py::test_chat_completion_stream_options": (
        "manner", "vLLM's last chunk has text together with its finish_reason, so that every chunk counts more tokens; OpenAI's has none"
    ),
    "test_chat.py::test_chat_streaming": ("manner", "vLLM's last chunk has text together with its finish_reason; OpenAI's has none"),
    "test_chat.py::test_prompt_logprobs_chat": ("manner", "vLLM's answers have fields that were not requested, as null"),
    "test_completion.py::test_prompt_logprobs_completion": ("manner", "vLLM's answers have fields that were not requested, as null"),
    "test_return_token_ids.py::test_basic_completion_with_emoji": ("manner", "vLLM's answers have fields that were not requested, as null"),
    "test_prompt_validation.py::test_empty_prompt": ("manner", "the words of its own error"),
    "test_prompt_validation.py::test_out_of_vocab_token_ids": ("manner", "the words of its own error"),
    "test_chat_completion.py::test_context_size_exceeded": ("manner", "its own server's context, which is smaller"),
    "test_chat_completion.py::test_context_size_exceeded_stream": ("manner", "its own server's context, which is smaller"),
    "test_chat_completion.py::test_invalid_chat_completion_req": ("manner", "two answers in a row are an error there, and one answer here"),
    "test_metrics.py::test_metrics_disabled": ("manner", "its own server has metrics only with an option"),
    "test_metrics.py::test_metrics_embedding_prompt_is_counted": ("manner", "llama.cpp's own names and headers of metrics"),
    "test_router.py::test_router_remote_preset": ("manner", "models that a router of its own would start"),
    "test_vision_api.py::test_models_supports_multimodal_capability": ("manner", "llama.cpp lists models a second time, in Ollama's form"),
    "test_vision_api.py::test_v1_models_supports_multimodal_capability": ("manner", "llama.cpp lists models a second time, in Ollama's form"),
}
OF_AN_ERROR = "the words of its own error"


def listed(kind):
    """The rule for the listed tests of this class. It explains no failure with an ignored field, and no failure whose
    last answer was an error, except if the test compares the text of an error."""
    def rule(failure):
        name = f"{PurePosixPath(file_of(failure.test)).name}::{function_of(failure.test)}"
        found, why = LISTED.get(name, (None, None))
        if found != kind or failure.ignored() or failure.ends_refused() and why != OF_AN_ERROR:
            return None
        return why

    return rule


# The classes, in the order in which they are tried. A rule returns a name for the cause, or None.
RULES = [("route", route_not_served), ("field", field_refused), ("text", text_of_a_model), ("text", listed("text")), ("manner", listed("manner"))]
UNEXPLAINED = "UNEXPLAINED"


def classify(failure):
    """The class of a failure and its name."""
    for name, rule in RULES:
        if found := rule(failure):
            return name, found
    return UNEXPLAINED, cause(failure)


def cause(failure):
    """A description of a failure that no rule explains."""
    if failure.error == "Failed" and "Timeout" in failure.message:
        return "took too long"
    if refusals := failure.refusals():
        last = refusals[-1]
        return f"{last.route} answered {last.status}: {last.message[:160]}"
    if ignored := failure.ignored():
        return f"ignored without a word: {', '.join(ignored)}"
    if failure.error == "KeyError":
        return f"the answer has no {failure.message}"
    if absent := re.search(r"has no attribute ('\w+')", failure.message):
        return f"the answer has no {absent[1]}"
    if "DID NOT RAISE" in failure.message:
        return f"an answer where the test expects a refusal, {asked(failure)}"
    values = re.match(r"assert ('[^']{0,40}'|\S{1,40}) (==|!=|is|is not|in|not in|<|<=|>|>=) ('[^']{0,40}'|\S{1,40})(?:\n|$)", failure.message)
    compared = f", comparing {values[1]} with {values[3]}" if values else ""
    return f"{failure.error}{looked_at(failure)}{compared}, {asked(failure)}"


def looked_at(failure):
    """The field of the answer that the failed line reads, if the line shows it."""
    keys = re.findall(r"\[['\"](\w+)['\"]\]", failure.statement) or re.findall(r"\.([a-z_]+)\b(?!\()", failure.statement)
    return f" about {'.'.join(keys[:4])}" if keys else ""


def asked(failure):
    routes = [f"{exchange['method']} {exchange['path']}" for exchange in failure.exchanges]
    return f"asked {routes[-1]}" if routes else "asked nothing"


# --- the report -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """The results of a suite in one mode."""

    passed: list
    failed: list  # (test, class, name)
    not_run: list  # (test or file, reason)


def judge(entries):
    run = Run([], [], [])
    collected = [test for entry in entries for test in entry.get("collected", [])]
    seen = set()
    for entry in entries:
        if "module" in entry:
            run.not_run.append((entry["module"], entry["reason"]))
        if "test" not in entry:
            continue
        seen.add(entry["test"])
        failure = Failure(*(entry[name] for name in ("test", "error", "message", "statement", "exchanges")))
        if entry["outcome"] == "failed":
            run.failed.append((entry["test"], *classify(failure)))
        elif entry["outcome"] == "not run":
            run.not_run.append((entry["test"], entry["reason"]))
        elif route_not_served(failure) and all(exchange["status"] >= 400 for exchange in entry["exchanges"]):
            run.not_run.append((entry["test"], "it is content with any error, and its route is not served"))
        else:
            run.passed.append(entry["test"])
    run.not_run += [(test, "the suite's time was over") for test in collected if test not in seen]
    return run


def file_of(test):
    return test.split("::")[0]


def plain(text, width=200):
    """The text as a cell of a Markdown table."""
    text = re.sub(r"\s+", " ", text).strip()
    text = text if len(text) <= width else text[: width - 1] + "…"
    return re.sub(r"([|<>*_`\\])", r"\\\1", text)


CLASSES = list(dict.fromkeys(name for name, _ in RULES)) + [UNEXPLAINED]


def document(runs, facts):
    """docs/conformance.md of {suite: {mode: Run}}."""
    lines = [
        "# Conformance",
        "",
        "Results of the tests of llama.cpp's and vLLM's servers with this server. `make conformance` runs them and writes this",
        "page (`tools/conformance.py`). The tests come from source distributions. Nothing of them is built or copied into this",
        "repository. `tools/lemonade_tests.py` writes the [last section](#lemonades-tests-of-ollamas-api).",
        "",
        *[f"- {fact}" for fact in facts],
        "",
        "*As is*, a request reaches the server as the test sends it. *Relaxed*, a proxy replaces the model's name, and adds",
        "`/v1` to a route that is served only there.",
        "",
        "| suite | mode | passed | " + " | ".join(CLASSES) + " | not run |",
        "|---" * (4 + len(CLASSES)) + "|",
    ]
    for suite, modes in runs.items():
        for mode, run in modes.items():
            classes = Counter(found for _, found, _ in run.failed)
            lines.append(f"| {suite.title} | {mode} | {len(run.passed)} | " + " | ".join(str(classes[c]) for c in CLASSES) + f" | {len(run.not_run)} |")
    lines += [
        "",
        "Every failure has a class:",
        "",
        "| class | what it means | what to do |",
        "|---|---|---|",
        "| `route` | the test asks for a route that this server does not serve | use the route that the error names |",
        "| `field` | the server refuses a field or a value by name | see [the fields](api.md#fields-of-other-servers) |",
        "| `text` | the test expects the words, the name or the token counts of its own model | nothing |",
        "| `manner` | the test requires behaviour that is specific to its own server; `LISTED` in `tools/conformance.py` has the reasons | nothing |",
        f"| `{UNEXPLAINED}` | none of these | fix it, or add a rule to `tools/conformance.py` |",
        "",
        "A test that is not run never counts as passed.",
    ]
    for suite, modes in runs.items():
        lines += ["", *of_suite(suite, modes["relaxed"])]
    return "\n".join(lines) + "\n"


# Reasons why tests are not run, which the page counts together.
NOT_RUN = {
    "needs a server that was started with": "need a server that was started with an option of its own project",
    r"\.\w+ is not installed": "call a package that a stand-in replaces",
    "it failed before it asked the server anything": "ask the server nothing",
}


def of_suite(suite, run):
    lines = [f"## {suite.title}, relaxed", "", "| class | tests | what, and how many tests if several |", "|---|---|---|"]
    for wanted in reversed(CLASSES):
        failed = [(test, name) for test, found, name in run.failed if found == wanted]
        if wanted == UNEXPLAINED:  # it has to be found in the suite
            failed = [(test, f"{file_of(test)}::{function_of(test)}: {name}") for test, name in failed]
        if wanted == "field":  # the field alone, without the words of the error
            failed = [(test, name.split(": ")[0]) for test, name in failed]
        lines += of_class(f"`{wanted}`", [name for _, name in failed])
    reasons = [next((plural for pattern, plural in NOT_RUN.items() if re.search(pattern, reason)), reason) for _, reason in run.not_run]
    return lines + of_class("not run", reasons)


def of_class(title, causes):
    """The row of a class, with each cause once. No row without causes."""
    each = [plain(cause) + (f" ({count})" if count > 1 else "") for cause, count in Counter(causes).most_common()]
    return [f"| {title} | {len(causes)} | {'; '.join(each)} |"] if causes else []


def function_of(test):
    """A test's name in its file, without parameters: the suite wrote them, and they contain whole prompts."""
    return test.split("[")[0].removeprefix(file_of(test)).removeprefix("::")


# --- the run --------------------------------------------------------------------------------------------


def interpreter():
    """A Python with the pinned packages, in a separate environment."""
    spec = util.spec_from_file_location("runner", ROOT / "tools/test.py")
    runner = util.module_from_spec(spec)
    sys.modules["runner"] = runner  # dataclasses look up their module
    spec.loader.exec_module(runner)
    python = runner.python_with(REQUIREMENTS, CACHE / "venv")
    if python is None:
        raise ConformanceError(f"the packages of {REQUIREMENTS.relative_to(ROOT)} could not be installed: is there a network?")
    return python


def started_server():
    """A server with the demo model on software Vulkan."""
    sys.path.insert(0, str(ROOT / "tests/clients"))
    from server import ENVIRONMENT, Server

    # The validation layers make a server slow, and have no effect on the API.
    ENVIRONMENT["UNICORN_HARDWARE_VALIDATION"] = "false"
    server = Server(CACHE / "server.log")
    server.wait()
    return server


def main(arguments):
    parser = argparse.ArgumentParser(description="Runs other servers' tests against `unicorn serve`.")
    parser.add_argument("--url", help="a server that is already running, such as http://127.0.0.1:8010")
    parser.add_argument("--suite", action="append", choices=[suite.name for suite in SUITES], help="run only this suite")
    parser.add_argument("--again", action="store_true", help="run no tests, and classify the failures of the last run again")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    parser.add_argument("--test-seconds", type=int, default=30)
    parser.add_argument("--suite-seconds", type=int, default=1800)
    asked = parser.parse_args(arguments)
    CACHE.mkdir(parents=True, exist_ok=True)
    suites = [suite for suite in SUITES if not asked.suite or suite.name in asked.suite]
    if not asked.again:
        run_all(suites, asked)

    runs = {suite: {mode: judge(read(report_of(suite, mode))) for mode in MODES} for suite in suites}
    asked.out.write_text(document(runs, json.loads(FACTS.read_text())) + lemonade_section(asked.out))
    bad = 0
    for suite, modes in runs.items():
        for mode, run in modes.items():
            unexplained = sum(found == UNEXPLAINED for _, found, _ in run.failed)
            bad += unexplained + (not run.passed)
            print(f"{suite.name}, {mode}: {len(run.passed)} passed, {len(run.failed)} failed ({unexplained} unexplained), {len(run.not_run)} not run")
    return 1 if bad else 0


def lemonade_section(page):
    """The section of Lemonade's tests in the page as it is, or nothing."""
    _, title, text = page.read_text().partition(LEMONADE) if page.exists() else ("", "", "")
    return f"\n{title}{text}" if title else ""


def run_all(suites, asked):
    """Runs the suites in both modes, and records facts about the run for the document."""
    python = interpreter()
    for suite in suites:
        fetch_suite(suite)
    server = None if asked.url else started_server()
    try:
        url = (asked.url or server.url).rstrip("/")
        for suite in suites:
            for mode in MODES:
                print(f"{suite.name}, {mode}", flush=True)
                run_suite(suite, python, url, mode, asked.test_seconds, asked.suite_seconds)
    finally:
        if server:
            server.stop()
    facts = [
        f"{datetime.date.today().isoformat()}, at revision {revision()}: "
        + ("a server that ran already" if asked.url else "`unicorn serve` with the demo model on software Vulkan"),
        *[f"{suite.title}: `{suite.package}` {suite.version}, SHA-256\n  `{suite.sha256}`" for suite in suites],
        f"at most {asked.test_seconds} s for each test, and {asked.suite_seconds} s for each suite",
    ]
    FACTS.write_text(json.dumps(facts))


def read(report):
    return [json.loads(line) for line in report.read_text().splitlines()]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ConformanceError, OSError) as error:
        sys.exit(f"conformance: {error}")
