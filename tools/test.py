#!/usr/bin/env python3
"""Runs every test of the project and counts them; `make test` calls it after tools/setup.py.

The last line is `N passed, N failed, N skipped`. The exit status is 0 only if every part ran to its end and found
tests, nothing failed, and every skip is listed in tests/skips.toml. A part that is killed, crashes or prints no result
counts as a failure.

    tools/test.py            all parts
    tools/test.py NAME ...   only the named parts (for work on the project; the last line names them); `lm-eval`,
                             `openwebui`, `agents`, `all-devices`, `all-scaling` and `page-libraries` run only if they
                             are named
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import devices
import on_devices
from scaling import haproxy_path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "test"
SKIP_LOG = CACHE / "skips.log"
# lavapipe runs a dispatch in the submitting thread instead of its own threads: small models are twice as fast, and
# tests run in parallel anyway. `devices` uses lavapipe's threads.
LAVAPIPE = {"LP_NUM_THREADS": "0"}
# With LLVM 19, as in Debian 13, lavapipe's native vectors of 256 bits abort the process for a shader that emulates the
# matrix products of subgroups, which only tests use ("Cannot emit physreg copy instruction", on processors with AVX-512).
# From that release on, lavapipe uses vectors of 128 bits, outside of `devices`. With them, tests of models take a quarter
# longer (LLVM 15, AMD EPYC).
NARROW_VECTORS = {"LP_NATIVE_VECTOR_WIDTH": "128"}
NARROW_FROM_LLVM = 19
# If RUST_BACKTRACE is set, as many developers have it, each error of the grammar library collects a backtrace, also those
# that it handles: the tests of grammars take three times as long. Panics of tests still show their backtraces.
NO_BACKTRACES_OF_ERRORS = {"RUST_LIB_BACKTRACE": "0"}
VENV = ROOT / ".venv"
CLIENTS = ROOT / "tests/clients"
CLIENT_MODULES = ROOT / ".cache/clients/node"
LITELLM = ROOT / ".cache/clients/litellm"
LLAMA_INDEX = ROOT / ".cache/clients/llama-index"
OPENAI_1 = ROOT / ".cache/clients/openai-1"
LITELLM_PROXY = ROOT / ".cache/clients/litellm-proxy"
LM_EVAL = ROOT / ".cache/clients/lm-eval"
SCHEMATHESIS = ROOT / ".cache/clients/schemathesis"
PAGE = ROOT / "tests/page"
PAGE_LIBRARIES = ROOT / "tools/page_libraries"
PAGE_LIBRARIES_MODULES = ROOT / ".cache/page-libraries"
PAGE_MODULES = ROOT / ".cache/page"
BROWSER_ENVIRONMENT = {"NODE_PATH": str(PAGE_MODULES / "node_modules")}
AGENTS = ROOT / "tests/agents"
AGENT_MODULES = ROOT / ".cache/agents"
OPENWEBUI = ROOT / "tests/openwebui"
OPENWEBUI_VENV = ROOT / ".cache/openwebui"

# The server, what the tests start, and the suite. All parts build the same, so that none recompiles the dependencies
# with other features.
BUILD = ["cargo", "build", "--locked", "--bins", "--examples", "--test", "suite"]
# The unit tests need a second build of the crate. Without optimization it takes a quarter of the time.
UNIT_TESTS = {"CARGO_PROFILE_DEV_OPT_LEVEL": "0"}
PART_SECONDS = 50 * 60
# The number of slowest tests that are listed at the end.
SLOWEST = 20
# The number of panic lines that are repeated with the name of a failed test.
PANIC_LINES = 20
FETCH_SECONDS = 180
FETCH_DEVICES_SECONDS = 10 * 60
# Time limit for installing one client and its dependencies.
FETCH_CLIENT_SECONDS = 10 * 60
FETCH_MANY_SECONDS = 30 * 60


@dataclass
class Result:
    """The result of a part. `skipped` = (name in tests/skips.toml, the skipped test)."""

    passed: int = 0
    failures: list = field(default_factory=list)
    skipped: list = field(default_factory=list)
    # (seconds, name) of tests.
    took: list = field(default_factory=list)

    def tests(self):
        return self.passed + len(self.failures) + len(self.skipped)


def listed_skips():
    """Names in tests/skips.toml. Only the table headers are needed, and tomllib requires Python 3.11."""
    text = (ROOT / "tests/skips.toml").read_text()
    return set(re.findall(r"^\[([a-z0-9-]+)\]\s*$", text, re.MULTILINE))


# The commands that run now. An interrupted run kills them, because they have sessions of their own.
RUNNING = set()
# `lines` of a thread = where it collects its output, to be shown when its part ends. Without it, output is shown at once.
COLLECTED = threading.local()


def kill_running():
    for process in list(RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def show(text):
    lines = getattr(COLLECTED, "lines", None)
    if lines is None:
        print(text, end="", flush=True)
    else:
        lines.append(text)


def run(command, seconds=PART_SECONDS, env=None, arrived=None):
    """Runs a command, shows its output, and returns (exit status, output). Status None = the command was killed. `env` has
    further variables; those that are None are left out. `arrived` is a list that receives (time, line) of each line."""
    variables = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    killed = False

    def kill(*_):
        nonlocal killed
        killed = True
        with contextlib.suppress(ProcessLookupError):  # the process may just have exited
            os.killpg(process.pid, signal.SIGKILL)

    limit = threading.Timer(seconds, kill)
    limit.start()
    RUNNING.add(process)
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if arrived is not None:
                arrived.append((time.monotonic(), line))
            show(line)
        status = process.wait()
    except BaseException:
        kill()
        raise
    finally:
        limit.cancel()
        RUNNING.discard(process)
        process.stdout.close()
    return (None if killed else status), "".join(lines)


def one(name, command):
    """A part that is a single check: its exit status is the result."""
    status, _ = run(command)
    return Result(passed=1) if status == 0 else Result(failures=[f"{name}: {ended(status)}"])


def ended(status):
    return "did not finish in time" if status is None else f"exit status {status}"


# --- the parts ------------------------------------------------------------------------------------------


def tools():
    """Unit tests of the Python tools."""
    return unittest_result("tools", *run([sys.executable, "-m", "unittest", "discover", "-s", "tests/tools", "-t", "tests/tools"]))


def unittest_result(name, status, output):
    ran = re.search(r"^Ran (\d+) tests? in", output, re.MULTILINE)
    bad = re.findall(r"^(?:FAIL|ERROR): (.+)$", output, re.MULTILINE)
    if not ran or (status != 0 and not bad):
        return Result(failures=[f"{name}: {ended(status)}, no result"])
    if "skipped=" in output:
        bad.append("a test was skipped")
    return Result(passed=max(0, int(ran[1]) - len(bad)), failures=[f"{name}: {test}" for test in bad])


def rust():
    """Unit tests, the integration suite and the documentation's examples. Also builds the server for `clients`,
    `document`, `scaling`, `service` and `page`, and the examples for `npu`."""
    for script in ["fetch_real_tokenizer.sh", "fetch_smollm2.sh", "fetch_llama_cpp_files.sh"]:
        fetched, _ = run([str(ROOT / "tools" / script)], FETCH_SECONDS)
        if fetched not in (0, 3, 4, None):  # 3 and 4: the file is not available, so its tests are skipped
            return Result(failures=[f"rust: tools/{script}: {ended(fetched)}"])
    # A test analyzes kernels with the compiler of one of these devices, and is skipped without it.
    make_devices()
    SKIP_LOG.unlink(missing_ok=True)
    built, _ = run(BUILD)
    if built != 0:
        return Result(failures=[f"rust: the build failed ({ended(built)})"])
    # Many tests wait for a server, and leave a processor to others. With one test more than processors, two processors were
    # idle for an eighth of the time.
    threads = int(os.environ.get("RUST_TEST_THREADS") or os.cpu_count() + 2)
    env = {"UNICORN_SKIP_LOG": str(SKIP_LOG), "RUST_TEST_THREADS": str(threads), **LAVAPIPE}
    tests = ["cargo", "test", "--locked", "--no-fail-fast"]
    arrived = []
    ran = [
        run([*tests, "--lib"], env={**env, **UNIT_TESTS}),
        run([*tests, "--test", "suite"], env=env, arrived=arrived),
        run([*tests, "--doc"], env=env),
    ]
    log = SKIP_LOG.read_text().splitlines() if SKIP_LOG.exists() else []
    # The first status that is not 0; None = the command was killed.
    status = next((status for status, _ in ran if status != 0), 0)
    result = cargo_result(status, "".join(output for _, output in ran), [tuple(line.split("\t", 1)) for line in log])
    result.took = durations(arrived, threads)
    return result


def durations(arrived, threads):
    """(seconds, name) of each test of a binary, from the times at which its lines arrived: the test harness starts tests
    in the order of their names, and starts the next one when one ends."""
    began = next((at for at, line in arrived if re.match(r"running \d+ tests?$", line)), None)
    ended = [(at, found[1]) for at, line in arrived if (found := re.match(r"test (\S+)(?: - should panic)? \.\.\. (?:ok|FAILED)$", line))]
    waiting = sorted(name for _, name in ended)
    starts = dict.fromkeys(waiting[:threads], began)
    following = iter(waiting[threads:])
    took = []
    for at, name in ended:
        if name in starts:
            took.append((at - starts[name], name))
        if (after := next(following, None)) is not None:
            starts[after] = at
    return took


def cargo_result(status, output, skips):
    """Sums the results of all test binaries. cargo counts a skipped test as passed, because it returned early."""
    result = Result(skipped=skips)
    for passed, failed, ignored, filtered in re.findall(
        r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored; \d+ measured; (\d+) filtered out", output, re.MULTILINE
    ):
        result.passed += int(passed)
        if int(ignored) + int(filtered):
            result.failures.append(f"rust: {ignored} ignored and {filtered} filtered tests: neither is allowed")
        result.failures += [f"rust: {failed} failed in one binary, unnamed"] * (int(failed) > 0 and "... FAILED" not in output)
    result.passed -= len(skips)
    result.failures += [f"rust: {name}{said(name, output)}" for name in re.findall(r"^test (.+) \.\.\. FAILED$", output, re.MULTILINE)]
    began = len(re.findall(r"^running \d+ tests?$", output, re.MULTILINE))
    finished = len(re.findall(r"^test result: ", output, re.MULTILINE))
    if began != finished or finished == 0:
        still = still_running(output)
        names = f"; these tests still ran: {', '.join(still)}" if still else ""
        result.failures.append(f"rust: {began} test binaries began, {finished} finished ({ended(status)}){names}")
    if status != 0 and not result.failures:
        result.failures.append(f"rust: {ended(status)}")
    if result.passed <= 0:
        result.failures.append("rust: no test passed")
    return result


def still_running(output):
    """The long tests that never ended. The test harness names a test that has run for a minute."""
    ended = set(re.findall(r"^test (\S+)(?: - should panic)? \.\.\. ", output, re.MULTILINE))
    long = re.findall(r"^test (\S+) has been running for over", output, re.MULTILINE)
    return [name for name in dict.fromkeys(long) if name not in ended]


def said(name, output):
    """The first lines of the panic of a failed test, indented, for the end of a long log."""
    section = re.search(rf"^---- {re.escape(name)} stdout ----$(.*?)(?=^---- |^failures:$|\Z)", output, re.MULTILINE | re.DOTALL)
    panicked = re.search(r"^[^\n]*panicked at .*?(?=^stack backtrace:|^note: |\Z)", section[1], re.MULTILINE | re.DOTALL) if section else None
    lines = panicked[0].strip().splitlines() if panicked else []
    return "".join(f"\n    {line}" for line in lines[:PANIC_LINES])


def run_on_device(command, env):
    """As `run`, but leaves the width of lavapipe's vectors to the device."""
    return run(command, env={**dict.fromkeys(NARROW_VECTORS), **env})


