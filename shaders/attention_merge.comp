// Computes the output of attention: merges the partials of each token (attention.comp) in the order of the keys, and
// divides by the sum of the weights.
//
//   single, tiles  f32 [slots, num_heads, HEAD_DIM / 4 + 1, 4]: partials of single tokens, and of tiles of tokens
//   merges  [tokens] of the slots of a token (common/softmax.glsl). A padding token has 0 slots
//   y  f32 [tokens, num_heads, HEAD_DIM]; 0 for a token without partials
//
// With INT8 the kernel writes y quantized, as blocks and scales (common/fast.glsl). With BOTH it writes y and the
// quantized form.
//
// All workgroups with the same y process one token; a lane processes four dimensions of a head.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "softmax.glsl"
#define WORKGROUP 256
#include "lanes.glsl"
#include "fast.glsl"
#include "quantize.glsl"

layout(local_size_x = INVOCATIONS) in;

layout(push_constant, std430) uniform Push {
    ReadVec4s single;
    ReadVec4s tiles;
    ReadUvec2s merges;
    WriteVec4s y;
    WriteBlocks blocks;
    WriteScales scales;
    uint num_heads;
    uint fours;
    // Number of rows that the blocks have room for, including padding.
    uint padded;
};

void main() {
    const uint token = gl_WorkGroupID.y, first_four = gl_WorkGroupID.x * WORKGROUP;
    const uvec2 merge = merges.at[token];
    const bool in_tiles = is_in_tiles(merge);
    const uint first = first_slot(merge);
    for (uint turn = 0; turn < TURNS && first_four + turn * INVOCATIONS < num_heads * fours; turn++) {
        const uint four = first_four + lane_of(turn), head = four / fours, lane = four % fours;
        vec4 value = vec4(0);
        if (head < num_heads) {
            vec4 values = vec4(0);
            vec2 score = vec2(LOWEST, 0.0);
            for (uint n = 0; n < merge.y; n++) {
                const uint at = ((first + n) * num_heads + head) * (fours + 1);
                const vec4 more = in_tiles ? tiles.at[at + lane] : single.at[at + lane];
                const vec2 more_score = in_tiles ? tiles.at[at + fours].xy : single.at[at + fours].xy;
                join(values, score, more, more_score);
            }
            value = attended(values, score);
#ifndef INT8
            y.at[token * num_heads * fours + four] = value;
#endif
        }
#if defined(INT8) || defined(BOTH)
        quantize_four(blocks, scales, padded, token, 4 * four, 4 * num_heads * fours, value);
#endif
    }
}
