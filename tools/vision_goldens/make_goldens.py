#!/usr/bin/env python3
"""Writes tests/data/gemma4-vision: tiny random Gemma-4 models that read images, and what transformers computes.

    make_goldens.py OUT [SET...]       writes the sets, the pixels and the table of sizes
    make_goldens.py --check OUT        compares the embeddings with numpy's, and the tokens with the processors'
    make_goldens.py --mistakes OUT     says how far plausible mistakes move the results

The weights are random and seeded. transformers computes in float32 with bfloat16 weights, on one thread, with eager
attention. Pillow resizes the pictures. README.md says what the packages are.
"""

import hashlib
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
import zlib

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np

import numpy_vision

DATA = pathlib.Path(__file__).resolve().parents[2] / "tests/data"
SIDE = 48           # pixels of a soft token: three patches of 16
BUDGETS = [70, 140, 280, 560, 1120]
BOI, EOI, IMAGE = 102, 103, 110
ENDS = [1, 106, 50]
STEPS = 8           # greedy tokens
MARGIN = 0.05       # of the first logit over the second one at each greedy step
GAP = 1e-3          # of the last expert that is used over the first one that is not
DISTINCT = 4        # different greedy tokens
ATTEMPTS = 40

# ---- Models ----------------------------------------------------------------------------------------------

ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 2, "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "global_head_dim": 32, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 4096,
    "num_attention_heads": 4, "num_global_key_value_heads": 1, "num_key_value_heads": 2, "num_kv_shared_layers": 0,
    "pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_parameters": ROPE, "tie_word_embeddings": True, "use_cache": True,
    "vocab_size": 512,
}
GEMMA4 = {
    "enable_moe_block": False, "hidden_size_per_layer_input": 0, "moe_intermediate_size": None, "num_experts": None,
    "top_k_experts": None, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": 512,
}
VISION = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "model_type": "gemma4_vision", "num_hidden_layers": 2, "patch_size": 16,
    "pooling_kernel_size": 3, "position_embedding_size": 256, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": True,
    "use_clipped_linears": False,
}
S, F = "sliding_attention", "full_attention"
SETS = {
    "vis4-a": {
        "seed": 4101, "class": "Gemma4ForConditionalGeneration", "shards": 1,
        "text": TEXT | GEMMA4 | {"layer_types": [S, F, S, F], "sliding_window": 40},
        "vision": VISION | {"hidden_size": 144, "intermediate_size": 112, "num_attention_heads": 2,
                            "num_key_value_heads": 2, "head_dim": 72, "global_head_dim": 72},
    },
    "vis4-b": {
        "seed": 4206, "class": "Gemma4ForConditionalGeneration", "shards": 2,
        "text": TEXT | GEMMA4 | {"layer_types": [S, S, F], "sliding_window": 24, "enable_moe_block": True,
                                 "moe_intermediate_size": 32, "num_experts": 4, "top_k_experts": 2},
        "vision": VISION | {"hidden_size": 96, "intermediate_size": 112, "num_attention_heads": 3,
                            "num_key_value_heads": 3, "head_dim": 32, "global_head_dim": 32},
    },
    "vis4-c": {
        "seed": 4303, "class": "Gemma4UnifiedForConditionalGeneration", "shards": 1,
        "text": TEXT | {"layer_types": [S, S, S, F], "sliding_window": 16, "global_head_dim": 64,
                        "use_bidirectional_attention": "vision"},
        "vision": {"model_type": "gemma4_unified_vision", "mm_embed_dim": 24, "mm_posemb_size": 128,
                   "output_proj_dims": 24, "patch_size": 16, "pooling_kernel_size": 3, "rms_norm_eps": 1e-6},
    },
}


def random(seed, name, shape, std, mean=0.0):
    """Numbers that depend on the seed and the name alone."""
    r = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    return r.standard_normal(shape) * std + mean


