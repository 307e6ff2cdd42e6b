"""Trains the demo model on dialogues generated on the fly. Run it again to resume an interrupted training.

    python train.py --work work --minutes 75            # about 25 million tokens on two cores
    python train.py --work work --minutes 15 --continue-decay --emphasis memory=2,off_topic=2

Progress is measured in training minutes, not steps, so that a busy machine gets a shorter run and not a longer one; the
checkpoint remembers the minutes spent. On a GPU pass --device cuda.
"""

import argparse
import os
import queue
import random
import threading
import time

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as F
from tokenizers import Tokenizer

from corpus import dialogue
from model import Config, Gemma3

# (share of the time, row lengths in turn). Short rows come first, since they teach the skills at the most rows per
# second. Long rows teach recall over long distances, and come last.
CURRICULUM = [(0.28, [256]), (0.20, [512, 256]), (0.20, [1024, 256]), (0.20, [2048, 512]), (0.12, [4096, 1024, 2048, 8192, 512])]
POLISH = [(0.6, [512, 1024, 4096, 512, 2048, 1024, 512, 4096]),
          (0.4, [512, 4096, 1024, 2048, 512, 4096, 8192, 1024])]
TOKENS_PER_STEP = 4096
WARM_UP_STEPS = 30
DECAY_SHARE = 0.45
LONGEST_STEP = 30.0  # seconds; a longer step was suspended, and its time must not count
AVERAGE = 0.998  # averages the weights over some 500 steps
ADAM_RATE = 3e-3  # for embeddings and norms
MUON_RATE = 0.02  # for matrices
# Weight of tokens in a JSON answer (a tool call, a title), which is a few tokens after hundreds that teach nothing.
JSON_WEIGHT = 3.0


