// Between the q, k, v projections and attention: QK-norm, RoPE, the attention scale, and the KV store.
//
//   q f32 [tokens, num_heads, head_dim]     q = rope(norm(q)) * q_scale, in place
//   k f32 [tokens, num_kv_heads, head_dim]  k_cache[slot] = rope(norm(k))
//   v f32 [tokens, num_kv_heads, head_dim]  v_cache[slot] = v
//   k_cache, v_cache f32 [block][kv_head][token in block][head_dim]
//   rope  [position][head_dim / 2] of (cos, sin), made on the host in f64: Vulkan's own are specified on
//         [-pi, pi] only. Halves are rotated (dimension i with i + head_dim / 2).
//   slot_mapping [tokens]: block * block_size + token in block
//
// A workgroup takes one head of one token: gl_WorkGroupID.y counts q heads, then k heads, then v heads.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 64
#include "reduce.glsl"

layout(local_size_x = WORKGROUP) in;

layout(push_constant, std430) uniform Push {
    Floats q;
    ReadFloats k;
    ReadFloats v;
    ReadFloats q_norm;
    ReadFloats k_norm;
    ReadVec2s rope;
    ReadUints positions;
    ReadUints slot_mapping;
    WriteFloats k_cache;
    WriteFloats v_cache;
    uint num_heads;
    uint num_kv_heads;
    uint head_dim;
    uint block_size;
    float eps;
    float q_scale;
};

// First element of this token's row of kv head `head` in a cache.
uint cache_row(uint token, uint head) {
    const uint slot = slot_mapping.at[token];
    return (((slot / block_size) * num_kv_heads + head) * block_size + slot % block_size) * head_dim;
}

void main() {
    const uint token = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x, half_dim = head_dim / 2;
    uint head = gl_WorkGroupID.y;

    if (head >= num_heads + num_kv_heads) {
        head -= num_heads + num_kv_heads;
        const uint from = (token * num_kv_heads + head) * head_dim, to = cache_row(token, head);
        for (uint i = lane; i < head_dim; i += WORKGROUP) v_cache.at[to + i] = v.at[from + i];
        return;
    }

    const bool is_q = head < num_heads;
    if (!is_q) head -= num_heads;
    const uint from = (token * (is_q ? num_heads : num_kv_heads) + head) * head_dim;

    float squares = 0.0;
    for (uint i = lane; i < head_dim; i += WORKGROUP) {
        const float value = is_q ? q.at[from + i] : k.at[from + i];
        squares = fma(value, value, squares);
    }
    const float factor = inversesqrt(workgroup_sum(squares) / float(head_dim) + eps);

    const uint angles = positions.at[token] * half_dim;
    const uint to = is_q ? from : cache_row(token, head);
    for (uint i = lane; i < half_dim; i += WORKGROUP) {
        const uint j = i + half_dim;
        const vec2 cos_sin = rope.at[angles + i];
        vec2 pair, weight;
        if (is_q) {
            pair = vec2(q.at[from + i], q.at[from + j]);
            weight = vec2(q_norm.at[i], q_norm.at[j]);
        } else {
            pair = vec2(k.at[from + i], k.at[from + j]);
            weight = vec2(k_norm.at[i], k_norm.at[j]);
        }
        pair = pair * factor * weight;
        const vec2 turned =
            vec2(pair.x * cos_sin.x - pair.y * cos_sin.y, pair.y * cos_sin.x + pair.x * cos_sin.y);
        if (is_q) {
            q.at[to + i] = turned.x * q_scale;
            q.at[to + j] = turned.y * q_scale;
        } else {
            k_cache.at[to + i] = turned.x;
            k_cache.at[to + j] = turned.y;
        }
    }
}
