"""`unicorn chat` as a user at a terminal sees it: on a pseudo-terminal, with the demo model."""

import fcntl
import os
import pty
import re
import select
import signal
import stat
import struct
import tempfile
import termios
import time
from pathlib import Path

from server import ANSWER_SECONDS, BINARY, ENVIRONMENT

UP, PASTE, END_OF_PASTE = "\x1b[A", "\x1b[200~", "\x1b[201~"
# The last line of an answer, which is dim.
STATISTICS = r"\x1b\[2m\d+ tokens? [^\n]*first after"


class Terminal:
    """A chat on a separate terminal. Its history is stored below `home`."""

    def __init__(self, home, *options, command=("chat", "--allow-software-vulkan", "--temperature", "0"), **environment):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            names = ("UNICORN_STATE_DIR", "XDG_STATE_HOME", "NO_COLOR")
            own = {name: value for name, value in ENVIRONMENT.items() if name not in names}
            own |= {"TERM": "xterm", "XDG_STATE_HOME": str(home), **environment}
            os.execve(BINARY, [str(BINARY), *command, *options], own)
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.seen = ""

    first = ("Ctrl-D leaves", "> ")

    def __enter__(self):
        try:
            return self.expect(*self.first)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.terminal)

    def type(self, text):
        self.seen = ""
        os.write(self.terminal, text.encode())
        return self

    def expect(self, *texts):
        """Reads until all of `texts` have arrived in this order since the last key."""
        return self.expect_match(".*".join(map(re.escape, texts)))

    def expect_match(self, pattern):
        """Reads until the text since the last key matches `pattern`."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not re.search(pattern, self.seen, re.DOTALL):
            ready, _, _ = select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not appear: {self.seen[-300:]!r}"
            try:
                more = os.read(self.terminal, 4096)
            except OSError:  # the other end of the terminal is closed
                more = b""
            assert more, f"the program ended before {pattern!r}: {self.seen[-300:]!r}"
            self.seen += more.decode(errors="replace")
        return self

    def end(self):
        """The exit status of a program that was told to exit."""
        deadline, more = time.monotonic() + ANSWER_SECONDS, b"some"
        while more:
            ready, _, _ = select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the program does not end"
            try:
                more = os.read(self.terminal, 4096)
            except OSError:  # the other end of the terminal is closed
                more = b""
        _, status = os.waitpid(self.pid, 0)
        self.pid = None
        return os.waitstatus_to_exitcode(status)


def ctrl_c_stops_only_the_answer(_):
    with tempfile.TemporaryDirectory() as home, Terminal(home) as chat:
        # An answer takes a fraction of a second. If the machine stalls at this moment, it may be complete before the
        # key arrives.
        for _ in range(5):
            chat.type("Tell me a story about a dragon.\r")
            # The line editor restores the terminal (that escape sequence) before the first word of the answer.
            chat.expect_match(r"\?2004l\s*\w")
            chat.type("\x03")
            chat.expect_match(r"(\(stopped\)|first after).*> ")
            if "(stopped)" in chat.seen:
                break
        assert "(stopped)" in chat.seen, chat.seen
        chat.type("/new\r").expect("(a new conversation)", "> ")
        chat.type("What is the capital of France?\r").expect("Paris", "first after", "> ")
        chat.type("\x03").expect("(Ctrl-D leaves)", "> ")
        chat.type("\x04")
        assert chat.end() == 0


def ctrl_c_ends_a_run_that_asks_whether_to_pull(server):
    with tempfile.TemporaryDirectory() as home:
        run = Terminal(home, command=("run", "org/missing", "--url", server.url))
        run.first = ("Pull it?",)
        with run:
            run.type("\x03")
            assert run.end() == -signal.SIGINT


def the_terminal_chat_obeys_its_commands(_):
    with tempfile.TemporaryDirectory() as home, Terminal(home) as chat:
        def say(text):
            return chat.type(text + "\r").expect_match(r"\?2004l.*> ")

        def answers():
            return len(re.findall(STATISTICS, chat.seen))

        help_text = say("/help").seen
        for word in ["/new", "/system", "/set NAME VALUE", "/show", "/bye", '"""']:
            assert word in help_text, word
        # Every line that begins with a slash is a command, as in `ollama run`.
        for line, word in [("/hlep", "/hlep"), ("/etc/passwd is what?", "/etc/passwd"), ("/", "/")]:
            said = say(line).seen
            assert f'unknown command "{word}"' in said and answers() == 0, said
        assert "expected a number from 0 to 2" in say("/set temperature 3").seen
        assert "expected one of temperature" in say("/set heat 3").seen
        assert "0.5" in say("/set temperature 0.5").seen and "(default)" in say("/set temperature default").seen
        say("/set parameter temperature 0"), say("/set seed 7")

        # The rate of so few tokens would be meaningless.
        say("/set max_tokens 2")
        chat.type("What is the capital of France?\r").expect_match(STATISTICS + ".*> ")
        assert "2 tokens" in chat.seen and "tokens/s" not in chat.seen and "cut at the token limit" in chat.seen, chat.seen
        say("/set max_tokens default"), say("/clear")
        chat.type("Tell me a story about a dragon.\r").expect_match(r"tokens/s[^\n]*first after.*> ")

        say("/system Be brief.")
        shown = say("/show").seen
        for part in [r"model +unicorn-demo", r"context +[1-9]\d* of \d+ tokens", r"temperature +0\r", r"seed +7\r", r"system +Be brief\."]:
            assert re.search(part, shown), (part, shown)
        say("/new")
        assert re.search(r"system +none", (say('/system ""'), say("/show"))[1].seen)

        # A message of several lines gets one answer, if it is quoted or pasted.
        chat.type('"""\rWhat is the capital of France?\r"""\r').expect_match("Paris.*" + STATISTICS + ".*> ")
        assert answers() == 1, chat.seen
        chat.type(f"{PASTE}Hello!\r\nWho are you?{END_OF_PASTE}\r").expect_match(STATISTICS + ".*> ")
        assert answers() == 1, chat.seen
        chat.type("/bye\r")
        assert chat.end() == 0
        history = (Path(home) / "unicorn/chat_history").read_text()
        assert "\nHello!\\nWho are you?\n" in history, history


