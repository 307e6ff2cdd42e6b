// activated(gate[t, i]) * up[t, i]; gate and up f32 [rows, width], rows stride and up_stride apart. SILU chooses the activation
// (common/activation.glsl).
//
//   default  writes the result to gate, in place
//   INT8     writes the quantized result to blocks and scales (common/fast.glsl)
//   BOTH     writes both
//
// All workgroups with the same y process one row; a lane processes four columns.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "lanes.glsl"
#include "columns.glsl"
#if defined(INT8) || defined(BOTH)
#include "fast.glsl"
#include "quantize.glsl"
#define QUANTIZES
#else
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer WriteBlocks { uint at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) writeonly buffer WriteScales { uvec2 at[]; };
#endif

layout(constant_id = 0) const uint SILU = 0;
#include "activation.glsl"

layout(local_size_x = INVOCATIONS) in;

#if defined(INT8)
#define Gate ReadVec4s
#else
#define Gate Vec4s
#endif

layout(push_constant, std430) uniform Push {
    Gate gate;
    ReadVec4s up;
    WriteBlocks blocks;
    WriteScales scales;
    uint width;
    uint stride;
    uint up_stride;
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
            const vec4 g = gate.at[at], u = up.at[(row * up_stride + column) / 4];
            value = vec4(activated(g.x) * u.x, activated(g.y) * u.y, activated(g.z) * u.z, activated(g.w) * u.w);
            value = within(value, column, width);
#ifndef INT8
            gate.at[at] = value;
#endif
        }
#ifdef QUANTIZES
        quantize_four(blocks, scales, padded, row, column, width, value);
#endif
    }
}
