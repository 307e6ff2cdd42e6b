// Causal attention of each token over its sequence's paged KV cache, optionally in a sliding window.
//
//   q, y  f32 [tokens, num_kv_heads * GROUP, HEAD_DIM]; q already normed, rotated and scaled
//   k_cache, v_cache  blocks of rows [kv_head][token in block][HEAD_DIM] (common/kv.glsl)
//   block_tables [sequences][max_blocks]; sequence_of, positions [tokens]
//   window  keys a token sees, itself included; 0: all
//
// A workgroup takes one token and one KV head with its GROUP query heads, so that keys and values are read once for
// the group. It walks the keys in tiles of 64 that start at multiples of 64, with an online softmax. Lane j scores key
// j of a tile; then HEAD_DIM / 4 lanes hold four dimensions each and sum over every PARTS-th key, and at the end the
// parts are added in order. So the order of sums depends on the token's position alone, not on the batch or on how the
// prompt was cut into chunks (the maximum has no order: it may use subgroups of any size).
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "memory.glsl"
#include "kv.glsl"

const uint TILE = 64;
// Below every score, and far enough from the end of the range that a difference of two is finite.
const float LOWEST = -1e38;
layout(local_size_x = TILE) in;
layout(constant_id = 0) const uint GROUP = 1;
layout(constant_id = 1) const uint HEAD_DIM = 64;
// Lanes that hold one copy of the output, and how many copies there are.
const uint LANES = HEAD_DIM / 4;
const uint PARTS = TILE / LANES;

layout(push_constant, std430) uniform Push {
    ReadVec4s q;
    ReadCache k_cache;
    ReadCache v_cache;
    ReadUints positions;
    ReadUints sequence_of;
    ReadUints block_tables;
    WriteVec4s y;
    uint num_kv_heads;
    uint block_size;
    uint max_blocks;
    uint window;
};

// The queries while keys are walked, then each part's output: 1.5 KiB in all per head of a group, 16 heads at most.
shared vec4 query[GROUP][TILE];
shared float subgroup_maximum[GROUP][TILE];
shared float weights[GROUP][TILE];
shared uint key_rows[TILE];
#if defined(KV_INT8)
shared float value_scales[TILE];
#endif
shared float part_sum[GROUP][PARTS];

void main() {
    const uint token = gl_WorkGroupID.x, kv_head = gl_WorkGroupID.y, lane = gl_LocalInvocationID.x;
    const uint position = positions.at[token];
    const uint table = sequence_of.at[token] * max_blocks;
    const uint first = window > 0 && position >= window ? position - window + 1 : 0;
    const uint row = (token * num_kv_heads + kv_head) * GROUP * HEAD_DIM;

    if (lane < LANES) {
        [[unroll]] for (uint g = 0; g < GROUP; g++) query[g][lane] = q.at[row / 4 + g * LANES + lane];
    }
    barrier();

    const uint part = lane / LANES, dim = lane % LANES;
    float maximum[GROUP], sum[GROUP];
    vec4 acc[GROUP];
    [[unroll]] for (uint g = 0; g < GROUP; g++) {
        maximum[g] = LOWEST;
        sum[g] = 0.0;
        acc[g] = vec4(0);
    }

    for (uint tile = first / TILE * TILE; tile <= position; tile += TILE) {
        const uint key = tile + lane;
        float score[GROUP];
        [[unroll]] for (uint g = 0; g < GROUP; g++) score[g] = LOWEST;
        if (key >= first && key <= position) {
            const uint block = block_tables.at[table + key / block_size];
            const uint head_row = kv_head * block_size + key % block_size, rows = num_kv_heads * block_size;
            const uint key_row = cache_row(block, rows, head_row, LANES);
            key_rows[lane] = key_row;
#if defined(KV_INT8)
            const float scale = cache_scale(k_cache, block, rows, head_row, LANES);
            value_scales[lane] = cache_scale(v_cache, block, rows, head_row, LANES);
#endif
            [[unroll]] for (uint g = 0; g < GROUP; g++) score[g] = 0.0;
            for (uint i = 0; i < LANES; i++) {
                const vec4 b = cache_four(k_cache, key_row + i);
                [[unroll]] for (uint g = 0; g < GROUP; g++) {
                    const vec4 a = query[g][i];
                    score[g] = fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, score[g]))));
                }
            }
#if defined(KV_INT8)
            [[unroll]] for (uint g = 0; g < GROUP; g++) score[g] *= scale;
#endif
        }
        [[unroll]] for (uint g = 0; g < GROUP; g++) {
            const float highest = subgroupMax(score[g]);
            if (subgroupElect()) subgroup_maximum[g][gl_SubgroupID] = highest;
        }
        barrier();

        float correction[GROUP];
        [[unroll]] for (uint g = 0; g < GROUP; g++) {
            float tile_maximum = maximum[g];
            for (uint i = 0; i < gl_NumSubgroups; i++)
                tile_maximum = max(tile_maximum, subgroup_maximum[g][i]);
            correction[g] = exp(maximum[g] - tile_maximum);
            maximum[g] = tile_maximum;
            weights[g][lane] = exp(score[g] - tile_maximum);
        }
        barrier();

        // Keys outside [first, position] may never have been written: they are left out, not weighted by zero.
        const uint low = max(tile, first) - tile, high = min(tile + TILE - 1, position) - tile;
        [[unroll]] for (uint g = 0; g < GROUP; g++) {
            sum[g] *= correction[g];
            acc[g] *= correction[g];
        }
        if (part < PARTS) {
            for (uint j = (low + PARTS - 1 - part) / PARTS * PARTS + part; j <= high; j += PARTS) {
                vec4 value = cache_four(v_cache, key_rows[j] + dim);
#if defined(KV_INT8)
                value *= value_scales[j];
#endif
                [[unroll]] for (uint g = 0; g < GROUP; g++) {
                    const float weight = weights[g][j];
                    sum[g] += weight;
                    acc[g] = fma(vec4(weight), value, acc[g]);
                }
            }
        }
        barrier();
    }

    if (part < PARTS) {
        [[unroll]] for (uint g = 0; g < GROUP; g++) {
            query[g][part * LANES + dim] = acc[g];
            if (dim == 0) part_sum[g][part] = sum[g];
        }
    }
    barrier();
    if (lane < LANES) {
        [[unroll]] for (uint g = 0; g < GROUP; g++) {
            vec4 total = query[g][lane];
            float divisor = part_sum[g][0];
            [[unroll]] for (uint p = 1; p < PARTS; p++) {
                total += query[g][p * LANES + lane];
                divisor += part_sum[g][p];
            }
            y.at[row / 4 + g * LANES + lane] = total / divisor;
        }
    }
}
