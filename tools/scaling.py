#!/usr/bin/env python3
"""Runs the configurations of docs/scaling.md: two daemons behind HAProxy, and behind the LiteLLM proxy.

    tools/scaling.py haproxy            run by `make test`
    tools/scaling.py haproxy litellm    run by `make test-scaling`; $LITELLM_PROXY is the proxy's command

The files in config/scaling are used as shipped, with other addresses. The daemons serve the demo model on software
Vulkan. The binary is target/debug/unicorn, or $UNICORN_BINARY. Prints one line per test, lines with `measured:` for
benches/results/service.md, and at the end `scaling: N passed, N failed, N skipped`.
"""

import contextlib
import functools
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from edge_server import BINARY, ROOT, Server, children, free_port
from session import Report

CONFIG = ROOT / "config/scaling"
HAPROXY_CONFIG, LITELLM_CONFIG = CONFIG / "haproxy.cfg", CONFIG / "litellm.yaml"
API, DAEMONS = "127.0.0.1:8010", ["127.0.0.1:8011", "127.0.0.1:8012"]
# HAProxy's lines that send a conversation to the daemon that has its prefix, and their replacement for the comparison.
AFFINITY = "    balance hash var(txn.conversation)\n    hash-type consistent\n"
ROUND_ROBIN = "    balance roundrobin\n"
# Only root can switch to another user.
USER = "    user haproxy\n    group haproxy\n"
LITELLM_AFFINITY = "session_affinity, "

# Time limits of waits. None of them measures a speed.
START_SECONDS, ANSWER_SECONDS, END_SECONDS = 120, 120, 150
# With an odd number of users, round robin cannot send each user to one daemon by accident.
USERS, TURNS = 7, 4
# Prefixes are found in whole blocks (`kv.block_size`).
BLOCK_TOKENS = 16
BUFFER_BYTES = 128 * 1024
MODEL = "unicorn-demo"
# The LiteLLM proxy does not start without a key. The daemons and HAProxy ignore it.
KEY = f"sk-{secrets.token_hex(32)}"
SYSTEM = (
    "You are the assistant of a small company. You answer in one short sentence, in the language of the question, and say so where "
    "you do not know something. You never make up names, numbers or places, and you do not repeat the question."
)
QUESTIONS = ["What is the capital of France?", "What is 2 plus 3?", "Spell the word cat.", "What is the capital of Italy?"]
ANIMALS = ["dragon", "fox", "cat", "dog", "bird", "bear", "wolf", "horse", "mouse", "owl"]


# --- requests -------------------------------------------------------------------------------------------


