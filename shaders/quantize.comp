// blocks, scales = x [rows, width], quantized (common/fast.glsl). x is f32, with rows stride apart (a multiple of 4).
//
// All workgroups with the same y process one row; a lane processes four columns.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "fast.glsl"
#define WORKGROUP 256
#include "lanes.glsl"
#include "columns.glsl"
#include "quantize.glsl"

layout(local_size_x = INVOCATIONS) in;

layout(push_constant, std430) uniform Push {
    ReadVec4s x;
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
        if (column < width) value = within(x.at[(row * stride + column) / 4], column, width);
        quantize_four(blocks, scales, padded, row, column, width, value);
    }
}