def make_devices():
    """Makes `.cache/devices` if possible."""
    return run([sys.executable, str(ROOT / "tools/setup.py"), "devices"], FETCH_DEVICES_SECONDS)


def devices_cheap():
    """The cheap suites: kernels with guard pages after buffers, and matrix products of subgroups on Mesa 26."""
    make_devices()
    return of_devices(on_devices.rows(run_on_device, on_devices.CHEAP))


def devices_all():
    """Kernels and goldens on every device that replaces a GPU, as a table."""
    made, _ = make_devices()
    if made != 0:
        return Result(failures=[f"all-devices: the devices could not be made ({ended(made)})"])
    run(BUILD)
    try:
        return of_devices(on_devices.all_devices(run_on_device))
    except devices.DevicesError as error:
        return Result(failures=[f"all-devices: {error}"])


def of_devices(rows):
    result = Result()
    try:
        for device, cells in rows:
            if isinstance(cells, str):
                result.skipped.append(("test-devices", cells))
                continue
            for suite, cell in cells.items():
                show(f"{device.name}, {suite}: {cell.text()}\n")
                result.passed += cell.passed
                result.failures += [f"{device.name}: {failure}" for failure in cell.failures]
    except devices.DevicesError as error:
        result.failures.append(f"devices: {error}")
    return result