class Request(threading.Thread):
    """A request and its result. A stream is read while it arrives. `whole` = whether the answer is complete,
    `served_by` = the daemon that answered, from the proxy's header."""

    def __init__(self, port, body, path="/v1/chat/completions", headers=None, method="POST"):
        super().__init__()
        self.port, self.path, self.method = port, path, method
        self.body = body
        own = {"content-type": "application/json", "connection": "close", "authorization": f"Bearer {KEY}"}
        self.sent_headers = {**own, **(headers or {})}
        self.status, self.headers, self.served_by = None, {}, None
        self.text, self.answer, self.pieces, self.whole, self.error = "", None, 0, False, ""

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request(self.method, self.path, None if self.body is None else json.dumps(self.body), self.sent_headers)
            response = connection.getresponse()
            self.headers = {name.lower(): value for name, value in response.getheaders()}
            self.served_by = self.headers.get("x-daemon") or self.headers.get("x-litellm-model-api-base")
            self.status = response.status
            if self.headers.get("content-type", "").startswith("text/event-stream"):
                self.read_stream(response)
            else:
                self.read_whole(response.read())
        except (OSError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def read_stream(self, response):
        last = ""
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            last = data or last
            if data == "[DONE]":
                self.whole = not self.error
            elif line.startswith(b"data: "):
                event = json.loads(data)
                if "error" in event:
                    self.error = json.dumps(event["error"])
                for choice in event.get("choices", []):
                    self.text += choice["delta"].get("content") or ""
                    self.pieces += 1
        if not (self.whole or self.error):
            self.error = f"the stream ended without [DONE], after {last[-150:]}"

    def read_whole(self, text):
        with contextlib.suppress(ValueError):
            self.answer = json.loads(text)
        self.whole = self.status == 200
        if self.whole and isinstance(self.answer, dict) and "choices" in self.answer:
            self.text = self.answer["choices"][0].get("message", {}).get("content", "")

    def __str__(self):
        return f"{self.path} by {self.served_by}: status {self.status}, {self.pieces} pieces, {self.error or self.answer}"[:300]


def ask(port, body, *arguments, **options):
    """Sends a request, which must be answered with 200."""
    request = Request(port, body, *arguments, **options)
    request.run()
    assert request.status == 200 and request.whole, str(request)
    return request


def chat(messages, **fields):
    return {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0} | fields


def user(text):
    return {"role": "user", "content": text}


def story(animal, **fields):
    """A stream that is long enough to be running while something happens."""
    return chat([user(f"Tell me a long story about a {animal}.")], **{"stream": True, "ignore_eos": True, "max_tokens": 250, **fields})


def in_parallel(requests):
    for request in requests:
        request.start()
    for request in requests:
        request.join(ANSWER_SECONDS)
        assert not request.is_alive(), f"still running after {ANSWER_SECONDS} s: {request}"
    return requests


def wait_for(condition, what, seconds=START_SECONDS):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


class Load:
    """Several clients that send short streamed chats, one after another, until the load is stopped."""

    CLIENTS, MOST = 3, 400

    def __init__(self, port):
        self.port, self.stopping, self.requests = port, threading.Event(), []
        self.clients = [threading.Thread(target=self.run, args=(client,)) for client in range(self.CLIENTS)]

    def run(self, client):
        for n in range(self.MOST):
            if self.stopping.is_set():
                return
            request = Request(self.port, chat([user(f"Chat {n} of client {client}: {QUESTIONS[n % 4]}")], stream=True))
            request.run()
            self.requests.append(request)

    def __enter__(self):
        for client in self.clients:
            client.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for client in self.clients:
            client.join()

    def answered(self, n):
        """Waits until `n` more requests have ended."""
        before = len(self.requests)
        wait_for(lambda: len(self.requests) >= before + n, f"{n} more requests of the load have ended")


# --- daemons and proxies --------------------------------------------------------------------------------


class Pair:
    """Two daemons on free ports. A daemon that has exited can be started again on its port. On a slow machine, a daemon
    may take long to finish its answers after SIGTERM."""

    OPTIONS = f"shutdown_grace_s = {ANSWER_SECONDS}\n"

    def __init__(self):
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        self.servers = [Server(self.OPTIONS) for _ in range(2)]
        with self.stack:
            for server in self.servers:
                self.stack.enter_context(server)
                assert server.process.poll() is None, server.logged()[-500:]
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def ports(self):
        return [server.port for server in self.servers]

    def start_again(self, n):
        self.servers[n] = self.stack.enter_context(Server(self.OPTIONS, port=self.servers[n].port))

    def prefix_tokens(self):
        """Tokens that were queried and found in the prefix caches."""
        return [sum(server.metric(f"unicorn_prefix_cache_{what}_total{{") for server in self.servers) for what in ("queries", "hits")]


class Proxy:
    """A proxy on a free port with one of the shipped files, in which the addresses and `changes` are replaced."""

    def __init__(self, file, ports, changes=()):
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="unicorn-scaling-"))
        self.file = self.folder / file.name
        addresses = [(daemon, f"127.0.0.1:{port}") for daemon, port in zip(DAEMONS, ports, strict=True)]
        self.file.write_text(replaced(file.read_text(), [*addresses, *self.own_changes(), *changes]))
        self.log = open(self.folder / "log", "wb")
        self.process = subprocess.Popen(
            self.command(), cwd=self.folder, env={**os.environ, **self.environment()}, stdin=subprocess.DEVNULL,
            stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
        )

    def own_changes(self):
        return []

    def environment(self):
        return {}

    def __enter__(self):
        try:
            wait_for(self.is_ready, "the proxy becomes ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # The proxy may have worker processes in the same session. All of them are stopped.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.folder)

    def is_ready(self):
        assert self.process.poll() is None, f"the proxy ended: {self.logged()[-600:]}"
        request = Request(self.port, None, self.READY, method="GET")
        request.run()
        return request.status == 200

    def logged(self):
        return (self.folder / "log").read_text(errors="replace")


class HAProxy(Proxy):
    READY = "/health"

    def own_changes(self):
        return [(f"bind {API}", f"bind 127.0.0.1:{self.port}"), (USER, "")]

    def command(self):
        # -db: in the foreground, without a master.
        return [haproxy_path(), "-db", "-f", str(self.file)]


def haproxy_path():
    """The path of HAProxy. None = it is not installed. Debian's users have no /usr/sbin in their PATH."""
    return shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")


class LiteLLM(Proxy):
    READY = "/health/liveliness"

    def command(self):
        return [os.environ["LITELLM_PROXY"], "--config", str(self.file), "--host", "127.0.0.1", "--port", str(self.port)]

    def environment(self):
        # The price table of the package is used, so nothing is fetched. The proxy treats 100 equal pieces of a stream
        # as an error, but the long stories of the demo model repeat themselves.
        return {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY, "REPEATED_STREAMING_CHUNK_LIMIT": "1000"}


def replaced(text, changes):
    """The text with each (old, new) replaced. Each old text must occur exactly once. Otherwise the file has changed,
    and this program must be adapted."""
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in the file, expected once"
        text = text.replace(old, new)
    return text


# --- the tests -------------------------------------------------------------------------------------


def conversations(port, salt, headers_of=lambda n: {}):
    """All users send several turns, alternating between users. Returns the answered requests of each user. `salt`
    separates the prefixes of two runs. The system prompt is the same for all."""
    talks = [[{"role": "system", "content": SYSTEM}] for _ in range(USERS)]
    asked = [[] for _ in range(USERS)]
    for turn in range(TURNS):
        for n, talk in enumerate(talks):
            talk.append(user(f"I am user {n}. {QUESTIONS[(n + turn) % len(QUESTIONS)]}"))
            request = ask(port, chat(list(talk), cache_salt=salt), headers=headers_of(n))
            talk.append({"role": "assistant", "content": request.text})
            asked[n].append(request)
    return asked


def used(request):
    """Tokens of the prompt, and how many of them were in the prefix cache."""
    usage = request.answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def hit_share(pair, port, salt, **options):
    """The conversations, and the share of their tokens that was found in the prefix caches, from the metrics of the
    daemons."""
    before = pair.prefix_tokens()
    asked = conversations(port, salt, **options)
    queries, hits = (after - earlier for after, earlier in zip(pair.prefix_tokens(), before, strict=True))
    told = [sum(tokens) for tokens in zip(*(used(request) for talk in asked for request in talk), strict=True)]
    assert [queries, hits] == told, f"/metrics says {queries} and {hits}, the answers' usage {told}"
    return asked, hits / queries


def affinity(pair, start, change, **options):
    """Each conversation must stay with one daemon, which has its prefix. Without affinity, fewer prefix tokens are
    found. `start` starts a proxy with changes to its file, and `change` removes the affinity."""
    with start() as proxy:
        asked, share = hit_share(pair, proxy.port, "with affinity", **options)
    daemons = [{request.served_by for request in talk} for talk in asked]
    assert all(len(names) == 1 for names in daemons), f"conversations of several daemons: {daemons}"
    assert len(set.union(*daemons)) == 2, f"one daemon has all conversations: {daemons}"
    for talk in asked:
        for before, now in zip(talk, talk[1:], strict=False):
            assert used(now)[1] >= used(before)[0] - BLOCK_TOKENS, f"{used(before)}, and then {used(now)}"
    with start([change]) as proxy:
        spread, lower = hit_share(pair, proxy.port, "without affinity", **options)
    assert [[r.text for r in talk] for talk in spread] == [[r.text for r in talk] for talk in asked], "answers differ"
    assert lower < share, f"{lower:.3f} without affinity, {share:.3f} with it"
    print(f"measured: {USERS} users, {TURNS} turns: {share:.1%} of prompt tokens found with affinity, {lower:.1%} without", flush=True)


def stories(port, **fields):
    """The requests for all stories, not yet started."""
    return [Request(port, story(animal, **fields)) for animal in ANIMALS]


def begun(streams, name):
    """Waits until all of these streams are running, and returns the streams of the daemon `name`."""
    for stream in streams:
        stream.start()
    wait_for(lambda: all(stream.pieces >= 3 or not stream.is_alive() for stream in streams), "all streams have begun")
    own = [stream for stream in streams if stream.served_by == name]
    assert 0 < len(own) < len(streams), f"{name} has {len(own)} of {len(streams)} streams"
    assert all(stream.is_alive() for stream in streams), [str(stream) for stream in streams if not stream.is_alive()]
    return own


def kill_under_load(pair, port, name_of):
    """kill -9 of one daemon. Only the answers that it had begun are lost. The other streams continue with the same
    text. The other daemon answers the requests that had not begun, and new ones. `name_of` returns the proxy's name of
    a daemon."""
    texts = [r.text for r in in_parallel(stories(port))]
    victim, name = pair.servers[0], name_of(0)
    with Load(port) as load:
        plain, streams = stories(port, stream=False), stories(port)
        for request in plain:
            request.start()
        own = begun(streams, name)
        running = sum(victim.metric(f"unicorn_num_requests_{state}{{") for state in ("running", "waiting"))
        assert running > len(own) + Load.CLIENTS, f"{name} has {running} requests, {len(own)} of them streams: all answers have begun"
        victim.process.kill()
        load.answered(30)
        for request in [*streams, *plain]:
            request.join(ANSWER_SECONDS)
    lost = [r for r in streams if not r.whole]
    assert lost == own, f"{len(own)} streams were on {name}; lost: {[str(r) for r in lost]}"
    for request, text in zip(streams, texts, strict=True):
        assert text.startswith(request.text) and (request in own or text == request.text), f"the text differs: {request}"
    assert [r.text for r in plain] == texts, [str(r) for r, text in zip(plain, texts, strict=True) if r.text != text]
    short = [r for r in load.requests if not r.whole]
    assert all(r.served_by == name and r.status == 200 for r in short), [str(r) for r in short]
    assert len(short) <= Load.CLIENTS, f"{len(short)} of {Load.CLIENTS} clients' chats were lost at one moment"
    print(
        f"measured: kill -9 under load: {len(lost) + len(short)} of {len(streams) + len(plain) + len(load.requests)} requests lost, "
        f"all of them answers that the killed daemon had begun; {len(plain)} answers that had not begun were complete", flush=True,
    )


def comes_back(pair, port, name_of):
    """A restarted daemon gets requests."""
    pair.servers[0].end(END_SECONDS, None)
    pair.start_again(0)

    def is_served():
        return any(ask(port, chat([user(f"Who answers? {n}")], max_tokens=1)).served_by == name_of(0) for n in range(8))

    wait_for(is_served, f"{name_of(0)} answers again")


def drain(pair, port, name_of):
    """SIGTERM of one daemon under load. It exits with status 0, and no request is lost."""
    texts = [r.text for r in in_parallel(stories(port))]
    with Load(port) as load:
        streams = stories(port)
        own = begun(streams, name_of(0))
        status = pair.servers[0].end(END_SECONDS)
        load.answered(15)
        for request in streams:
            request.join(ANSWER_SECONDS)
    assert status == 0, f"exit status {status}"
    requests = [*streams, *load.requests]
    assert all(r.whole for r in requests), [str(r) for r in requests if not r.whole]
    assert [r.text for r in streams] == texts, [str(r) for r, text in zip(streams, texts, strict=True) if r.text != text]
    print(f"measured: SIGTERM under load: 0 of {len(requests)} requests lost, {len(own)} streams were running on it", flush=True)


# --- HAProxy --------------------------------------------------------------------------------------------

# For each API: its path, and two requests of one conversation.
LONG = "x" * (2 * BUFFER_BYTES)
MORE = [{"role": "assistant", "content": "Fine."}, user("And now?")]


def pairs_of_turns(text):
    """For each API: its name, the path, and the bodies of the first and second turn of a conversation. `text` = the
    first text of the user."""
    system = [{"role": "system", "content": SYSTEM}]
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    items = [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
    one = {"model": MODEL, "max_tokens": 1}
    response = {"model": MODEL, "max_output_tokens": 16}
    key = {**response, "prompt_cache_key": text}
    chats, responses = "/v1/chat/completions", "/v1/responses"
    yield "chat", chats, {**one, "messages": [user(text)]}, {**one, "messages": [user(text), *MORE]}
    yield "system prompt", chats, {**one, "messages": [*system, user(text)]}, {**one, "messages": [*system, user(text), *MORE]}
    yield "parts", chats, {**one, "messages": parts}, {**one, "messages": [*parts, *MORE]}
    yield "system prompt and parts", chats, {**one, "messages": [*system, *parts]}, {**one, "messages": [*system, *parts, *MORE]}
    yield "large tail", chats, {"messages": [user(text)], **one, "user": LONG}, {"messages": [user(text), *MORE], **one, "user": LONG}
    yield "messages", "/v1/messages", {**one, "messages": [user(text)]}, {**one, "messages": [user(text), *MORE]}
    yield "responses", responses, {**response, "input": text}, {**response, "input": [user(text), *MORE]}
    yield "responses in parts", responses, {**response, "input": items}, {**response, "input": [*items, *MORE]}
    yield "cache key", responses, {**key, "input": text}, {**key, "input": "And now?"}
    yield "completions", "/v1/completions", {**one, "prompt": text.ljust(300)}, {**one, "prompt": text.ljust(300) + " And"}


def turns_meet(port):
    """Both turns of a conversation reach one daemon for each API, and the conversations use both daemons."""
    spread = {}
    for text in [f"Question {n}: how are you?" for n in range(8)]:
        for name, path, first, second in pairs_of_turns(text):
            met = ask(port, first, path)
            if name == "cache key":
                second = {**second, "previous_response_id": met.answer["id"]}
            again = ask(port, second, path)
            assert met.served_by == again.served_by, f"{name}: {met.served_by}, and then {again.served_by}"
            spread.setdefault(name, set()).add(met.served_by)
    assert all(len(daemons) == 2 for daemons in spread.values()), spread


def is_answered_without_a_conversation(port):
    """Requests that identify no conversation are sent to the daemons in turn: lists, and a body whose messages are
    after the part that the proxy reads."""
    hidden = {"user": LONG, "model": MODEL, "messages": [user("Hello")], "max_tokens": 1}
    for arguments, options in [((hidden,), {}), ((None, "/v1/models"), {"method": "GET"})]:
        daemons = {ask(port, *arguments, **options).served_by for _ in range(4)}
        assert len(daemons) == 2, daemons
    for path in ["/metrics", "/status"]:
        request = Request(port, None, path, method="GET")
        request.run()
        assert request.status == 404, str(request)


def an_unhealthy_daemon_gets_nothing_new(pair, proxy, name_of):
    """A stopped device makes /health 503. The conversations of this daemon move to the other one, and later return."""
    bodies = [chat([user(f"Conversation {n}")], max_tokens=1) for n in range(8)]
    before = [ask(proxy.port, body).served_by for body in bodies]
    assert set(before) == {name_of(0), name_of(1)}, before
    (device,) = children(pair.servers[0].process.pid)
    os.kill(device, signal.SIGSTOP)
    try:
        wait_for(lambda: f"Server daemons/{name_of(0)} is DOWN" in proxy.logged(), "HAProxy marks the daemon as down")
        assert {ask(proxy.port, body).served_by for body in bodies} == {name_of(1)}
    finally:
        os.kill(device, signal.SIGCONT)
    wait_for(lambda: [ask(proxy.port, body).served_by for body in bodies] == before, "all conversations have returned")


def no_daemon_is_left(pair, port):
    """Without a daemon, the proxy answers with an error in the format of the API, and its /health is 503."""
    for server in pair.servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
    health = Request(port, None, "/health", method="GET")
    request = Request(port, chat([user("Hello")]))

    def is_refused():
        health.run()
        return health.status == 503

    wait_for(is_refused, "/health of the proxy becomes 503")
    request.run()
    assert request.status == 503 and request.answer["error"]["code"] == "no_daemon" and request.headers["retry-after"] == "5", str(request)


def haproxy(report):
    name_of = ["daemon1", "daemon2"].__getitem__
    with Pair() as pair:
        start = functools.partial(HAProxy, HAPROXY_CONFIG, pair.ports())
        report.attempt("haproxy_affinity", lambda: affinity(pair, start, (AFFINITY, ROUND_ROBIN)))
        with start() as proxy:
            report.attempt("haproxy_turns_meet", lambda: turns_meet(proxy.port))
            report.attempt("haproxy_without_a_conversation", lambda: is_answered_without_a_conversation(proxy.port))
            report.attempt("haproxy_unhealthy", lambda: an_unhealthy_daemon_gets_nothing_new(pair, proxy, name_of))
            report.attempt("haproxy_kill_under_load", lambda: kill_under_load(pair, proxy.port, name_of))
            report.attempt("haproxy_comes_back", lambda: comes_back(pair, proxy.port, name_of))
            report.attempt("haproxy_drain", lambda: drain(pair, proxy.port, name_of))
            report.attempt("haproxy_no_daemon", lambda: no_daemon_is_left(pair, proxy.port))


# --- the LiteLLM proxy ----------------------------------------------------------------------------------


def litellm(report):
    def session(n):
        return {"x-litellm-session-id": f"session-{n}"}

    with Pair() as pair:
        name_of = [f"http://127.0.0.1:{port}/v1" for port in pair.ports()].__getitem__
        start = functools.partial(LiteLLM, LITELLM_CONFIG, pair.ports())
        report.attempt("litellm_affinity", lambda: affinity(pair, start, (LITELLM_AFFINITY, ""), headers_of=session))
        with start() as proxy:
            report.attempt("litellm_kill_under_load", lambda: kill_under_load(pair, proxy.port, name_of))
            report.attempt("litellm_comes_back", lambda: comes_back(pair, proxy.port, name_of))
            report.attempt("litellm_drain", lambda: drain(pair, proxy.port, name_of))


PROXIES = {"haproxy": haproxy, "litellm": litellm}


def main(names):
    if not names or not set(names) <= set(PROXIES):
        sys.exit(f"usage: tools/scaling.py {'|'.join(PROXIES)} ...")
    if not BINARY.exists():
        sys.exit(f"scaling: {BINARY} does not exist: cargo build")
    if "haproxy" in names and not haproxy_path():
        sys.exit("scaling: haproxy is not installed: python3 tools/setup.py test")
    report = Report("scaling")
    for name in names:
        PROXIES[name](report)
    return report.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
