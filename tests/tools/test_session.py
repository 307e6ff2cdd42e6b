"""tests/clients/session.py: a client's session that does not reach its end is a failure, whatever it printed before."""

import contextlib
import io
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients"))
from session import Report


class Relay(unittest.TestCase):
    def counts(self, script):
        report = Report("clients")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            report.relay("x", [sys.executable, "-c", script])
            report.end()
        return report.passed, report.failed, said.getvalue()

    def test_the_counts_of_a_session_are_added(self):
        passed, failed, said = self.counts("print('ok a\\nFAILED b: why\\nx: 1 passed, 1 failed, 0 skipped'); exit(1)")
        self.assertEqual((passed, failed), (2, 1), said)  # including the session's own end
        self.assertTrue(said.endswith("\nclients: 2 passed, 1 failed, 0 skipped\n"), said)

    def test_silence_a_wrong_count_and_a_wrong_status_are_failures(self):
        for script in ["", "print('ok a')", "print('x: 0 passed, 0 failed, 0 skipped')", "print('ok a\\nx: 2 passed, 0 failed, 0 skipped')",
                       "print('ok a\\nx: 1 passed, 0 failed, 0 skipped'); exit(1)", "print('ok a\\ny: 1 passed, 0 failed, 0 skipped')",
                       "raise SystemError"]:
            _, failed, said = self.counts(script)
            self.assertEqual(failed, 1, said)


if __name__ == "__main__":
    unittest.main()
