// activated(x[t, i] + bias[i]); x f32 [rows, width], rows stride apart; bias f32 [width]. SILU chooses the activation
// (common/activation.glsl).
//
//   default  writes the result to x, in place
//   INT8     writes the quantized result to blocks and scales (common/fast.glsl)
//   BOTH     writes both
//
// All workgroups with the same y process one row; a lane processes four columns.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "lanes.glsl"
#include "fast.glsl"
#include "quantize.glsl"

layout(constant_id = 0) const uint SILU = 0;
#include "activation.glsl"

layout(local_size_x = INVOCATIONS) in;

layout(push_constant, std430) uniform Push {
    Vec4s x;
    ReadFloats bias;
    WriteBlocks blocks;
    WriteScales scales;
    uint width;
    uint stride;
    // Number of rows that the blocks have room for, including padding.
    uint padded;
};

void main() {
    const uint row = gl_WorkGroupID.y, first = gl_WorkGroupID.x * 4 * WORKGROUP;
    for (uint turn = 0; turn < TURNS && first + turn * 4 * INVOCATIONS < width; turn++) {
        const uint column = first + 4 * lane_of(turn);
        vec4 value = vec4(0);
        if (column < width) {
            const uint at = (row * stride + column) / 4;
            const vec4 four = x.at[at];
            // Memory beyond the row may contain any values.
            [[unroll]] for (uint j = 0; j < 4; j++) {
                if (column + j < width) value[j] = activated(four[j] + bias.at[column + j]);
            }
#ifndef INT8
            x.at[at] = value;
#endif
        }
#if defined(INT8) || defined(BOTH)
        quantize_four(blocks, scales, padded, row, column, width, value);
#endif
    }
}
