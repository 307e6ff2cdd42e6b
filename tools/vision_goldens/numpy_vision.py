"""What Gemma 4 makes of the pixels of an image, with numpy alone in float64, and with plausible mistakes.

`embeddings(vision, weights, pixels)` reads `vision_config` and the weights of a checkpoint, for both kinds of models.
"""

import json
import math

import numpy as np


def read_weights(folder):
    """name -> the tensor of the vision part in float64"""
    weights = {}
    for file in sorted(folder.glob("model*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, tensor in json.loads(data[8:8 + length]).items():
            if "vision" not in name:
                continue
            assert tensor["dtype"] == "BF16"
            begin, end = (8 + length + at for at in tensor["data_offsets"])
            bits = np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16
            weights[name.removeprefix("model.")] = bits.view(np.float32).astype(np.float64).reshape(tensor["shape"])
    return weights


def rms_norm(x, weight=1.0, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def patches_of(pixels, side, mistake=None):
    """-> patches with their pixels row by row and the colors of each, and x and y of each patch"""
    height, width, _ = pixels.shape
    rows, columns = height // side, width // side
    patches = (pixels / 255).reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
    if mistake == "colors before pixels in a patch":
        patches = patches.transpose(0, 1, 4, 2, 3)
    if mistake == "columns before rows in a patch":
        patches = patches.transpose(0, 1, 3, 2, 4)
    if mistake == "blue before red":
        patches = patches[..., ::-1]
    if mistake == "nine patches one after the other":
        small = side // 3
        patches = patches.reshape(rows, columns, 3, small, 3, small, 3).transpose(0, 1, 2, 4, 3, 5, 6)
    y, x = (grid.ravel() for grid in np.mgrid[0:rows, 0:columns])
    return patches.reshape(rows * columns, -1), x, y


def rotated(values, x, y, theta, mistake=None):
    """`values`: [patches, heads, head size]. The first half turns with x and the second one with y."""
    half = values.shape[-1] // 2
    if mistake == "rope by x and y swapped":
        x, y = y, x
    if mistake == "rope of one axis":
        half, x = 2 * half, x + y * (x.max() + 1)
    speeds = theta ** (-np.arange(0, half, 2) / half)
    if mistake == "rope with exponents over the head":
        speeds = theta ** (-np.arange(0, half, 2) / (2 * half))
    parts = []
    for start, position in ((0, x), (half, y)):
        part = values[..., start:start + half]
        if part.shape[-1] == 0:
            break
        angles = (position[:, None] * speeds)[:, None]
        first, second = slice(None, half // 2), slice(half // 2, None)
        if mistake == "rope of neighbors":
            first, second = slice(0, None, 2), slice(1, None, 2)
        a, b = part[..., first], part[..., second]
        turned = np.empty_like(part)
        turned[..., first] = a * np.cos(angles) - b * np.sin(angles)
        turned[..., second] = b * np.cos(angles) + a * np.sin(angles)
        parts.append(turned)
    return np.concatenate(parts, -1)


IN_A_TOWER = [
    "colors before pixels in a patch", "columns before rows in a patch", "blue before red", "pixels from 0 to 1",
    "positions of x and y swapped", "rope by x and y swapped", "rope of one axis", "rope of neighbors",
    "rope with exponents over the head", "no norm of values", "scores over the root of the head size",
    "norms of 1 + weight", "SiLU", "no norms after attention and network", "tokens column by column",
    "no root of the hidden size", "no standardizing", "bias after scale", "no norm before the projection",
]
WITHOUT = [
    "colors before pixels in a patch", "columns before rows in a patch", "blue before red",
    "nine patches one after the other", "pixels from -1 to 1", "positions of x and y swapped",
    "no first norm", "no second norm", "no third norm", "positions before the second norm", "no biases",
    "epsilon of 1e-6 in layer norms", "no norm before the projection",
]


def mistakes(vision):
    return IN_A_TOWER if "hidden_size" in vision else WITHOUT


def embeddings(vision, weights, pixels, mistake=None):
    """-> the input of `embed_vision`, and the embeddings"""
    return (tower if "hidden_size" in vision else without_tower)(vision, weights, pixels, mistake)


def tower(vision, weights, pixels, mistake):
    def get(name):
        return weights["vision_tower." + name]

    def norm(values, name):
        return rms_norm(values, get(name + ".weight") + (mistake == "norms of 1 + weight"), eps)

    eps, heads, size = vision["rms_norm_eps"], vision["num_attention_heads"], vision["head_dim"]
    patches, x, y = patches_of(pixels, vision["patch_size"], mistake)
    if mistake != "pixels from 0 to 1":
        patches = 2 * patches - 1
    table = get("patch_embedder.position_embedding_table")
    if mistake == "positions of x and y swapped":
        table = table[::-1]
    hidden = patches @ get("patch_embedder.input_proj.weight").T + table[0][x] + table[1][y]
    for layer in range(vision["num_hidden_layers"]):
        of = f"encoder.layers.{layer}."
        theta = vision["rope_parameters"]["rope_theta"]

        def linear(values, name):
            return values @ get(f"{of}{name}.linear.weight").T

        def after(values, name):
            return values if mistake == "no norms after attention and network" else norm(values, of + name)

        given = norm(hidden, of + "input_layernorm")
        q, k, v = (linear(given, f"self_attn.{part}_proj").reshape(-1, heads, size) for part in "qkv")
        q = rotated(norm(q, of + "self_attn.q_norm"), x, y, theta, mistake)
        k = rotated(norm(k, of + "self_attn.k_norm"), x, y, theta, mistake)
        if mistake != "no norm of values":
            v = rms_norm(v, 1.0, eps)
        scores = np.einsum("ihd,jhd->hij", q, k)
        if mistake == "scores over the root of the head size":
            scores = scores / math.sqrt(size)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", scores, v).reshape(len(hidden), -1)
        hidden = hidden + after(linear(mixed, "self_attn.o_proj"), "post_attention_layernorm")
        given = norm(hidden, of + "pre_feedforward_layernorm")
        gate = linear(given, "mlp.gate_proj")
        gate = gate / (1 + np.exp(-gate)) if mistake == "SiLU" else gelu(gate)
        made = linear(gate * linear(given, "mlp.up_proj"), "mlp.down_proj")
        hidden = hidden + after(made, "post_feedforward_layernorm")
    pool, width = vision["pooling_kernel_size"], vision["hidden_size"]
    rows, columns = (y.max() + 1) // pool, (x.max() + 1) // pool
    pooled = hidden.reshape(rows, pool, columns, pool, width).mean((1, 3))
    if mistake == "tokens column by column":
        pooled = pooled.transpose(1, 0, 2)
    pooled = pooled.reshape(-1, width)
    if mistake != "no root of the hidden size":
        pooled = pooled * math.sqrt(width)
    if mistake == "bias after scale":
        pooled = pooled * get("std_scale") - get("std_bias")
    elif mistake != "no standardizing":
        pooled = (pooled - get("std_bias")) * get("std_scale")
    return pooled, projected(pooled, weights, eps, mistake)


def without_tower(vision, weights, pixels, mistake):
    def get(name):
        return weights["vision_embedder." + name]

    def bias(name):
        return 0 if mistake == "no biases" else get(name + ".bias")

    def norm(values, name):
        eps = 1e-6 if mistake == "epsilon of 1e-6 in layer norms" else 1e-5
        centered = values - values.mean(-1, keepdims=True)
        scale = np.sqrt((centered * centered).mean(-1, keepdims=True) + eps)
        return centered / scale * get(name + ".weight") + bias(name)

    patches, x, y = patches_of(pixels, vision["patch_size"] * vision["pooling_kernel_size"], mistake)
    if mistake == "pixels from -1 to 1":
        patches = 2 * patches - 1
    hidden = patches if mistake == "no first norm" else norm(patches, "patch_ln1")
    hidden = hidden @ get("patch_dense.weight").T + bias("patch_dense")
    table = get("pos_embedding")
    if mistake == "positions of x and y swapped":
        table = table[:, ::-1]
    positions = table[x, 0] + table[y, 1]
    if mistake == "positions before the second norm":
        hidden = norm(hidden + positions, "patch_ln2")
    else:
        hidden = (hidden if mistake == "no second norm" else norm(hidden, "patch_ln2")) + positions
    if mistake != "no third norm":
        hidden = norm(hidden, "pos_norm")
    return hidden, projected(hidden, weights, vision["rms_norm_eps"], mistake)


def projected(values, weights, eps, mistake):
    if mistake != "no norm before the projection":
        values = rms_norm(values, 1.0, eps)
    return values @ weights["embed_vision.embedding_projection.weight"].T