def demo():
    """Checks that no question of the demo model's test set is in its training text."""
    return one("demo", [sys.executable, "tools/demo_model/check_disjoint.py"])


def client_packages():
    """(interpreter, environment) of the clients' tests, whose packages are installed if possible."""
    python = python_with(CLIENTS / "requirements.txt", VENV) or sys.executable
    environment = {
        "LITELLM_PYTHON": python_with(CLIENTS / "requirements-litellm.txt", LITELLM) or "",
        "LLAMA_INDEX_PYTHON": python_with(CLIENTS / "requirements-llama-index.txt", LLAMA_INDEX) or "",
        "OPENAI_1_PYTHON": python_with(CLIENTS / "requirements-openai-1.txt", OPENAI_1) or "",
        "NODE_PATH": "",
    }
    lacks = node_lacks(CLIENTS, CLIENT_MODULES, "openai")
    if lacks:
        show(f"no client for Node.js: {lacks}\n")
    else:
        environment["NODE_PATH"] = str(CLIENT_MODULES / "node_modules")
    return python, environment


# The packages that a thread installs while `rust` compiles, because that mostly waits for the network: futures of (what
# the function returns, its output), by the function's name.
PREFETCHED = {}


def prefetch(work):
    def collected():
        COLLECTED.lines = []
        return work(), "".join(COLLECTED.lines)

    PREFETCHED[work.__name__] = ThreadPoolExecutor(1).submit(collected)


