#!/usr/bin/env python3
"""lm-eval's `local-completions` and `local-chat-completions` with a real `unicorn serve`, on tasks made here, without a
network.

The results are compared with those of `unicorn eval` for the same tokens, which uses no server. tools/test.py starts it
(`make test-lm-eval`) with an interpreter that has lm_eval. Prints one line per test and at the end `lm-eval: N passed,
N failed, N skipped`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from safetensors.numpy import load_file
from server import ENVIRONMENT, BINARY, ROOT, Server, last_line, model_id
from session import Report
from transformers import AutoTokenizer

MODEL = ROOT / "models/demo"
LOG = ROOT / ".cache/test/lm-eval-server.log"
RUN_SECONDS = 900
# Keys and values are f32 on both sides. Only the order of sums differs.
TOLERANCE = 1e-3

CAPITALS = [
    {"country": "France", "choices": ["Paris", "Rome", "Madrid", "Tokyo"], "answer": 0},
    {"country": "Italy", "choices": ["Oslo", "Rome", "Paris", "Madrid"], "answer": 1},
    {"country": "Japan", "choices": ["Rome", "Berlin", "Madrid", "Tokyo"], "answer": 3},
    {"country": "Spain", "choices": ["Paris", "Tokyo", "Madrid", "Rome"], "answer": 2},
]
QUESTION = "What is the capital of {{country}}?"
TURN = f"<start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n"
ANSWER = "The capital of {{country}} is {{choices[answer]}}."
UNTIL = {"until": ["<end_of_turn>", "\n"], "do_sample": False, "max_gen_toks": 32}
TASKS = {
    "chooses": {"output_type": "multiple_choice", "doc_to_text": TURN + "The capital of {{country}} is", "doc_to_choice": "choices",
                "doc_to_target": "answer", "metric_list": [{"metric": "acc"}]},
    "says": {"output_type": "generate_until", "doc_to_text": TURN, "doc_to_target": ANSWER, "generation_kwargs": UNTIL,
             "metric_list": [{"metric": "exact_match"}]},
    "chats": {"output_type": "generate_until", "doc_to_text": QUESTION, "doc_to_target": ANSWER, "generation_kwargs": UNTIL,
              "metric_list": [{"metric": "exact_match"}]},
    "rolls": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": ANSWER, "metric_list": [{"metric": "byte_perplexity"}]},
}


class Harness:
    """lm-eval's command in a separate folder, with `server`."""

    def __init__(self, folder, server):
        self.folder, self.server, self.model = Path(folder), server, model_id(server)
        self.runs = 0
        self.text = AutoTokenizer.from_pretrained(MODEL)
        data = self.folder / "capitals.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in CAPITALS))
        for name, task in TASKS.items():
            source = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
            (self.folder / f"{name}.yaml").write_text(json.dumps({**source, **task}))  # JSON is YAML

    def run(self, kind, route, tasks, *options, **arguments):
        """Metrics by task, and samples by task."""
        given = {"model": self.model, "base_url": self.server.url + route, "max_length": 8192, **arguments}
        self.runs += 1
        out = self.folder / f"out-{self.runs}"
        command = [
            sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", ",".join(f"{name}={value}" for name, value in given.items()),
            "--include_path", self.folder, "--tasks", ",".join(tasks), "--output_path", out, "--log_samples", *options,
        ]
        # An empty HF_HOME: only the files of this test are found.
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(self.folder / "hf"), "OPENAI_API_KEY": "unused"}
        done = subprocess.run(command, env={**os.environ, **offline}, cwd=self.folder, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
        assert done.returncode == 0, last_line(done.stderr)
        (results,) = out.glob("*/results_*.json")
        metrics = json.loads(results.read_text())["results"]
        samples = {}
        for task in tasks:
            (file,) = out.glob(f"*/samples_{task}_*.jsonl")
            samples[task] = [json.loads(line) for line in file.read_text().splitlines()]
            assert len(samples[task]) == len(CAPITALS), file
        return metrics, samples

    def completions(self, tasks, *options, **arguments):
        return self.run("local-completions", "/v1/completions", tasks, *options, tokenizer=MODEL, **arguments)


def unicorn(*arguments):
    command = [BINARY, "eval", *map(str, arguments), "--allow-software-vulkan"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == 0, last_line(done.stderr)
    return done.stdout


def log_likelihood(ids, at, folder):
    """The log likelihood of the ids from `at` on, and whether each is the most likely one."""
    file = folder / "logits.safetensors"
    unicorn("logits", MODEL, "--tokens", ",".join(map(str, ids)), "--output", file)
    logits = load_file(file)["logits"].astype(numpy.float64)[at - 1 : -1]
    most = logits.max(axis=1)
    sums = numpy.log(numpy.exp(logits - most[:, None]).sum(axis=1)) + most
    drawn = logits[numpy.arange(len(ids) - at), ids[at:]]
    return (drawn - sums).sum(), bool((drawn == most).all())


def lm_eval_chooses_the_right_answers(harness):
    # Gemma's texts begin with a token that its tokenizer adds only on request.
    metrics, samples = harness.completions(["chooses", "says"], "--batch_size", "8", add_bos_token=True)
    assert metrics["chooses"]["acc,none"] == metrics["says"]["exact_match,none"] == 1, metrics
    found, differences = 0, []
    for sample in samples["chooses"]:
        for given, ((said, greedy),) in zip(sample["arguments"].values(), sample["resps"]):
            context, whole = (harness.text(text).input_ids for text in (given["arg_0"], given["arg_0"] + given["arg_1"]))
            expected, likeliest = log_likelihood(whole, len(context), harness.folder)
            assert whole[: len(context)] == context and whole[0] == harness.text.bos_token_id, whole
            assert (greedy == "True") == likeliest, (given, said, expected)
            differences.append(abs(float(said) - expected))
            found += 1
    print(f"{found} choices: log likelihoods differ from those of `unicorn eval logits` by {max(differences):.1e} at most", flush=True)
    assert found == 16 and max(differences) < TOLERANCE, differences


def concurrent_requests_give_the_same_answers(harness):
    alone = harness.completions(["chooses"], add_bos_token=True)[1]["chooses"]
    many = harness.completions(["chooses"], "--batch_size", "2", add_bos_token=True, num_concurrent=4)[1]["chooses"]
    for one, other in zip(alone, many):
        pairs = [(float(a), float(b)) for ((a, _),), ((b, _),) in zip(one["resps"], other["resps"])]
        assert all(abs(a - b) < TOLERANCE for a, b in pairs), pairs


def lm_eval_scores_whole_texts(harness):
    _, samples = harness.completions(["rolls"])
    for sample in samples["rolls"]:
        file = harness.folder / "text.txt"
        file.write_text(sample["target"])
        mean, tokens = re.search(r"nll (\S+) per token, (\d+) tokens", unicorn("perplexity", MODEL, "--text", file)).groups()
        (said,) = sample["resps"][0]
        # The mean has five decimal places.
        assert abs(float(said) + float(mean) * int(tokens)) < int(tokens) * 1e-5 + TOLERANCE, (sample["target"], said, mean, tokens)


def lm_eval_chats(harness):
    metrics, _ = harness.run("local-chat-completions", "/v1/chat/completions", ["chats"], "--apply_chat_template")
    assert metrics["chats"]["exact_match,none"] == 1, metrics


TESTS = [lm_eval_chooses_the_right_answers, concurrent_requests_give_the_same_answers, lm_eval_scores_whole_texts, lm_eval_chats]


def main():
    report = Report("lm-eval")
    server = Server(LOG, "--kv", "f32")
    try:
        if report.attempt("the_server_starts", server.wait):
            with tempfile.TemporaryDirectory() as folder:
                report.attempt_all(TESTS, Harness(folder, server))
    finally:
        server.stop()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
