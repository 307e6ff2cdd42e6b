#!/usr/bin/env python3
"""Writes tests/data/packed: tiny Gemma-3 checkpoints packed by the quantizers' own published code, and their contents.

    make_goldens.py --out ../../tests/data/packed        (README.md in this folder lists the packages it needs)

The weights are random and seeded. Scales and zero points are plain min-max ones, since the tests only read them back.
AutoGPTQ, GPTQModel, AutoAWQ and compressed-tensors do the packing, never this script. The same packages' unpacking
gives the dequantized weights, with the stored scales widened to float32 first, so that no product is rounded.
transformers computes the logits from them.
"""

import argparse
import hashlib
import importlib.util
import json
import sys
import types
import zlib
from importlib import metadata
from pathlib import Path

import accelerate  # noqa: F401  AutoAWQ names it; before the stand-ins below, which it would look at
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

torch.set_grad_enabled(False)
torch.set_num_threads(1)

SEED = 7
TEXT = {
    "vocab_size": 192, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 32, "sliding_window": 16,
    "sliding_window_pattern": 2, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": None,
    "attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None, "bos_token_id": 2,
    "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True,
}
PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


# ---- The packages' packing code, without the rest of them ------------------------------------------------

def bare(name, path):
    """The package `name` without its __init__, which would import modules that only a GPU or a data set needs."""
    module = types.ModuleType(name)
    module.__path__ = [str(path)]
    sys.modules[name] = module


def find(package):
    return Path(importlib.util.find_spec(package).submodule_search_locations[0])


def packing_code():
    folder = find("auto_gptq")
    spec = importlib.util.spec_from_file_location("qlinear_cuda_old", folder / "nn_modules/qlinear/qlinear_cuda_old.py")
    auto_gptq = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(auto_gptq)

    folder = find("awq")
    bare("awq", folder)
    bare("awq.modules", folder / "modules")
    bare("awq.modules.linear", folder / "modules/linear")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    folder = find("gptqmodel")
    bare("gptqmodel", folder)
    for part in ["models", "nn_modules", "utils"]:
        bare(f"gptqmodel.{part}", folder / part)
    from gptqmodel.utils.backend import BACKEND
    sys.modules["gptqmodel.utils"].BACKEND = BACKEND
    from gptqmodel.nn_modules.qlinear.torch import TorchQuantLinear
    from gptqmodel.utils import model as convert

    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    return types.SimpleNamespace(
        AutoGptqLinear=auto_gptq.QuantLinear, WQLinear_GEMM=WQLinear_GEMM, dequantize_gemm=dequantize_gemm,
        TorchQuantLinear=TorchQuantLinear, to_v2=convert.convert_gptq_v1_to_v2_format_module,
        to_v1=convert.convert_gptq_v2_to_v1_format_module, Compressor=PackedQuantizationCompressor,
        QuantizationArgs=QuantizationArgs, QuantizationConfig=QuantizationConfig, QuantizationScheme=QuantizationScheme)


# ---- Weights ---------------------------------------------------------------------------------------------

def weights():
    """name -> float32 tensor, by the names of a text-only checkpoint."""
    t, W = TEXT, {}

    def put(name, shape, std, mean=0.0):
        r = np.random.Generator(np.random.PCG64([SEED, zlib.crc32(name.encode())]))
        W[name] = torch.tensor(r.standard_normal(shape) * std + mean, dtype=torch.float32)

    hidden, ffn, head = t["hidden_size"], t["intermediate_size"], t["head_dim"]
    q, kv = t["num_attention_heads"] * head, t["num_key_value_heads"] * head
    put("model.embed_tokens.weight", (t["vocab_size"], hidden), hidden ** -0.5)
    for layer in range(t["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for norm, mean in [("input_layernorm", 0.1), ("post_attention_layernorm", -0.5),
                           ("pre_feedforward_layernorm", 0.2), ("post_feedforward_layernorm", -0.5)]:
            put(f"{p}{norm}.weight", (hidden,), 0.3, mean)
        for norm in ["q_norm", "k_norm"]:
            put(f"{p}self_attn.{norm}.weight", (head,), 0.3, 0.2)
        shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q),
                  "gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
        for name in PROJECTIONS:
            shape = shapes[name.split(".")[1]]
            put(f"{p}{name}.weight", shape, shape[1] ** -0.5)
    put("model.norm.weight", (hidden,), 2.0, -0.5)
    return W


