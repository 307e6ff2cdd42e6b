// Causal attention of each token over its sequence's paged KV cache, optionally in a sliding window.
//
//   q, y  f32 [tokens, num_heads, head_dim]; q already normed, rotated and scaled
//   k_cache, v_cache  f32 [block][kv_head][token in block][head_dim]
//   block_tables [sequences][max_blocks]; sequence_of, positions [tokens]
//   window  keys a token sees, itself included; 0: all
//
// A workgroup takes one query head of one token. It walks the keys in tiles of 64 that start at multiples of 64,
// with an online softmax: the order of sums depends on the token's position alone, not on the batch or on how the
// prompt was cut into chunks. Lane j scores key j of a tile; then lane d sums dimensions d, d + 64, ...
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 64
#include "reduce.glsl"

const uint MAX_HEAD_DIM = 256;
layout(local_size_x = WORKGROUP) in;

layout(push_constant, std430) uniform Push {
    ReadFloats q;
    ReadVec4s k_cache;
    ReadFloats v_cache;
    ReadUints positions;
    ReadUints sequence_of;
    ReadUints block_tables;
    WriteFloats y;
    uint num_heads;
    uint num_kv_heads;
    uint head_dim;
    uint block_size;
    uint max_blocks;
    uint window;
};

shared vec4 query[MAX_HEAD_DIM / 4];
shared float weights[WORKGROUP];
shared uint key_rows[WORKGROUP];

void main() {
    const uint token = gl_WorkGroupID.x, head = gl_WorkGroupID.y, lane = gl_LocalInvocationID.x;
    const uint kv_head = head / (num_heads / num_kv_heads);
    const uint position = positions.at[token];
    const uint table = sequence_of.at[token] * max_blocks;
    const uint first = window > 0 && position >= window ? position - window + 1 : 0;
    const uint row = (token * num_heads + head) * head_dim;

    for (uint i = lane; i < head_dim / 4; i += WORKGROUP) {
        const uint at = row + 4 * i;
        query[i] = vec4(q.at[at], q.at[at + 1], q.at[at + 2], q.at[at + 3]);
    }
    barrier();

    float maximum = uintBitsToFloat(0xff800000u), sum = 0.0;
    float acc[MAX_HEAD_DIM / WORKGROUP];
    [[unroll]] for (uint i = 0; i < MAX_HEAD_DIM / WORKGROUP; i++) acc[i] = 0.0;

    for (uint tile = first / WORKGROUP * WORKGROUP; tile <= position; tile += WORKGROUP) {
        const uint key = tile + lane;
        float score = uintBitsToFloat(0xff800000u);
        if (key >= first && key <= position) {
            const uint block = block_tables.at[table + key / block_size];
            const uint key_row =
                ((block * num_kv_heads + kv_head) * block_size + key % block_size) * head_dim;
            key_rows[lane] = key_row;
            score = 0.0;
            for (uint i = 0; i < head_dim / 4; i++) {
                const vec4 a = query[i], b = k_cache.at[key_row / 4 + i];
                score = fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, score))));
            }
        }
        const float tile_maximum = max(maximum, workgroup_max(score));
        const float weight = exp(score - tile_maximum);
        weights[lane] = weight;
        // Also orders the shared arrays before the loop below.
        const float tile_sum = workgroup_sum(weight);
        const float correction = exp(maximum - tile_maximum);
        sum = fma(sum, correction, tile_sum);
        maximum = tile_maximum;

        // Keys outside [first, position] may never have been written: they are left out, not weighted by zero.
        const uint low = max(tile, first) - tile, high = min(tile + WORKGROUP - 1, position) - tile;
        [[unroll]] for (uint i = 0; i < MAX_HEAD_DIM / WORKGROUP; i++) {
            const uint d = lane + i * WORKGROUP;
            if (d < head_dim) {
                float value = acc[i] * correction;
                for (uint j = low; j <= high; j++) value = fma(weights[j], v_cache.at[key_rows[j] + d], value);
                acc[i] = value;
            }
        }
        barrier();
    }

    [[unroll]] for (uint i = 0; i < MAX_HEAD_DIM / WORKGROUP; i++) {
        const uint d = lane + i * WORKGROUP;
        if (d < head_dim) y.at[row + d] = acc[i] / sum;
    }
}
