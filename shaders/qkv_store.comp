// Between the q, k, v projections and attention: biases, norms, RoPE, the attention scale, and the KV store.
//
//   q f32 [tokens, num_heads, head_dim]     q = rope(norm(q + bias)) * q_scale, in place
//   k f32 [tokens, num_kv_heads, head_dim]  k_cache[slot] = rope(norm(k + bias))
//   v f32 [tokens, num_kv_heads, head_dim]  v_cache[slot] = v + bias, normed without weights with VALUE_NORM. It may be k
//   biases f32 [num_heads, head_dim] and [num_kv_heads, head_dim], only with BIAS; norms [head_dim], only with QK_NORM
//   k_cache, v_cache  blocks of keys and of values (common/kv.glsl)
//   rope  [position][head_dim / 2] of (cos, sin). The host computes it in f64, because Vulkan specifies the precision
//         of its cos and sin only on [-pi, pi]. Dimension i is rotated with dimension i + head_dim / 2
//   slot_mapping [tokens]: block * block_size + token in block
//
// A workgroup processes one head of one token: gl_WorkGroupID.y counts q heads, then k heads, then v heads.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "kv.glsl"
#define WORKGROUP 64
#include "lanes.glsl"
#include "reduce.glsl"

layout(local_size_x = INVOCATIONS) in;

layout(constant_id = 0) const uint QK_NORM = 1;
layout(constant_id = 1) const uint BIAS = 0;
layout(constant_id = 2) const uint VALUE_NORM = 0;

layout(push_constant, std430) uniform Push {
    Floats q;
    ReadFloats k;
    ReadFloats v;
    ReadFloats q_bias_or_none;
    ReadFloats k_bias_or_none;
    ReadFloats v_bias_or_none;
    ReadFloats q_norm_or_none;
    ReadFloats k_norm_or_none;
    ReadVec2s rope;
    ReadUints positions;
    ReadUints slot_mapping;
    WriteUints k_cache;
    WriteUints v_cache;
    uint num_heads;
    uint num_kv_heads;
    uint head_dim;
    uint block_size;
    float eps;
    float q_scale;
};

// The key or value to store in the cache.
shared float row[512];

// Stores `row` in the cache, as this token's key or value of KV head `head`.
void store(WriteUints cache, bool is_key, uint token, uint head) {
    const uint lane = gl_LocalInvocationID.x, fours = head_dim / 4;
    const uint slot = slot_mapping.at[token], at = slot % block_size, rows = num_kv_heads * block_size;
    const uint start = cache_block(slot / block_size, rows, fours);
    barrier();
#if defined(KV_F32)
    for (uint i = lane; i < head_dim; i += INVOCATIONS) {
        const uint to = cache_at(is_key, start, head, at, i / 4, block_size, fours);
        cache.at[to * 4 + i % 4] = floatBitsToUint(row[i]);
    }
#elif defined(KV_F16)
    for (uint i = lane; i < head_dim / 2; i += INVOCATIONS) {
        const vec2 two = clamp(vec2(row[2 * i], row[2 * i + 1]), -65504.0, 65504.0);
        const uint to = cache_at(is_key, start, head, at, i / 2, block_size, fours);
        cache.at[to * 2 + i % 2] = packHalf2x16(two);
    }
#elif defined(KV_INT8)
    for (uint turn = 0; turn < TURNS; turn++) {
        float largest = 0.0;
        for (uint i = lane_of(turn); i < head_dim; i += WORKGROUP) largest = max(largest, abs(row[i]));
        share(lane_of(turn), largest);
    }
    const float largest = workgroup_max();
    const float inverse = largest > 0.0 ? 127.0 / largest : 0.0;
    for (uint i = lane; i < fours; i += INVOCATIONS) {
        uint four = 0;
        [[unroll]] for (uint j = 0; j < 4; j++)
            four |= (uint(int(roundEven(row[4 * i + j] * inverse))) & 0xffu) << (8 * j);
        cache.at[cache_at(is_key, start, head, at, i, block_size, fours)] = four;
    }
    if (lane == 0)
        cache.at[cache_scale_at(start, head, at, block_size, rows, fours)] = floatBitsToUint(largest / 127.0);
#endif
}

// An element of the queries or keys. `i` is its place in the product, `in_row` that in the token's row.
float projected(bool is_q, uint i, uint in_row) {
    float value = is_q ? q.at[i] : k.at[i];
    if (BIAS == 1) value += is_q ? q_bias_or_none.at[in_row] : k_bias_or_none.at[in_row];
    return value;
}

float projected_value(uint i, uint in_row) {
    return BIAS == 1 ? v.at[i] + v_bias_or_none.at[in_row] : v.at[i];
}

// The factor of a norm. Before the call, every lane must have shared its sum of squares.
float factor_of_head() { return inversesqrt(workgroup_sum() / float(head_dim) + eps); }

void main() {
    const uint token = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x, half_dim = head_dim / 2;
    uint head = gl_WorkGroupID.y;

    if (head >= num_heads + num_kv_heads) {
        head -= num_heads + num_kv_heads;
        const uint from = (token * num_kv_heads + head) * head_dim;
        float value_factor = 1.0;
        if (VALUE_NORM == 1) {
            for (uint turn = 0; turn < TURNS; turn++) {
                float squares = 0.0;
                for (uint i = lane_of(turn); i < head_dim; i += WORKGROUP) {
                    const float value = projected_value(from + i, head * head_dim + i);
                    squares = fma(value, value, squares);
                }
                share(lane_of(turn), squares);
            }
            value_factor = factor_of_head();
        }
        for (uint i = lane; i < head_dim; i += INVOCATIONS) {
            row[i] = projected_value(from + i, head * head_dim + i);
            if (VALUE_NORM == 1) row[i] *= value_factor;
        }
        store(v_cache, false, token, head);
        return;
    }

    const bool is_q = head < num_heads;
    if (!is_q) head -= num_heads;
    const uint from = (token * (is_q ? num_heads : num_kv_heads) + head) * head_dim, in_row = head * head_dim;

    float factor = 1.0;
    if (QK_NORM == 1) {
        for (uint turn = 0; turn < TURNS; turn++) {
            float squares = 0.0;
            for (uint i = lane_of(turn); i < head_dim; i += WORKGROUP) {
                const float value = projected(is_q, from + i, in_row + i);
                squares = fma(value, value, squares);
            }
            share(lane_of(turn), squares);
        }
        factor = factor_of_head();
    }

    const uint angles = positions.at[token] * half_dim;
    for (uint i = lane; i < half_dim; i += INVOCATIONS) {
        const uint j = i + half_dim;
        const vec2 cos_sin = rope.at[angles + i];
        vec2 pair = vec2(projected(is_q, from + i, in_row + i), projected(is_q, from + j, in_row + j));
        if (QK_NORM == 1) {
            const vec2 weight = is_q ? vec2(q_norm_or_none.at[i], q_norm_or_none.at[j])
                                     : vec2(k_norm_or_none.at[i], k_norm_or_none.at[j]);
            pair = pair * factor * weight;
        }
        const vec2 turned =
            vec2(pair.x * cos_sin.x - pair.y * cos_sin.y, pair.y * cos_sin.x + pair.x * cos_sin.y);
        if (is_q) {
            q.at[from + i] = turned.x * q_scale;
            q.at[from + j] = turned.y * q_scale;
        } else {
            row[i] = turned.x;
            row[j] = turned.y;
        }
    }
    if (!is_q) store(k_cache, true, token, head);
}