def min_max(W, bits, group, symmetric, scale_dtype, lowest_zero=0):
    """Scales `[out, groups]` in `scale_dtype`, zero points (0 to 2**bits - 1), and W moved onto their grid."""
    out, cols = W.shape
    x = W.reshape(out, cols // group, group).clone()
    if not symmetric:   # groups without negative, and without positive numbers: the two extreme zero points
        x[0, 0], x[1, 0] = x[0, 0].abs(), -x[1, 0].abs()
    top = 2 ** bits - 1
    if symmetric:
        scale = (x.abs().amax(-1) / (top // 2)).to(scale_dtype).float()
        zero = torch.full_like(scale, (top + 1) / 2)
    else:
        low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
        scale = ((high - low) / top).to(scale_dtype).float()
        zero = torch.round(-low / scale).clamp(lowest_zero, top)
    q = torch.round(x / scale[..., None] + zero[..., None]).clamp(0, top)
    on_grid = (q - zero[..., None]) * scale[..., None]
    return scale, zero, on_grid.reshape(out, cols)


def linear(W):
    layer = torch.nn.Linear(W.shape[1], W.shape[0], bias=False)
    layer.weight.data = W.clone()
    return layer


# ---- One matrix in each packing: -> ({suffix: tensor}, dequantized float32) --------------------------------

def gptqmodel_dequantize(code, bits, group, parts, version):
    out, cols = parts["qweight"].shape[1], parts["g_idx"].shape[0]
    module = code.TorchQuantLinear(bits, group, True, False, cols, out, register_buffers=True)
    for name, tensor in parts.items():
        setattr(module, name, tensor.clone())
    if version == 1:
        code.to_v2(module, bits, torch.int32)
    module.scales = module.scales.float()
    module.dequant_dtype = torch.int32   # int8, its default, has no room for 8 bits
    module.wf_unsqueeze_zero = module.wf_unsqueeze_neg_one = None
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    module.wf_unsqueeze_zero, module.wf_unsqueeze_neg_one = shifts[None, None], shifts[None, :, None]
    return type(module).dequantize_weight(module).T.contiguous()


def pack_auto_gptq(code, W, bits, group, symmetric):
    scale, zero, grid = min_max(W, bits, group, symmetric, torch.float16, lowest_zero=1)
    module = code.AutoGptqLinear(bits, group, W.shape[1], W.shape[0], bias=False)
    module.pack(linear(grid), scale.clone(), zero.clone(), None)
    parts = {"qweight": module.qweight, "qzeros": module.qzeros, "scales": module.scales.half(), "g_idx": module.g_idx}
    return parts, gptqmodel_dequantize(code, bits, group, parts, 1), grid


def pack_gptqmodel(code, W, bits, group, symmetric, version):
    scale, zero, grid = min_max(W, bits, group, symmetric, torch.float16)
    module = code.TorchQuantLinear(bits, group, symmetric, False, W.shape[1], W.shape[0], register_buffers=True)
    module.pack(linear(grid), scale.clone(), zero.clone())
    if version == 1:
        code.to_v1(module, types.SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    parts = {"qweight": module.qweight, "qzeros": module.qzeros, "scales": module.scales, "g_idx": module.g_idx}
    return parts, gptqmodel_dequantize(code, bits, group, parts, version), grid


def pack_awq(code, W, group):
    scale, zero, grid = min_max(W, 4, group, False, torch.float16)
    module = code.WQLinear_GEMM.from_linear(linear(grid), 4, group, scales=scale.T.contiguous(),
                                            zeros=zero.T.contiguous())
    parts = {"qweight": module.qweight, "qzeros": module.qzeros, "scales": module.scales}
    dequantized = code.dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), 4, group)
    return parts, dequantized.T.contiguous(), grid


def pack_compressed(code, W, scheme, group):
    args = scheme.weights
    scale, zero, grid = min_max(W, args.num_bits, group, args.symmetric, torch.bfloat16)
    state = {"weight": grid, "weight_scale": scale}
    if not args.symmetric:   # the package's are signed, with 0 in the middle
        state["weight_zero_point"] = (zero - 2 ** (args.num_bits - 1)).to(torch.int8)
    packed = code.Compressor.compress(state, scheme)
    dequantized = code.Compressor.decompress(packed, scheme)["weight"].float()
    packed["weight_scale"] = packed["weight_scale"].to(torch.bfloat16)
    return packed, dequantized, grid


# ---- Checkpoints -----------------------------------------------------------------------------------------

def variants(code):
    """name -> (quantization_config, dtype of what is not quantized, function from W to its packing)."""
    def gptq(writer, bits, group, symmetric, version):
        config = {"bits": bits, "group_size": group, "damp_percent": 0.01, "desc_act": False, "static_groups": False,
                  "sym": symmetric, "true_sequential": True, "quant_method": "gptq"}
        if writer == "gptqmodel":
            config |= {"checkpoint_format": "gptq" if version == 1 else "gptq_v2", "pack_dtype": "int32", "lm_head": False,
                       "meta": {"quantizer": [f"gptqmodel:{metadata.version('gptqmodel')}"]}}

        def pack(W):
            size = W.shape[1] if group == -1 else group
            if writer == "auto_gptq":
                return pack_auto_gptq(code, W, bits, size, symmetric)
            return pack_gptqmodel(code, W, bits, size, symmetric, version)
        return config, torch.float16, pack

    def awq(group):
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
                  "modules_to_not_convert": None}
        return config, torch.float16, lambda W: pack_awq(code, W, group)

    def compressed(bits, group, symmetric):
        args = code.QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, group_size=None if group == -1 else group,
                                     strategy="channel" if group == -1 else "group")
        scheme = code.QuantizationScheme(targets=["Linear"], weights=args)
        config = code.QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized",
                                         quantization_status="compressed", ignore=["lm_head", "re:.*vision_tower.*"])
        pack = lambda W: pack_compressed(code, W, scheme, W.shape[1] if group == -1 else group)
        return json.loads(config.model_dump_json()), torch.bfloat16, pack

    return {
        "gptq-v1-g128-sym": gptq("auto_gptq", 4, 128, True, 1),
        "gptq-v1-g64": gptq("auto_gptq", 4, 64, False, 1),
        "gptq-v1-g32-gptqmodel": gptq("gptqmodel", 4, 32, False, 1),
        "gptq-v2-g128": gptq("gptqmodel", 4, 128, False, 2),
        "gptq-v2-row-8bit": gptq("gptqmodel", 8, -1, False, 2),
        "awq-g128": awq(128),
        "awq-g32": awq(32),
        "compressed-g128-sym": compressed(4, 128, True),
        "compressed-g32": compressed(4, 32, False),
        "compressed-row-sym": compressed(4, -1, True),
        "compressed-row-sym-8bit": compressed(8, -1, True),
    }