def the_history_is_stored_for_its_owner_only(_):
    with tempfile.TemporaryDirectory() as home:
        kept = Path(home) / "unicorn/chat_history"
        with Terminal(home) as chat:
            chat.type("/set seed 11\r").expect("11", "> ")
            chat.type("What is the capital of Spain?\r").expect("Madrid", "first after", "> ")
            chat.type("/bye\r")
            assert chat.end() == 0
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
        before = kept.read_text()
        assert "capital of Spain" in before and "Madrid" not in before, before

        # The next run finds the history. NO_COLOR disables colours.
        with Terminal(home, NO_COLOR="1") as chat:
            chat.type(UP).expect("What is the capital of Spain?")
            chat.type("\r").expect("Madrid", "first after", "> ")
            assert "\x1b[2m" not in chat.seen, chat.seen
        with Terminal(home, "--no-history") as chat:
            chat.type("What color is the sky?\r").expect("blue", "first after", "> ")
        assert "sky" not in kept.read_text()

        # A file of another type in the place of the history is not changed.
        kept.unlink()
        os.mkfifo(kept)
        with Terminal(home) as chat:
            chat.type("What color is the sky?\r").expect("blue", "first after", "> ")
            chat.type("\x04")
            assert chat.end() == 0
        assert stat.S_ISFIFO(kept.stat().st_mode)


TESTS = [ctrl_c_stops_only_the_answer, ctrl_c_ends_a_run_that_asks_whether_to_pull, the_terminal_chat_obeys_its_commands, the_history_is_stored_for_its_owner_only]