def weight(seed, name, shape):
    """Random values for a tensor, of a size with which each part of the network counts."""
    leaf = name.removesuffix(".weight").split(".")[-1]
    number = lambda std, mean=0.0: random(seed, name, shape, std, mean)
    if "vision" in name:
        if leaf == "std_bias":
            return number(5.0)
        if leaf == "std_scale":
            return number(0.03, 0.1)
        if leaf in ("q_norm", "k_norm"):
            return number(0.15, (2.0 / shape[0] ** 0.5) ** 0.5)
        if leaf in ("position_embedding_table", "pos_embedding"):
            return number(0.6)
        if leaf == "bias":
            return number(0.25)
        if len(shape) == 1:
            return number(0.25, 1.0)
        if leaf in ("input_proj", "patch_dense"):
            # A part that is the same for all pixels of a patch: the tower sees large shapes, and not only their grain.
            channels = random(seed, name + " smooth", (shape[0], 3), shape[1] ** -0.5 * 0.1)
            return number(1.4 * shape[1] ** -0.5) + np.tile(channels, shape[1] // 3)
        return number(shape[-1] ** -0.5)
    if leaf == "layer_scalar":
        return number(0.2, 0.85)
    if leaf in ("q_norm", "k_norm"):
        return number(0.15, (1.4 / shape[0] ** 0.5) ** 0.5)
    if name.endswith("language_model.norm.weight"):
        return number(3.0, 0.3)
    if leaf in ("post_attention_layernorm", "post_feedforward_layernorm"):
        return number(0.2, 0.42)
    if "norm" in leaf:
        return number(0.35, 1.1)
    if name.endswith("router.scale") or leaf == "per_expert_scale":
        return number(0.3, 1.0)
    if name.endswith("router.proj.weight"):
        return number(3.0)
    return number((1.3 if leaf == "gate_proj" else 1.0) * shape[-1] ** -0.5)


def config(spec):
    unified = "Unified" in spec["class"]
    kind = "gemma4_unified" if unified else "gemma4"
    layers = len(spec["text"]["layer_types"])
    text = {"model_type": f"{kind}_text", "dtype": "bfloat16", "num_hidden_layers": layers} | spec["text"]
    return {
        "architectures": [spec["class"]], "audio_config": None, "audio_token_id": 111, "boi_token_id": BOI,
        "dtype": "bfloat16", "eoi_token_id": EOI, "eos_token_id": [1, 106], "image_token_id": IMAGE,
        "initializer_range": 0.02, "model_type": kind, "text_config": text, "tie_word_embeddings": True,
        "vision_config": spec["vision"],
    }


def write_json(file, value):
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_tokenizer(folder):
    """The tokenizer of tests/data/families with the two tokens around an image."""
    source = DATA / "families/gemma4-tokenizer"
    names = {"<unused96>": (BOI, "<|image>"), "<unused97>": (EOI, "<image|>")}
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for old, (number, new) in names.items():
        assert vocabulary.pop(old) == number
        vocabulary[new] = number
        tokenizer["added_tokens"].append({"id": number, "content": new, "single_word": False, "lstrip": False,
                                          "rstrip": False, "normalized": False, "special": True})
    tokenizer["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=0) + "\n")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings |= {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
    write_json(folder / "tokenizer_config.json", settings)
    shutil.copyfile(source / "chat_template.jinja", folder / "chat_template.jinja")


def write_checkpoint(name, spec, folder):
    """A checkpoint with the names that save_pretrained writes."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    kind = getattr(transformers, spec["class"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config(spec))
    write_json(folder / "generation_config.json", {
        "bos_token_id": 2, "do_sample": True, "eos_token_id": ENDS, "pad_token_id": 0, "temperature": 1.0,
        "top_k": 64, "top_p": 0.95})
    unified = "Unified" in spec["class"]
    write_json(folder / "processor_config.json", {
        "image_processor": {
            "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True,
            "image_mean": [0.0, 0.0, 0.0],
            "image_processor_type": "Gemma4UnifiedImageProcessor" if unified else "Gemma4ImageProcessor",
            "image_std": [1.0, 1.0, 1.0], "max_soft_tokens": 70, "patch_size": 16, "pooling_kernel_size": 3,
            "resample": 3, "rescale_factor": 1 / 255},
        "image_seq_length": 70,
        "processor_class": "Gemma4UnifiedProcessor" if unified else "Gemma4Processor"})
    write_tokenizer(folder)

    with tempfile.TemporaryDirectory() as saved:
        kind(kind.config_class.from_pretrained(folder)).bfloat16().save_pretrained(saved)
        shapes = {key: tensor.shape for key, tensor in load_file(f"{saved}/model.safetensors").items()}
    weights = {key: torch.tensor(weight(spec["seed"], key, tuple(shape)), dtype=torch.float32).bfloat16()
               for key, shape in sorted(shapes.items())}
    keys, shards = list(weights), spec["shards"]
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    places = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = keys[len(keys) * i // shards:len(keys) * (i + 1) // shards]
        save_file({key: weights[key] for key in part}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    size = sum(tensor.numel() * 2 for tensor in weights.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": places})


# ---- Pictures --------------------------------------------------------------------------------------------

# name -> the picture of tests/data/images, or the width and height of one by a formula; the budgets.
PICTURES = {
    "exact": ("exact.png", [70]),
    "wide": ("wide.png", [70, 280]),
    "tall": ("tall.png", [70, 140]),
    "strip": ((1000, 10), [70]),
    "fitting": ((432, 336), [70]),
}


def formula(width, height):
    """pixel(x, y, c) = (x (7 + 2c) + y (13 - 3c) + floor(xy / 32) + 31c) mod 256; in the first 48 rows of a picture
    that is higher, 200 + 4 ((x + y) mod 2): little contrast."""
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    pixels = (x * (7 + 2 * c) + y * (13 - 3 * c) + ((x * y) >> 5) + 31 * c) % 256
    if height > SIDE:
        pixels[:SIDE] = (200 + 4 * ((x + y) % 2))[:SIDE]
    return pixels.astype(np.uint8)


def sources():
    """name -> U8 [height, width, 3]"""
    from safetensors.numpy import load_file
    decoded = load_file(DATA / "images/decoded.safetensors")
    return {name: decoded[of] if isinstance(of, str) else formula(*of) for name, (of, _) in PICTURES.items()}


def key(name, budget):
    return name if budget == 70 else f"{name}.{budget}"


def pixels_of_processor(patches, positions):
    """The U8 pixels [height, width, 3] in the patches of an image processor."""
    shown = positions[:, 0] >= 0
    patches, positions = patches[shown], positions[shown]
    side = math.isqrt(patches.shape[1] // 3)
    pixels = np.zeros(((positions[:, 1].max() + 1) * side, (positions[:, 0].max() + 1) * side, 3), np.uint8)
    values = np.rint(patches.astype(np.float64) * 255).astype(np.uint8).reshape(-1, side, side, 3)
    for (x, y), patch in zip(positions, values):
        pixels[y * side:(y + 1) * side, x * side:(x + 1) * side] = patch
    return pixels


def process(pixels, budget):
    """-> what Gemma4ImageProcessorPil makes of RGB pixels"""
    from PIL import Image
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    processor = Gemma4ImageProcessorPil(max_soft_tokens=budget)
    return processor(images=Image.fromarray(pixels), return_tensors="np")


def merged(patches, positions, budget):
    """-> the same pixels in the patches of the model without a tower"""
    import torch
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import pad_along_first_dim, patches_merge
    shown = positions[:, 0] >= 0
    patches, positions = torch.tensor(patches[shown])[None], torch.tensor(positions[shown])[None]
    patches, positions = patches_merge(patches, positions, patches.shape[1] // 9)
    patches, positions = pad_along_first_dim(patches[0], positions[0], budget)
    return patches.numpy(), positions.numpy()


def write_pictures(out):
    """-> key -> what is known of the picture, and the inputs of both kinds of models"""
    from PIL import Image
    from safetensors.numpy import save_file
    known, inputs, stored = {}, {}, {}
    for name, source in sources().items():
        of, budgets = PICTURES[name]
        for budget in budgets:
            made = process(source, budget)
            patches, positions = made["pixel_values"][0], made["image_position_ids"][0]
            pixels = pixels_of_processor(patches, positions)
            height, width, _ = pixels.shape
            resized = np.asarray(Image.fromarray(source).resize((width, height), Image.Resampling.BICUBIC))
            assert np.array_equal(pixels, resized), name
            if name == "fitting":
                assert np.array_equal(pixels, source)
            k = key(name, budget)
            known[k] = {
                "picture" if isinstance(of, str) else "formula": of, "size": [source.shape[1], source.shape[0]],
                "budget": budget, "to": [width, height], "tokens": width * height // SIDE ** 2,
                "sha256": hashlib.sha256(pixels.tobytes()).hexdigest()}
            inputs[k] = {"tower": (patches, positions), "unified": merged(patches, positions, budget)}
            if budget == 70:
                stored[f"u8.{k}"] = pixels
    save_file(stored, out / "images.safetensors")
    return known, inputs


def write_sizes(out):
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
    # In float64, 770 x 11 and 595 x 34 become a token narrower, or half as high, than exact numbers give. In float32,
    # 1330 x 19 and 1470 x 21 would become narrower than in float64.
    cases = [(1, 1), (1, 4000), (4000, 1), (47, 48), (48, 48), (48, 47), (96, 48), (65500, 1), (1, 65500), (1000, 10),
             (10, 1000), (432, 336), (384, 384), (480, 336), (331, 347), (997, 1009), (7919, 13), (13, 7919),
             (4000, 3000), (3000, 4000), (1920, 1080), (640, 480), (65500, 65500), (3360, 48), (48, 3360), (3361, 48),
             (70, 1), (1, 70), (71, 1), (300, 20), (770, 11), (595, 34), (1330, 19), (1470, 21)]
    sizes = [(*size, 70) for size in cases]
    sizes += [(*size, budget) for size in [(1, 1), (640, 480), (1920, 1080), (997, 1009), (65500, 1)]
              for budget in BUDGETS[1:]]
    sizes += [(141, 1, 140), (1, 280, 280), (1, 4000, 280), (1120, 1, 1120), (1, 1121, 1120), (53760, 48, 1120)]
    rows = []
    for width, height, budget in sizes:
        try:
            h, w = get_aspect_ratio_preserving_size(height, width, 16, budget * 9, 3)
            row = [[width, height, budget], [w, h, w * h // SIDE ** 2]]
        except ValueError as error:
            row = [[width, height, budget], str(error)]
        rows.append(json.dumps(row))
    assert len(set(rows)) == len(rows) == 60
    (out / "sizes.json").write_text("[\n " + ",\n ".join(rows) + "\n]\n")


# ---- Prompts ---------------------------------------------------------------------------------------------

WORDS = ("the file window text cursor line buffer command with from this word mark that move you can use only when "
         "then there type delete name option insert mode search under last next screen help normal key start end open "
         "write copy put back over into").split()
# Numbers stand for so many random words.
PROMPTS = {
    "text": [("user", 9)],
    "one": [("user", "tall", 7)],
    "two": [("user", 3, "exact", 2, "tall", 5)],
    "adjacent": [("user", "wide", "tall", 4)],
    "turns": [("system", 2), ("user", 4), ("assistant", 3), ("user", 2, "fitting", 3)],
}


def messages(name, seed, attempt):
    r = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode()), attempt]))
    made = []
    for role, *parts in PROMPTS[name]:
        parts = [{"type": "image", "image": part} if isinstance(part, str) else
                 {"type": "text", "text": " ".join(WORDS[i] for i in r.integers(0, len(WORDS), part))}
                 for part in parts]
        made.append({"role": role, "content": parts if len(parts) > 1 else parts[0]["text"]})
    return made


def encode(tokenizer, made, known):
    """-> text with one <|image|> for each image, names of the images, ids with all tokens of images"""
    plain = [m | {"content": [{k: v for k, v in part.items() if k != "image"} for part in m["content"]]}
             if isinstance(m["content"], list) else m for m in made]
    text = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    names = [part["image"] for m in made if isinstance(m["content"], list) for part in m["content"]
             if part["type"] == "image"]
    pieces = text.split("<|image|>")
    assert len(pieces) == len(names) + 1
    whole = pieces[0]
    for name, piece in zip(names, pieces[1:]):
        whole += "<|image>" + "<|image|>" * known[name]["tokens"] + "<image|>" + piece
    return text, names, np.array(tokenizer.encode(whole, add_special_tokens=False), np.int32)


def spans(ids):
    """[first position, tokens] of each image"""
    starts = np.flatnonzero(ids == BOI) + 1
    return [[int(start), int(np.argmin(ids[start:] == IMAGE))] for start in starts]


# ---- Running ---------------------------------------------------------------------------------------------

class Model:
    def __init__(self, folder, spec):
        import torch
        import transformers
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        kind = getattr(transformers, spec["class"])
        self.model, info = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                output_loading_info=True)
        assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]), info
        self.model.eval()
        self.kind = "unified" if "Unified" in spec["class"] else "tower"
        # How sure the router of each layer was of its experts.
        self.gaps = []
        for module in self.model.modules():
            if type(module).__name__ == "Gemma4TextRouter":
                module.register_forward_hook(self.watch)

    def watch(self, router, _, output):
        used = router.config.top_k_experts
        scores = output[0].double().log().sort(-1, descending=True).values
        self.gaps.append(float((scores[..., used - 1] - scores[..., used]).min()))

    def pixels(self, inputs, names):
        import torch
        patches, positions = zip(*(inputs[name][self.kind] for name in names))
        return {"pixel_values": torch.tensor(np.stack(patches)),
                "image_position_ids": torch.tensor(np.stack(positions))}

    def features(self, inputs, name):
        """-> the output of the tower, and the embeddings"""
        given = self.pixels(inputs, [name])
        made = self.model.get_image_features(**given, return_dict=True)
        return made.last_hidden_state.numpy(), made.pooler_output[0].numpy()

    def logits(self, ids, inputs, names, masks=None, *, features=None, bare=False):
        """The logits with the masks of the model's class.

        `masks`: others; whether the query in a row may see the key in a column, for the two types of layers.
        `features`: the embeddings of the images, in place of the model's own. `bare`: the masks that `forward` of the
        unified class makes by itself, which are not those of its `create_masks_for_generate`.
        """
        import torch
        ids = torch.tensor(ids.astype(np.int64))[None]
        given = {"mm_token_type_ids": (ids == IMAGE).long()}
        if features is not None:
            from transformers.modeling_outputs import BaseModelOutputWithPooling
            made = [torch.tensor(values, dtype=torch.float32) for values in features]
            given["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=made)}
        elif names:
            given |= self.pixels(inputs, names)
        if masks is not None:
            lowest = torch.finfo(torch.float32).min
            given["attention_mask"] = {
                k: torch.tensor(np.where(mask, 0.0, lowest), dtype=torch.float32)[None, None]
                for k, mask in masks.items()}
        elif self.kind == "unified" and not bare:
            given["attention_mask"] = self.model.create_masks_for_generate(
                self.model.config, torch.zeros(*ids.shape, 1), None, None, torch.arange(ids.shape[1])[None],
                mm_token_type_ids=given["mm_token_type_ids"])
        return self.model(input_ids=ids, use_cache=False, **given).logits[0].numpy()

    def greedy(self, ids, inputs, names):
        """-> ids, and the margins of their logits; None if the model would end, or begin an image"""
        tokens, margins = [], []
        for _ in range(STEPS):
            now = np.concatenate([ids, np.array(tokens, np.int32)])
            last = self.logits(now, inputs, names)[-1].astype(np.float64)
            order = np.argsort(-last, kind="stable")
            if order[0] in (BOI, EOI, IMAGE, *ENDS):
                return None
            tokens.append(int(order[0]))
            margins.append(last[order[0]] - last[order[1]])
        return np.array(tokens, np.int32), np.array(margins, np.float32)


def masks(ids, window, *, window_over_images=True, full_over_images=False, sliding_over_images=True):
    """Which keys (columns) each query (row) sees: the rule of Gemma 4, or one that differs from it.

    On sliding layers, keys within the window that are not later, or of the same image. On full layers, keys that are
    not later.
    """
    i, j = np.arange(len(ids))[:, None], np.arange(len(ids))[None]
    shown = ids == IMAGE
    first = shown & ~np.concatenate([[False], shown[:-1]])
    block = np.where(shown, np.cumsum(first), 0)
    same = (block[:, None] == block[None]) & (block[:, None] > 0)
    near = i - j < window
    earlier = j <= i
    if not sliding_over_images:
        sliding = earlier & near
    elif window_over_images:
        sliding = (earlier | same) & near
    else:
        sliding = (earlier & near) | same
    return {S: sliding, F: earlier | same if full_over_images else earlier}


def rows_to_store(name, prompt, ids):
    """The positions whose logits are stored: all, or of most long prompts some, with those around each image."""
    if len(ids) <= (100 if name == "vis4-a" else 80) or (name, prompt) == ("vis4-a", "two"):
        return None
    keep = np.arange(len(ids)) % 5 == 0
    keep[-6:] = True
    for start, tokens in spans(ids):
        keep[start - 2:start + 3] = True
        keep[start + tokens - 2:start + tokens + 3] = True
    return np.flatnonzero(keep).astype(np.int32)


def largest(a, b):
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


def write_set(name, out, known, inputs):
    import safetensors
    import torch
    import transformers
    from safetensors.numpy import save_file
    import PIL
    spec, folder = SETS[name], out / name
    write_checkpoint(name, spec, folder)
    model = Model(folder, spec)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    window = spec["text"]["sliding_window"]
    unified = model.kind == "unified"
    shown = {k: of for k, of in known.items() if of["budget"] == 70 or name != "vis4-b"}
    goldens, facts = {}, {"name": name, "layer_types": spec["text"]["layer_types"], "images": shown, "prompts": {},
                          "greedy": {}, "checks": {}}
    for k in shown:
        tower, features = model.features(inputs, k)
        goldens[f"image_features.{k}"] = features
        assert features.shape == (known[k]["tokens"], spec["text"]["hidden_size"])
        if name == "vis4-a" and known[k]["budget"] < 280:
            goldens[f"tower.{k}"] = tower

    def answer(prompt):
        """The first prompt whose answer is sure and varied, or the best one."""
        best = None
        for attempt in range(ATTEMPTS):
            made = messages(prompt, spec["seed"], attempt)
            text, names, ids = encode(tokenizer, made, known)
            model.gaps.clear()
            found = model.greedy(ids, inputs, names)
            if found is None:
                continue
            gap = min(model.gaps, default=GAP)
            score = min(found[1].min() / MARGIN, 1) + min(len(set(found[0])) / DISTINCT, 1) + min(gap / GAP, 1)
            if best is None or score > best[0]:
                best = (score, (made, text, names, ids, found, gap))
            if score >= 3:
                break
        return best[1]

    off, gaps = {}, {}
    for prompt in PROMPTS:
        made, text, names, ids, (tokens, margins), gaps[prompt] = answer(prompt)
        logits = model.logits(ids, inputs, names)
        rows = rows_to_store(name, prompt, ids)
        store = lambda logits: logits if rows is None else logits[rows]
        goldens[f"tokens.{prompt}"] = ids
        goldens[f"token_type_ids.{prompt}"] = (ids == IMAGE).astype(np.int32)
        if rows is not None:
            goldens[f"positions.{prompt}"] = rows
        goldens[f"logits.{prompt}"] = store(logits)
        goldens[f"greedy.{prompt}.tokens"] = tokens
        goldens[f"greedy.{prompt}.margin"] = margins
        of = spans(ids)
        assert [n for _, n in of] == [known[n]["tokens"] for n in names]
        facts["prompts"][prompt] = {"text": text, "messages": made, "images": names, "tokens": ids.tolist(),
                                    "image_spans": of, "logit_std": float(logits.std())}
        facts["greedy"][prompt] = {"tokens": tokens.tolist(), "min_margin": float(margins.min()),
                                   "text": tokenizer.decode(tokens.tolist(), skip_special_tokens=False)}
        off[prompt] = largest(logits, model.logits(ids, inputs, names, masks(ids, window)))
        if unified and names:
            bare = model.logits(ids, inputs, names, bare=True)
            rule = masks(ids, window, window_over_images=False, full_over_images=True)
            off[f"{prompt} bare"] = largest(bare, model.logits(ids, inputs, names, rule))
            if prompt in ("one", "two"):
                goldens[f"bare.logits.{prompt}"] = store(bare)
    facts["checks"]["logits_with_masks_by_the_rule"] = off
    assert max(off.values()) < 1e-5, off
    if spec["text"].get("num_experts"):
        facts["checks"]["smallest_router_gap"] = gaps
    facts["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__,
                         "numpy": np.__version__, "pillow": PIL.__version__, "safetensors": safetensors.__version__}
    save_file({k: np.ascontiguousarray(v) for k, v in sorted(goldens.items())}, folder / "goldens.safetensors")
    write_json(folder / "goldens.json", facts)
    print(name, facts["greedy"], facts["checks"], flush=True)


# ---- Comparing with other computations -----------------------------------------------------------------------

def pixels_of(out, facts):
    """The pixels of each image, of which those of larger budgets are not stored."""
    from PIL import Image
    from safetensors.numpy import load_file
    stored, pictures = load_file(out / "images.safetensors"), sources()
    pixels = {}
    for k, of in facts["images"].items():
        if f"u8.{k}" in stored:
            pixels[k] = stored[f"u8.{k}"]
        else:
            picture = Image.fromarray(pictures[k.split(".")[0]])
            pixels[k] = np.asarray(picture.resize(of["to"], Image.Resampling.BICUBIC))
        assert hashlib.sha256(pixels[k].tobytes()).hexdigest() == of["sha256"], k
    return pixels


def processor(folder, unified):
    """The whole processor of transformers, which writes the tokens of images into prompts."""
    import transformers
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for token in ("audio_token", "boa_token", "eoa_token"):
        if not hasattr(tokenizer, token):
            setattr(tokenizer, token, "<|audio|>")
    kind = "Gemma4Unified" if unified else "Gemma4"
    images = (transformers.Gemma4UnifiedImageProcessor if unified else Gemma4ImageProcessorPil)(max_soft_tokens=70)
    audio = getattr(transformers, f"{kind}AudioFeatureExtractor")()
    video = getattr(transformers, f"{kind}VideoProcessor")()
    return getattr(transformers, f"{kind}Processor")(audio, images, tokenizer, video)


def check(out):
    from PIL import Image
    from safetensors.numpy import load_file
    for name, spec in SETS.items():
        folder = out / name
        goldens = load_file(folder / "goldens.safetensors")
        facts = json.loads((folder / "goldens.json").read_text())
        vision = json.loads((folder / "config.json").read_text())["vision_config"]
        weights = numpy_vision.read_weights(folder)
        off = {}
        for k, pixels in pixels_of(out, facts).items():
            before, features = numpy_vision.embeddings(vision, weights, pixels)
            off[k] = largest(features, goldens[f"image_features.{k}"])
            if f"tower.{k}" in goldens:
                off[f"tower.{k}"] = largest(before, goldens[f"tower.{k}"])
        whole, pictures = processor(folder, "Unified" in spec["class"]), sources()
        for prompt, of in facts["prompts"].items():
            images = [[Image.fromarray(pictures[k]) for k in of["images"]]] if of["images"] else None
            made = whole(text=[of["text"]], images=images, return_tensors="np", add_special_tokens=False)
            assert made["input_ids"][0].tolist() == of["tokens"], (name, prompt)
            types = np.asarray(made["mm_token_type_ids"][0])
            assert np.array_equal(types, goldens[f"token_type_ids.{prompt}"]), (name, prompt)
        print(name, {k: f"{value:.1e}" for k, value in off.items()}, "and all tokens are those of the processor")
        assert max(off.values()) < 1e-4, name


def mistakes(out):
    """Prints two tables: what mistakes in the tower change, and what mistakes in the masks change."""
    from safetensors.numpy import load_file
    rows, masked = {}, {}
    rules = {"both directions on full layers": {"full_over_images": True},
             "causal on sliding layers": {"sliding_over_images": False},
             "no window within an image": {"window_over_images": False}}
    for name, spec in SETS.items():
        folder = out / name
        facts = json.loads((folder / "goldens.json").read_text())
        goldens = load_file(folder / "goldens.safetensors")
        vision = json.loads((folder / "config.json").read_text())["vision_config"]
        weights = numpy_vision.read_weights(folder)
        model, pixels = Model(folder, spec), pixels_of(out, facts)
        ids, names = goldens["tokens.turns"], facts["prompts"]["turns"]["images"]
        truth = [goldens[f"image_features.{k}"] for k in names]
        logits = model.logits(ids, None, names, features=truth)
        for mistake in numpy_vision.mistakes(vision):
            wrong = [numpy_vision.embeddings(vision, weights, pixels[k], mistake)[1] for k in names]
            moved = np.sqrt(((wrong[0] - truth[0]) ** 2).mean() / (truth[0] ** 2).mean())
            change = largest(model.logits(ids, None, names, features=wrong), logits)
            rows.setdefault(mistake, {})[name] = f"{moved:.2g}, {change:.2g}"
        for rule, given in rules.items():
            wrong = model.logits(ids, None, names, masks(ids, spec["text"]["sliding_window"], **given), features=truth)
            masked.setdefault(rule, {})[name] = f"{largest(wrong, logits):.2g}"
    for table in (rows, masked):
        print(f"| mistake | {' | '.join(SETS)} |\n|---|{'---|' * len(SETS)}")
        for mistake, found in table.items():
            print(f"| {mistake} | {' | '.join(found.get(name, '') for name in SETS)} |")


def main(arguments):
    if arguments[0] in ("--check", "--mistakes"):
        {"--check": check, "--mistakes": mistakes}[arguments[0]](pathlib.Path(arguments[1]))
        return
    out = pathlib.Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    write_sizes(out)
    known, inputs = write_pictures(out)
    for name in arguments[1:] or SETS:
        write_set(name, out, known, inputs)


if __name__ == "__main__":
    main(sys.argv[1:])