def fetched(work):
    """What `work` returns, now or when it was prefetched."""
    if work.__name__ not in PREFETCHED:
        return work()
    result, output = PREFETCHED.pop(work.__name__).result()
    show(output)
    return result


def clients():
    """Clients from the registries, and curl, with a real server. Tests whose packages are not available are skipped."""
    python, environment = fetched(client_packages)
    return counted("clients", *run([python, str(CLIENTS / "test_openai.py")], env=environment))


def document_packages():
    """The interpreter with schemathesis. None = its packages are not available."""
    return python_with(CLIENTS / "requirements-schemathesis.txt", SCHEMATHESIS)


def document():
    """A real server and its OpenAPI document, compared by schemathesis. Without its packages, the part is skipped."""
    python = fetched(document_packages)
    if not python:
        return Result(skipped=[("client-packages", "tests/clients/test_document.py")])
    return counted("document", *run([python, str(CLIENTS / "test_document.py")]))


def counted(name, status, output):
    """The result of a script that counts with tests/clients/session.py."""
    line = re.search(rf"^{name}: (\d+) passed, (\d+) failed, (\d+) skipped$", output, re.MULTILINE)
    if not line:
        return Result(failures=[f"{name}: no result ({ended(status)})"])
    result = Result(passed=int(line[1]))
    result.failures = [f"{name}: {failed}" for failed in re.findall(r"^FAILED (.+)$", output, re.MULTILINE)]
    result.skipped = re.findall(r"^SKIP (\S+): (.+)$", output, re.MULTILINE)
    if len(result.failures) != int(line[2]) or len(result.skipped) != int(line[3]) or (status != 0) != bool(result.failures):
        result.failures.append(f"{name}: the count and the report differ ({ended(status)})")
    return result


def lm_eval():
    """Checks that lm-eval on a real server agrees with `unicorn eval`."""
    python = python_with(CLIENTS / "requirements-lm-eval.txt", LM_EVAL, FETCH_MANY_SECONDS)
    if not python:
        return Result(failures=["lm-eval: its packages could not be fetched"])
    return counted("lm-eval", *run([python, str(CLIENTS / "test_lm_eval.py")]))


def scaling():
    """Two real servers behind HAProxy. One is killed and drained under load. Without HAProxy, the part is skipped."""
    if not haproxy_path():
        return Result(skipped=[("haproxy", "tools/scaling.py haproxy")])
    return counted("scaling", *run([sys.executable, str(ROOT / "tools/scaling.py"), "haproxy"]))


