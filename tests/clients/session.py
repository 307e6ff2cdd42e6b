"""What the sessions of clients with a server have found, a line per test: `ok NAME`, `FAILED NAME: WHY` or `SKIP REASON: NAME`."""

import json
from pathlib import Path

# The questions, tools and schema that every client asks with.
SCENARIO = json.loads((Path(__file__).parent / "scenario.json").read_text())


class Report:
    def __init__(self, name):
        self.name, self.passed, self.failed, self.skipped = name, 0, 0, 0

    def attempt(self, name, test):
        """Whether the test held. Any error is this test's failure, and the next one still runs."""
        try:
            test()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"FAILED {name}: {reason[:600]}", flush=True)
            self.failed += 1
            return False
        print(f"ok {name}", flush=True)
        self.passed += 1
        return True

    def attempt_all(self, tests, server):
        for test in tests:
            self.attempt(test.__name__, lambda test=test: test(server))

    def skip(self, reason, name):
        """`reason` stands in tests/skips.toml."""
        print(f"SKIP {reason}: {name}", flush=True)
        self.skipped += 1

    def end(self):
        """The exit status."""
        print(f"{self.name}: {self.passed} passed, {self.failed} failed, {self.skipped} skipped", flush=True)
        return 1 if self.failed else 0
