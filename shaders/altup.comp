// The streams of AltUp (https://arxiv.org/abs/2301.13310): a layer computes the first of four residual streams x_0 .. x_3,
// and these kernels update all of them before and after it.
//
//   m = tanh(router norm(x_0) / dim), four numbers
//
//   PREDICT  x_i = x_i + sum_j P[i, j] x_j with P = prediction m; predicted = x_0
//   CORRECT  x_i = p_i + (x_0 - predicted) (1 + c_i) with c = correction m; p_0 = predicted, and p_i = x_i otherwise;
//            first = x_0 * output_scale
//
//   x_i, predicted and first f32 [rows, dim], rows stride apart (a multiple of 4); router f32 [4, dim];
//   coefficients f32: prediction [4 * 4, 4] or correction [4, 4]; norm_weight and output_scale f32 [dim]
//
// A workgroup processes one row; a lane processes four columns of every 1024.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "lanes.glsl"
#include "reduce.glsl"
#include "columns.glsl"

layout(local_size_x = INVOCATIONS) in;

layout(push_constant, std430) uniform Push {
    Vec4s hidden;
    Vec4s second;
    Vec4s third;
    Vec4s fourth;
#if defined(PREDICT)
    WriteVec4s predicted;
#else
    ReadVec4s predicted;
#endif
    WriteVec4s first_or_none;
    ReadFloats router;
    ReadFloats norm_weight;
    ReadFloats coefficients;
    ReadFloats output_scale_or_none;
    uint dim;
    uint stride;
    float eps;
};

void main() {
    const uint from = gl_WorkGroupID.x * stride / 4, last = dim + 3 & ~3u;

    for (uint turn = 0; turn < TURNS; turn++) {
        float squares = 0.0;
        for (uint column = 4 * lane_of(turn); column < last; column += 4 * WORKGROUP)
            squares = add_squares(squares, within(hidden.at[from + column / 4], column, dim));
        share(lane_of(turn), squares);
    }
    const float factor = inversesqrt(workgroup_sum() / float(dim) + eps) / float(dim);

    vec4 numbers;
    [[unroll]] for (uint k = 0; k < 4; k++) {
        for (uint turn = 0; turn < TURNS; turn++) {
            float sum = 0.0;
            for (uint column = 4 * lane_of(turn); column < last; column += 4 * WORKGROUP) {
                const vec4 normed = within(hidden.at[from + column / 4], column, dim) * factor *
                                    four_at(norm_weight, 0, column, dim);
                const vec4 weights = four_at(router, k * dim, column, dim);
                sum = fma(normed.w, weights.w,
                          fma(normed.z, weights.z, fma(normed.y, weights.y, fma(normed.x, weights.x, sum))));
            }
            share(lane_of(turn), sum);
        }
        numbers[k] = tanh(workgroup_sum());
    }

#if defined(PREDICT)
    // Column j has the factors of stream j, one for each result.
    mat4 factors;
    [[unroll]] for (uint i = 0; i < 4; i++) {
        [[unroll]] for (uint j = 0; j < 4; j++) {
            vec4 row;
            [[unroll]] for (uint k = 0; k < 4; k++) row[k] = coefficients.at[4 * (4 * i + j) + k];
            factors[j][i] = dot(row, numbers);
        }
    }
    for (uint column = 4 * gl_LocalInvocationID.x; column < last; column += 4 * INVOCATIONS) {
        const uint at = from + column / 4;
        const mat4 x = mat4(hidden.at[at], second.at[at], third.at[at], fourth.at[at]);
        mat4 y;
        [[unroll]] for (uint i = 0; i < 4; i++) {
            vec4 sum = vec4(0);
            [[unroll]] for (uint j = 0; j < 4; j++) sum = fma(x[j], vec4(factors[j][i]), sum);
            y[i] = x[i] + sum;
        }
        hidden.at[at] = y[0];
        second.at[at] = y[1];
        third.at[at] = y[2];
        fourth.at[at] = y[3];
        predicted.at[at] = y[0];
    }
#else
    vec4 factors;
    [[unroll]] for (uint i = 0; i < 4; i++) {
        vec4 row;
        [[unroll]] for (uint k = 0; k < 4; k++) row[k] = coefficients.at[4 * i + k];
        factors[i] = dot(row, numbers) + 1.0;
    }
    for (uint column = 4 * gl_LocalInvocationID.x; column < last; column += 4 * INVOCATIONS) {
        const uint at = from + column / 4;
        const vec4 before = predicted.at[at], change = hidden.at[at] - before;
        const vec4 corrected = fma(change, vec4(factors[0]), before);
        hidden.at[at] = corrected;
        second.at[at] = fma(change, vec4(factors[1]), second.at[at]);
        third.at[at] = fma(change, vec4(factors[2]), third.at[at]);
        fourth.at[at] = fma(change, vec4(factors[3]), fourth.at[at]);
        first_or_none.at[at] = corrected * four_at(output_scale_or_none, 0, column, dim);
    }
#endif
}