def all_scaling():
    """Two real servers behind HAProxy, and behind the LiteLLM proxy, whose packages take 750 MB."""
    python = python_with(CLIENTS / "requirements-litellm-proxy.txt", LITELLM_PROXY, FETCH_MANY_SECONDS)
    if not python:
        return Result(failures=["all-scaling: the packages of the LiteLLM proxy could not be fetched"])
    environment = {"LITELLM_PROXY": str(LITELLM_PROXY / "bin/litellm")}
    return counted("scaling", *run([sys.executable, str(ROOT / "tools/scaling.py"), "haproxy", "litellm"], env=environment))


def service():
    """A real server with the restrictions of its systemd unit, as far as the machine can apply them without systemd."""
    return counted("service", *run([sys.executable, str(ROOT / "tests/service/test_restricted.py")]))


def npu():
    """The shim and the real XRT over a simulated kernel driver. Without mount namespaces or Debian's XRT, the part is
    skipped."""
    return counted("npu", *run([sys.executable, str(ROOT / "tests/npu/real_xrt.py")]))


def page():
    """Tests the page of a real server in a browser, and compares the page's libraries with their packages. Tests for
    which Chromium, Node.js or a package is missing are skipped."""
    lacking_for_libraries, lacks = fetched(page_packages)
    result = page_libraries(lacking_for_libraries, "--check")
    if lacks:
        result.skipped.append(("browser", f"tests/page ({lacks})"))
        return result
    seen = browser_result("page", *run(["node", str(PAGE / "test_page.js")], env=BROWSER_ENVIRONMENT))
    return Result(result.passed + seen.passed, result.failures + seen.failures, result.skipped + seen.skipped)


def page_packages():
    """What is missing for the page's libraries, and for its tests ('' = nothing). Installs their packages if possible."""
    return page_libraries_lack(), page_lacks()


def page_libraries_lack():
    return node_lacks(PAGE_LIBRARIES, PAGE_LIBRARIES_MODULES, "esbuild")


def page_libraries(lacks, *arguments):
    """Builds the page's libraries from their packages, or checks them. `lacks` says what is missing ('' = nothing)."""
    if lacks:
        return Result(skipped=[("page-libraries", f"tools/page_libraries ({lacks})")])
    environment = {"NODE_PATH": str(PAGE_LIBRARIES_MODULES / "node_modules")}
    status, _ = run(["node", str(PAGE_LIBRARIES / "build.js"), *arguments], env=environment)
    return Result(passed=1) if status == 0 else Result(failures=[f"page libraries: {ended(status)}"])


def page_libraries_written():
    """Writes src/api/page/libraries again."""
    result = page_libraries(page_libraries_lack())
    return Result(failures=[what for _, what in result.skipped]) if result.skipped else result


def openwebui():
    """Open WebUI with a real server, used by a browser. Takes 2 GB of disk, and minutes."""
    lacks = page_lacks()
    if lacks:
        return Result(failures=[f"openwebui: {lacks}"])
    built, _ = run(BUILD)
    if built != 0:
        return Result(failures=[f"openwebui: the build failed ({ended(built)})"])
    program, lacks = openwebui_program()
    if lacks:
        return Result(failures=[f"openwebui: {lacks}"])
    command = ["node", str(OPENWEBUI / "test_openwebui.js")]
    return browser_result("openwebui", *run(command, env={**BROWSER_ENVIRONMENT, "OPEN_WEBUI": program}))


def agents():
    """Coding agents with a real server. Takes 700 MB of disk, and minutes."""
    lacks = node_lacks(AGENTS, AGENT_MODULES, "@openai/codex", FETCH_CLIENT_SECONDS)
    if lacks:
        return Result(failures=[f"agents: {lacks}"])
    # The package of Claude Code has its program in another package, from which this script copies it.
    packed = AGENT_MODULES / "node_modules/@anthropic-ai/claude-code"
    copied, _ = run(["node", str(packed / "install.cjs")])
    if copied != 0:
        return Result(failures=[f"agents: the program of Claude Code could not be copied ({ended(copied)})"])
    built, _ = run(BUILD)
    if built != 0:
        return Result(failures=[f"agents: the build failed ({ended(built)})"])
    environment = {"AGENTS": str(AGENT_MODULES / "node_modules/.bin")}
    return counted("agents", *run([sys.executable, str(AGENTS / "test_agents.py")], env=environment))


