// norm(x)[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]
//
//   default   y[t] = norm(x[t])
//   GATHER    y[i] = norm(x[rows[i]])        (the final norm, of the rows whose logits are needed)
//   ADD       hidden[t] = (hidden[t] + norm(x[t])) * scale  (the residual add after a post-norm)
//   RESIDUAL  the same, and y[t] = norm(hidden[t]) with next_weight (the norm before the next matrices)
//
// Without POST_NORM, ADD and RESIDUAL add x[t] itself. With TWICE, RESIDUAL norms hidden[t] also with second_weight,
// into second_y and the second blocks and scales: a dense network and experts take the same rows.
//
// With INT8, variants that write y write it quantized, as blocks and scales (common/fast.glsl). With BOTH they write y
// and the quantized form.
//
//   x f32 [*, dim], rows x_stride apart; y and hidden f32, rows y_stride apart; weights f32 [dim]. Strides are
//   multiples of 4. A workgroup processes one row; a lane processes four columns of every 1024. All variants share all
//   computing code, so their results have the same bits.
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

#if defined(ADD) || defined(RESIDUAL)
layout(constant_id = 0) const uint POST_NORM = 1;
#else
const uint POST_NORM = 1;
#endif
#if defined(RESIDUAL)
layout(constant_id = 1) const uint TWICE = 0;
#endif

layout(push_constant, std430) uniform Push {
    ReadVec4s x;
    ReadFloats weight_or_none;
    ReadFloats next_weight;
    Vec4s hidden;
    WriteVec4s y;
    WriteBlocks blocks;
    WriteScales scales;
    ReadUints rows;
    ReadFloats second_weight_or_none;
    WriteVec4s second_y_or_none;
    WriteBlocks second_blocks_or_none;
    WriteScales second_scales_or_none;
    uint dim;
    uint x_stride;
    uint y_stride;
    // Number of rows that the blocks have room for, including padding.
    uint padded;
    float eps;
    float next_eps;
    // Factor of the sum in ADD and RESIDUAL.
    float scale;
};

// The factor of a row. Before the call, every lane must have shared its sum of squares.
float factor_of(float epsilon) { return inversesqrt(workgroup_sum() / float(dim) + epsilon); }

void main() {
    const uint out_row = gl_WorkGroupID.x;
#if defined(GATHER)
    const uint in_row = rows.at[out_row];
#else
    const uint in_row = out_row;
#endif
    const uint from = in_row * x_stride / 4, to = out_row * y_stride / 4, last = dim + 3 & ~3u;

    float factor = 1.0;
    if (POST_NORM == 1) {
        for (uint turn = 0; turn < TURNS; turn++) {
            float squares = 0.0;
            for (uint column = 4 * lane_of(turn); column < last; column += 4 * WORKGROUP)
                squares = add_squares(squares, within(x.at[from + column / 4], column, dim));
            share(lane_of(turn), squares);
        }
        factor = factor_of(eps);
    }

#if defined(ADD) || defined(RESIDUAL)
    for (uint turn = 0; turn < TURNS; turn++) {
        float squares = 0.0;
        for (uint column = 4 * lane_of(turn); column < last; column += 4 * WORKGROUP) {
            vec4 added = within(x.at[from + column / 4], column, dim);
            if (POST_NORM == 1) added = added * factor * four_at(weight_or_none, 0, column, dim);
            const vec4 sum = (within(hidden.at[to + column / 4], column, dim) + added) * scale;
            hidden.at[to + column / 4] = sum;
            squares = add_squares(squares, sum);
        }
        share(lane_of(turn), squares);
    }
#endif
#if defined(RESIDUAL)
    factor = factor_of(next_eps);
#endif
#ifndef ADD
    // When quantizing, all invocations of a workgroup must run to the end of the last block, because of barriers.
#if defined(INT8) || defined(BOTH)
    const uint end = (dim + 4 * INVOCATIONS - 1) / (4 * INVOCATIONS) * (4 * INVOCATIONS);
#else
    const uint end = last;
#endif
    for (uint column = 4 * gl_LocalInvocationID.x; column < end; column += 4 * INVOCATIONS) {
        vec4 normed = vec4(0);
#if defined(RESIDUAL)
        vec4 second = vec4(0);
#endif
        if (column < last) {
#if defined(RESIDUAL)
            // The same invocation wrote these columns of `hidden`, so no barrier is needed.
            const vec4 value = hidden.at[to + column / 4] * factor;
            normed = value * four_at(next_weight, 0, column, dim);
            if (TWICE == 1) second = value * four_at(second_weight_or_none, 0, column, dim);
#else
            normed = within(x.at[from + column / 4], column, dim) * factor * four_at(weight_or_none, 0, column, dim);
#endif
#ifndef INT8
            y.at[to + column / 4] = normed;
#if defined(RESIDUAL)
            if (TWICE == 1) second_y_or_none.at[to + column / 4] = second;
#endif
#endif
        }
#if defined(INT8) || defined(BOTH)
        quantize_four(blocks, scales, padded, out_row, column, dim, normed);
#if defined(RESIDUAL)
        if (TWICE == 1)
            quantize_four(second_blocks_or_none, second_scales_or_none, padded, out_row, column, dim, second);
#endif
#endif
    }
#endif
}
