"""Trains the demo model's tokenizer on the generated corpus: the structure of Gemma-3's, with 2048 pieces.

    python train_tokenizer.py --output work/tokenizer.json
"""

import argparse
import json
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from corpus import dialogue

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]  # ids 0..6; Gemma's first four are the same
BYTES = [f"<0x{b:02X}>" for b in range(256)]
VOCAB_SIZE = 2048
SAMPLE_DIALOGUES = 3000


def corpus_texts(seed):
    rng = random.Random(seed)
    for number in range(SAMPLE_DIALOGUES):
        text = dialogue.render(*dialogue.dialogue(rng, 1500 if number % 8 == 0 else 600))
        for token in SPECIAL:
            text = text.replace(token, "")
        yield text


def learn_pieces(seed):
    """Merges never cross a word, and digits and punctuation stay alone, so that sums, spelling and JSON are learnt by
    character. The split is used only here. Gemma's tokenizer has none at inference, and needs none: a merge that was
    never learnt across words cannot happen across words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Digits(True),
        pre_tokenizers.Split(Regex(r"[^\p{L}▁\d]"), "isolated")])
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - len(SPECIAL) - len(BYTES), min_frequency=3, show_progress=False,
                                  initial_alphabet=[chr(c) for c in range(33, 127)] + ["▁", "\n"])
    tokenizer.train_from_iterator(corpus_texts(seed), trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    return sorted(learnt["vocab"], key=learnt["vocab"].get), [tuple(m) for m in learnt["merges"]]


def build(pieces, merges):
    vocab = {}
    for piece in SPECIAL + BYTES + pieces:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    bos = ("<bos>", vocab["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[bos])
    return tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    tokenizer = build(*learn_pieces(args.seed))
    for text in ("user", "model", "\n"):  # the loss mask and the template rely on these
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 1, text
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(args.output)
    sample = dialogue.render(*dialogue.dialogue(random.Random(1), 2000))
    print(f"{args.output}: {VOCAB_SIZE} pieces, {len(sample) / len(tokenizer.encode(sample, add_special_tokens=False).ids):.2f} characters per token")


if __name__ == "__main__":
    main()