def browser_result(name, status, output):
    line = re.search(rf"^{name}: (\d+) passed, (\d+) failed$", output, re.MULTILINE)
    if not line:
        return Result(failures=[f"{name}: no result ({ended(status)})"])
    failures = [f"{name}: {test}" for test in re.findall(r"^FAILED (\w+): ", output, re.MULTILINE)]
    if len(failures) != int(line[2]) or (status != 0) != bool(failures):
        failures.append(f"{name}: the count and the report differ ({ended(status)})")
    return Result(passed=int(line[1]), failures=failures, skipped=re.findall(r"^SKIP (\S+): (.+)$", output, re.MULTILINE))


def openwebui_program():
    """The path of the pinned Open WebUI, and what is missing for it ('' = nothing)."""
    program, pip = OPENWEBUI_VENV / "bin/open-webui", [OPENWEBUI_VENV / "bin/python", "-m", "pip", "--disable-pip-version-check"]
    # The copy of the requirements is written after everything is installed.
    wanted, there = OPENWEBUI / "requirements.txt", OPENWEBUI_VENV / "requirements.txt"
    if program.exists() and there.exists() and there.read_bytes() == wanted.read_bytes():
        return str(program), ""
    pythons = [sys.executable, *filter(None, map(shutil.which, ["python3.12", "python3.11"]))]
    version = "import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])"
    python = next((p for p in pythons if subprocess.run([p, "-c", version], check=False).returncode == 0), None)
    if python is None:
        return "", "Open WebUI runs on Python 3.11 or 3.12, and neither is installed"
    shutil.rmtree(OPENWEBUI_VENV, ignore_errors=True)
    made, _ = run([python, "-m", "venv", str(OPENWEBUI_VENV)], FETCH_SECONDS)
    if made != 0:
        return "", f"no virtual environment ({ended(made)})"
    fetched, _ = run([*map(str, pip), "install", "--quiet", "--no-deps", "-r", str(wanted)], FETCH_MANY_SECONDS)
    if fetched != 0:
        return "", f"pip could not install tests/openwebui/requirements.txt ({ended(fetched)})"
    shutil.copy(wanted, there)
    return str(program), ""


def page_lacks():
    """What is missing to drive a browser ('' = nothing)."""
    return node_lacks(PAGE, PAGE_MODULES, "playwright-core") if shutil.which("chromium") else "no chromium"


def node_lacks(folder, modules, package, seconds=FETCH_SECONDS):
    """What is missing to run the scripts in `folder` with Node.js ('' = nothing). Installs the packages of the folder's
    lock file into `modules`."""
    for command in ["node", "npm"]:
        if not shutil.which(command):
            return f"no {command}"
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout
    major = re.match(r"v(\d+)\.", version)
    if not major or int(major[1]) < 18:
        return f"node {version.strip()}, but 18 is required"
    # A copy, because npm writes the modules next to the lock file.
    wanted, there = (place / "package-lock.json" for place in (folder, modules))
    installed = modules / "node_modules" / package / "package.json"
    if not (installed.exists() and there.exists() and there.read_bytes() == wanted.read_bytes()):
        shutil.rmtree(modules, ignore_errors=True)
        modules.mkdir(parents=True)
        for name in ["package.json", "package-lock.json"]:
            shutil.copy(folder / name, modules)
        status, _ = run(["npm", "ci", "--prefix", str(modules), "--ignore-scripts", "--no-audit", "--no-fund"], seconds)
        if status != 0:
            return f"npm could not fetch {package}"
    return ""


def python_with(requirements, venv, seconds=FETCH_CLIENT_SECONDS):
    """The interpreter of `venv` with the pinned packages. None = they are not available."""
    python = venv / "bin/python"
    wanted = pins(requirements.read_text())
    check = "import importlib.metadata as m, sys; sys.exit(any(m.version(n) != v for n, v in " + repr(wanted) + "))"

    def ready():
        return python.exists() and subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0

    if ready():
        return str(python)
    shutil.rmtree(venv, ignore_errors=True)
    made, _ = run([sys.executable, "-m", "venv", str(venv)], FETCH_SECONDS)
    if made == 0:
        run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)], seconds)
    return str(python) if ready() else None


def pins(requirements):
    """Packages and their versions: `a[extra]==1.2` is a at 1.2."""
    return re.findall(r"^([a-z0-9_-]+)(?:\[[a-z0-9,-]+\])?==(\S+)$", requirements, re.MULTILINE)