def sha256(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().astype("<f4").tobytes()).hexdigest()


def prompt(count):
    r = np.random.Generator(np.random.PCG64([SEED, count]))
    return np.concatenate([[2], r.integers(4, TEXT["vocab_size"], count - 1)]).astype(np.int32)


def logits(weights, tokens):
    config = Gemma3TextConfig(**TEXT)
    config._attn_implementation = "eager"
    model = Gemma3ForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and missing == ["lm_head.weight"], (missing, unexpected)
    model.tie_weights()
    return model(torch.tensor(tokens[None].astype(np.int64)), use_cache=False).logits[0]


def write(out, name, quantization, dtype, pack, W):
    """Writes one checkpoint. compressed-tensors' have the names and the extra tensors of a multimodal model."""
    multimodal = quantization["quant_method"] == "compressed-tensors"
    prefix = "language_model." if multimodal else ""
    tensors, dequantized, worst = {}, {}, 0.0
    for key, w in W.items():
        base = key.removesuffix(".weight")
        if not base.endswith(tuple(PROJECTIONS)):
            tensors[prefix + key] = w.to(dtype)
            dequantized[key] = w.to(dtype).float()
            continue
        parts, back, grid = pack(w)
        tensors |= {f"{prefix}{base}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        dequantized[key] = back
        worst = max(worst, float((back - grid).abs().max() / grid.abs().max()))
    # The packages' code unpacks what was packed, but for its own roundings.
    assert worst < 1e-6, (name, worst)
    if multimodal:
        tensors["vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = torch.ones(4, 4, dtype=dtype)
        config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                  "text_config": {"model_type": "gemma3_text", **TEXT}}
    else:
        config = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **TEXT}
    config["quantization_config"] = quantization

    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = prompt(40)
    save_file({"tokens": torch.tensor(tokens), "logits": logits(dequantized, tokens)}, folder / "goldens.safetensors")
    hashes = {prefix + key: sha256(w) for key, w in sorted(dequantized.items())}
    (folder / "dequantized.json").write_text(json.dumps(hashes, indent=1) + "\n")
    print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes, worst {worst:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    code = packing_code()
    W = weights()
    for name, (quantization, dtype, pack) in variants(code).items():
        write(args.out, name, quantization, dtype, pack, W)
    packages = ["torch", "transformers", "auto_gptq", "gptqmodel", "autoawq", "compressed-tensors"]
    versions = {package: metadata.version(package) for package in packages}
    (args.out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
