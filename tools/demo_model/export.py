"""Writes a trained checkpoint as a Hugging Face folder (bf16) and checks it against transformers' own Gemma-3.

    python export.py --work work --output ../../models/demo
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from model import Config, Gemma3

EOS, END_OF_TURN = 1, 6


def hf_config(c):
    # The field names of Gemma 3's own release; transformers 5 still reads them.
    return {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "bfloat16",
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers, "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim, "query_pre_attn_scalar": c.head_dim,
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": c.rms_norm_eps, "attention_bias": False,
        "attention_dropout": 0.0, "max_position_embeddings": c.max_position_embeddings, "sliding_window": c.sliding_window,
        "sliding_window_pattern": c.sliding_window_pattern, "layer_types": c.layer_types, "rope_theta": c.rope_theta,
        "rope_local_base_freq": c.rope_local_base_freq, "rope_scaling": None, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "tie_word_embeddings": True, "use_cache": True, "initializer_range": 0.02,
        "pad_token_id": 0, "eos_token_id": [EOS, END_OF_TURN], "bos_token_id": 2,
    }


GENERATION = {"bos_token_id": 2, "eos_token_id": [EOS, END_OF_TURN], "pad_token_id": 0, "do_sample": True, "temperature": 0.3, "top_k": 64, "top_p": 0.95}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
    "mask_token": "<mask>", "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"], "add_bos_token": True, "add_eos_token": False,
    "clean_up_tokenization_spaces": False, "model_max_length": 8192,
}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def check(folder, model):
    """Compares our model, rounded to bf16 as exported, with transformers' on a few hundred positions."""
    from transformers import AutoTokenizer, Gemma3ForCausalLM

    oracle = Gemma3ForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a").input_ids[0] == 2, "the tokenizer must prepend <bos>"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(7, model.config.vocab_size, (1, 320), generator=generator)
    rounded = Gemma3(model.config)
    rounded.load_state_dict({name: t.bfloat16().float() for name, t in model.state_dict().items()})
    with torch.no_grad():
        difference = (rounded.logits(rounded(ids)) - oracle(ids).logits).abs().max().item()
    assert difference < 1e-3, f"logits differ from transformers' by {difference}"
    return difference


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--averaged", action="store_true", help="the average over the last steps instead of the last step's weights")
    args = parser.parse_args()
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    saved = torch.load(f"{args.work}/checkpoint.pt", map_location="cpu", weights_only=False)
    model = Gemma3(Config(**saved["config"]))
    model.load_state_dict(saved["average" if args.averaged else "model"])
    tensors = {"model." + name: tensor.bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes the file readable for its owner only
    write_json(folder / "config.json", hf_config(model.config))
    write_json(folder / "generation_config.json", GENERATION)
    write_json(folder / "tokenizer_config.json", TOKENIZER)
    shutil.copy(f"{args.work}/tokenizer.json", folder / "tokenizer.json")
    print(f"{folder}: {sum(t.numel() for t in tensors.values())} parameters, trained {saved['state']['seconds'] / 60:.0f} minutes on "
          f"{saved['state']['tokens'] / 1e6:.1f} M tokens, largest logit difference from transformers {check(folder, model):.1e}")


if __name__ == "__main__":
    main()