class Rows:
    """A thread that generates, renders and tokenizes rows ahead of the optimiser."""

    def __init__(self, tokenizer, seed, emphasis, lengths_now):
        self.tokenizer, self.emphasis, self.lengths_now = tokenizer, emphasis, lengths_now
        self.rng = random.Random(seed)
        token = tokenizer.token_to_id
        self.start, self.end = token("<start_of_turn>"), token("<end_of_turn>")
        self.model = tokenizer.encode("model", add_special_tokens=False).ids[0]
        self.brackets = {token("{"), token("[")}
        self.ready = queue.Queue(4)
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        count = 0
        while True:
            lengths = self.lengths_now()
            length = lengths[count % len(lengths)]
            count += 1
            self.ready.put(self.batch(length, max(1, TOKENS_PER_STEP // length)))

    def batch(self, length, rows):
        ids = np.zeros((rows, length + 1), np.int64)
        weight = np.zeros((rows, length + 1), np.float32)
        for row in range(rows):
            # The generator's estimate is low, so this asks for a quarter more than fits, and cuts the rest.
            system, turns = dialogue.dialogue(self.rng, int(length * 1.25), self.emphasis)
            tokens = np.array(self.tokenizer.encode(dialogue.render(system, turns), add_special_tokens=False).ids[: length + 1])
            ids[row, : len(tokens)] = tokens
            weight[row, : len(tokens)] = self.answers(tokens)
        return length, torch.from_numpy(ids), torch.from_numpy(weight)

    def answers(self, tokens):
        """The weight of each token: 0 outside the model's turns, which end with <end_of_turn>."""
        weight = np.zeros(len(tokens), np.float32)
        ends = np.flatnonzero(tokens == self.end)
        for start in np.flatnonzero(tokens == self.start):
            first = start + 3  # <start_of_turn> model \n
            if first < len(tokens) and tokens[start + 1] == self.model:
                after = ends[ends > start]
                weight[first : (after[0] if len(after) else len(tokens) - 1) + 1] = JSON_WEIGHT if int(tokens[first]) in self.brackets else 1.0
        return weight


class Muon:
    """Momentum whose matrix updates are orthogonalised by Newton-Schulz iterations (Jordan et al., 2024)."""

    def __init__(self, matrices):
        self.groups = {}
        for matrix in matrices:
            self.groups.setdefault(tuple(matrix.shape), []).append(matrix)
        self.momentum = {shape: torch.zeros(len(group), *shape, device=group[0].device) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate, beta=0.95):
        for shape, group in self.groups.items():
            gradient = torch.stack([matrix.grad for matrix in group])
            momentum = self.momentum[shape].lerp_(gradient, 1 - beta)
            update = self.orthogonal(gradient.lerp(momentum, beta))
            for matrix, direction in zip(group, update):
                matrix.add_(direction, alpha=-rate * max(1, shape[0] / shape[1]) ** 0.5)

    @staticmethod
    def orthogonal(g):
        a, b, c = 3.4445, -4.7750, 2.0315
        tall = g.size(-2) > g.size(-1)
        x = g.mT if tall else g
        # bf16 is exact enough for a direction; in float32 this would take a third of the step.
        x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
        for _ in range(5):
            s = x @ x.mT
            x = a * x + (b * s + c * s @ s) @ x
        return (x.mT if tall else x).float()


def parse_emphasis(text):
    return {name: float(factor) for name, factor in (pair.split("=") for pair in text.split(",") if pair)}


def initial_weights(path):
    if path.endswith(".safetensors"):  # an export: the shipped model can be trained on without its checkpoint
        from safetensors.torch import load_file

        return {name.removeprefix("model."): tensor.float() for name, tensor in load_file(path).items()}
    return torch.load(path, map_location="cpu", weights_only=False)["model"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="folder with tokenizer.json; checkpoint.pt is written here")
    parser.add_argument("--minutes", type=float, required=True, help="training time in all, earlier runs of this checkpoint counted in")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--emphasis", default="", help="name=factor,...: shifts the mix towards a skill, 'memory', 'tools', 'title' or 'system'")
    parser.add_argument("--continue-decay", action="store_true", help="a further run on a finished checkpoint: long rows, a smaller rate, down to zero")
    parser.add_argument("--rate", type=float, default=0.4, help="first rate of --continue-decay as a share of the full one")
    parser.add_argument("--hold", type=float, default=0.0, help="share of the time for which --continue-decay keeps that rate before it falls")
    parser.add_argument("--init", help="start from the weights of this checkpoint.pt or exported model.safetensors")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch._dynamo.config.cache_size_limit = 64
    torch._dynamo.config.accumulated_cache_size_limit = 512
    tokenizer = Tokenizer.from_file(f"{args.work}/tokenizer.json")
    model = Gemma3(Config(vocab_size=tokenizer.get_vocab_size())).to(args.device)
    model.rotary = {kind: tuple(t.to(args.device) for t in table) for kind, table in model.rotary.items()}
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    muon = Muon(matrices)
    state, average = {"seconds": 0.0, "steps": 0, "tokens": 0}, None

    path = f"{args.work}/checkpoint.pt"
    if os.path.exists(path):
        saved = torch.load(path, map_location=args.device, weights_only=False)
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        muon.momentum = {shape: m.to(args.device) for shape, m in saved["muon"].items()}
        state = saved["state"]
        average = saved.get("average")
        print(f"resumed at {state}", flush=True)
    elif args.init:
        model.load_state_dict(initial_weights(args.init))

    # Weights averaged over the last steps answer better than those of any single step, above all while the rate is
    # high.
    parameters = dict(model.named_parameters())
    average = {name: (average or parameters)[name].detach().clone() for name in parameters}

    if args.continue_decay and state.get("polish_minutes") != args.minutes:  # a new round, not a resumed one
        state.update(polish_from=state["seconds"], polish_step=state["steps"], polish_minutes=args.minutes)
    began = state["polish_from"] if args.continue_decay else 0.0
    full = args.minutes * 60 - began
    progress = lambda: (state["seconds"] - began) / full
    curriculum = POLISH if args.continue_decay else CURRICULUM

    def lengths_now():
        reached = 0.0
        for share, lengths in curriculum:
            reached += share
            if progress() < reached:
                return lengths
        return curriculum[-1][1]

    def rate():
        if args.continue_decay:
            warm = min(1.0, (state["steps"] - state.get("polish_step", 0) + 1) / WARM_UP_STEPS)
            return args.rate * warm * min(1.0, (1 - progress()) / (1 - args.hold))
        return min(1.0, (state["steps"] + 1) / WARM_UP_STEPS) * min(1.0, (1 - progress()) / DECAY_SHARE)

    def save():
        torch.save({"model": model.state_dict(), "average": average, "config": model.config.as_dict(), "adam": adam.state_dict(), "muon": muon.momentum,
                    "state": state}, path + ".part")
        os.replace(path + ".part", path)

    rows = Rows(tokenizer, args.seed * 1000 + 5 + state["steps"], parse_emphasis(args.emphasis), lengths_now)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {args.minutes} minutes, torch {torch.__version__}", flush=True)

    compiled, losses, last_print, last_save, tokens_then = set(), [], time.time(), time.time(), state["tokens"]
    while progress() < 1:
        length, ids, weight = rows.ready.get()
        ids, weight = ids.to(args.device), weight.to(args.device)[:, 1:]
        wanted = weight > 0
        started = time.time()
        with torch.autocast(args.device, torch.bfloat16):
            hidden = model(ids[:, :-1].contiguous())
            logits = model.logits(hidden[wanted])  # only where there is a loss, since half of a row is the user's
        loss = F.cross_entropy(logits.float(), ids[:, 1:][wanted], reduction="none")
        loss = (loss * weight[wanted]).sum() / weight[wanted].sum()
        loss.backward()
        share = rate()
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * share
        adam.step()
        muon.step(MUON_RATE * share)
        torch._foreach_lerp_(list(average.values()), [p.detach() for p in parameters.values()], 1 - AVERAGE)
        model.zero_grad()
        if length in compiled:  # the first step of a length compiles, which does not count as training time
            state["seconds"] += min(time.time() - started, LONGEST_STEP)
        compiled.add(length)
        state["steps"] += 1
        state["tokens"] += ids.shape[0] * length
        losses.append(loss.item())
        if state["steps"] % 100 == 0:
            now = time.time()
            print(f"step {state['steps']} length {length} minute {state['seconds'] / 60:.1f} loss {np.mean(losses[-100:]):.4f} "
                  f"tokens {state['tokens'] / 1e6:.2f} M, {(state['tokens'] - tokens_then) / (now - last_print):.0f}/s", flush=True)
            last_print, tokens_then = now, state["tokens"]
        if time.time() - last_save > 120:
            save()
            last_save = time.time()
    save()
    print(f"done: {state}", flush=True)
    os._exit(0)  # the generator thread waits on a full queue


if __name__ == "__main__":
    main()
