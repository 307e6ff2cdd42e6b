// hidden[t] = hidden[t] + x[t] + bias, without x if RESIDUAL is 0, and then y[t, i] = (hidden[t, i] - mean) / sqrt(variance + eps) * weight[i] + shift[i],
// with the mean and the variance of hidden[t].
//
//   default  y f32
//   INT8     y quantized, as blocks and scales (common/fast.glsl)
//   BOTH     both
//
//   x, hidden and y f32 [rows, dim], rows stride apart (a multiple of 4); bias, weight and shift f32 [dim]
//
// A workgroup processes one row; a lane processes four columns of every 1024. The variance is computed from the
// differences to the mean: the difference of mean squares would lose digits.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "lanes.glsl"
#include "reduce.glsl"
#include "columns.glsl"
#include "fast.glsl"
#include "quantize.glsl"

layout(local_size_x = INVOCATIONS) in;

layout(constant_id = 0) const uint RESIDUAL = 1;

layout(push_constant, std430) uniform Push {
    ReadVec4s x_or_none;
    ReadFloats bias;
    Vec4s hidden;
    ReadFloats weight;
    ReadFloats shift;
    WriteVec4s y;
    WriteBlocks blocks;
    WriteScales scales;
    uint dim;
    uint stride;
    // Number of rows that the blocks have room for, including padding.
    uint padded;
    float eps;
};

void main() {
    const uint row = gl_WorkGroupID.x, from = row * stride / 4, last = dim + 3 & ~3u;

    for (uint turn = 0; turn < TURNS; turn++) {
        float sum = 0.0;
        for (uint column = 4 * lane_of(turn); column < last; column += 4 * WORKGROUP) {
            const uint at = from + column / 4;
            vec4 added = four_at(bias, 0, column, dim);
            if (RESIDUAL == 1) added = x_or_none.at[at] + added;
            const vec4 value = within(hidden.at[at] + added, column, dim);
            hidden.at[at] = value;
            sum += (value.x + value.y) + (value.z + value.w);
        }
        share(lane_of(turn), sum);
    }
    const float mean = workgroup_sum() / float(dim);
    // In all passes, the same invocation has these columns of `hidden`, so no barrier is needed.
    for (uint turn = 0; turn < TURNS; turn++) {
        float squares = 0.0;
        for (uint column = 4 * lane_of(turn); column < last; column += 4 * WORKGROUP) {
            const vec4 away = within(hidden.at[from + column / 4] - mean, column, dim);
            squares = add_squares(squares, away);
        }
        share(lane_of(turn), squares);
    }
    const float factor = inversesqrt(workgroup_sum() / float(dim) + eps);

    // When quantizing, all invocations of a workgroup must run to the end of the last block, because of barriers.
#if defined(INT8) || defined(BOTH)
    const uint end = (dim + 4 * INVOCATIONS - 1) / (4 * INVOCATIONS) * (4 * INVOCATIONS);
#else
    const uint end = last;
#endif
    for (uint column = 4 * gl_LocalInvocationID.x; column < end; column += 4 * INVOCATIONS) {
        vec4 normed = vec4(0);
        if (column < last) {
            normed = (hidden.at[from + column / 4] - mean) * factor * four_at(weight, 0, column, dim) + four_at(shift, 0, column, dim);
            normed = within(normed, column, dim);
#ifndef INT8
            y.at[from + column / 4] = normed;
#endif
        }
#if defined(INT8) || defined(BOTH)
        quantize_four(blocks, scales, padded, row, column, dim, normed);
#endif
    }
}