# `clients`, `document`, `scaling`, `service` and `page` start the server that `rust` built, and `npu` uses its examples.
PARTS = {
    "rust": rust, "clients": clients, "document": document, "demo": demo, "devices": devices_cheap, "page": page,
    "service": service, "npu": npu, "tools": tools, "scaling": scaling,
}
# Parts that run at the same time, because they mostly wait or use one processor, and `devices`, which uses the processors that
# they leave. The tests of a lane run one after the other. `scaling` runs alone: it compares what two daemons do under load.
LANES = [["clients"], ["page"], ["document", "devices", "demo", "service", "npu", "tools"]]
# These parts take too long for every run, and the last one writes files.
NAMED_ONLY = {
    "lm-eval": lm_eval, "openwebui": openwebui, "agents": agents, "all-devices": devices_all, "all-scaling": all_scaling,
    "page-libraries": page_libraries_written,
}


def timed(name, part):
    """(result, seconds) of a part. Its output begins with its name."""
    show(f"\n== {name}: {(part.__doc__ or name).splitlines()[0]}\n")
    began = time.monotonic()
    result = part()
    if result.tests() == 0:
        result.failures.append(f"{name}: no test ran")
    return result, time.monotonic() - began


def in_lanes(lanes, parts):
    """Runs the parts of each lane in a thread of its own. Yields (name, result, seconds) of each part when all have ended."""

    def one_after_the_other(lane):
        ran = []
        for name in lane:
            COLLECTED.lines = []
            result, seconds = timed(name, parts[name])
            ran.append((name, result, seconds, "".join(COLLECTED.lines)))
        return ran

    with ThreadPoolExecutor(len(lanes)) as threads:
        try:
            all_ran = list(threads.map(one_after_the_other, lanes))
        except KeyboardInterrupt:
            kill_running()
            raise
    for name, result, seconds, output in (part for ran in all_ran for part in ran):
        print(output, end="", flush=True)
        yield name, result, seconds


def each_result(names, parts):
    """Runs the parts. Yields (name, result, seconds) of each."""
    waiting = list(names)
    while waiting:
        lanes = [[name for name in lane if name in waiting] for lane in LANES]
        together = [name for lane in lanes for name in lane]
        if waiting[0] in together:
            yield from in_lanes([lane for lane in lanes if lane], parts)
            waiting = [name for name in waiting if name not in together]
        else:
            name = waiting.pop(0)
            yield name, *timed(name, parts[name])


def main(names):
    parts = {**PARTS, **NAMED_ONLY}
    unknown = [name for name in names if name not in parts]
    if unknown:
        sys.exit(f"test: unknown part {unknown[0]!r}; the parts are {', '.join(parts)}")
    llvm = devices.llvm_release(devices.LAVAPIPE)
    is_narrow = llvm is None or llvm >= NARROW_FROM_LLVM
    defaults = {"MESA_SHADER_CACHE_DIR": str(ROOT / ".cache/mesa"), **NO_BACKTRACES_OF_ERRORS, **(NARROW_VECTORS if is_narrow else {})}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if os.environ.get("CI") == "true" or not sys.stdout.isatty():
        os.environ.update(CARGO_TERM_PROGRESS_WHEN="never", CARGO_TERM_COLOR="never")
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "summary.txt").unlink(missing_ok=True)
    Path(os.environ["MESA_SHADER_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)

    chosen = names or PARTS
    for name, packages in {"clients": client_packages, "document": document_packages, "page": page_packages}.items():
        if "rust" in chosen and name in chosen:
            prefetch(packages)
    total, seconds = Result(), {}
    for name, result, spent in each_result(chosen, parts):
        seconds[name] = spent
        total.passed += result.passed
        total.failures += result.failures
        total.skipped += result.skipped
        total.took += result.took

    allowed = listed_skips()
    total.failures += [f"skip {name!r} ({what}) is not listed in tests/skips.toml" for name, what in total.skipped if name not in allowed]

    print("\n== time: " + ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items()))
    slowest = sorted(total.took, reverse=True)[:SLOWEST]
    print("== slowest: " + ", ".join(f"{name} {spent:.0f} s" for spent, name in slowest))
    for name, what in total.skipped:
        print(f"SKIPPED {name}: {what}")
    for failure in total.failures:
        print(f"FAILED {failure}")
    if names:
        print(f"(only {', '.join(names)})")
    summary = f"{total.passed} passed, {len(total.failures)} failed, {len(total.skipped)} skipped"
    (CACHE / "summary.txt").write_text(summary + "\n")
    print(summary, flush=True)
    return 1 if total.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        kill_running()
        raise
