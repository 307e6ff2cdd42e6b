// The first and the last step of a model with four residual streams. Each of x_1 .. x_3 is brought to the size of the
// first stream:
//
//   f_i = sqrt(mean(hidden^2)) / sqrt(max(mean(x_i^2), 1e-5))
//
//   SPREAD  x_i = x_i * f_i
//   MERGE   hidden = (hidden + sum_i x_i * f_i) / 4
//
//   hidden and x_i f32 [rows, dim], rows stride apart (a multiple of 4)
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

#if defined(SPREAD)
#define Hidden ReadVec4s
#define Stream Vec4s
#else
#define Hidden Vec4s
#define Stream ReadVec4s
#endif

layout(push_constant, std430) uniform Push {
    Hidden hidden;
    Stream second;
    Stream third;
    Stream fourth;
    uint dim;
    uint stride;
};

// The mean square of a row.
#define MEAN_SQUARE(x, result)                                                                                        \
    for (uint turn = 0; turn < TURNS; turn++) {                                                                       \
        float squares = 0.0;                                                                                          \
        for (uint column = 4 * lane_of(turn); column < last; column += 4 * WORKGROUP)                                 \
            squares = add_squares(squares, within(x.at[from + column / 4], column, dim));                             \
        share(lane_of(turn), squares);                                                                                \
    }                                                                                                                 \
    const float result = workgroup_sum() / float(dim);

void main() {
    const uint from = gl_WorkGroupID.x * stride / 4, last = dim + 3 & ~3u;
    MEAN_SQUARE(hidden, of_hidden)
    MEAN_SQUARE(second, of_second)
    MEAN_SQUARE(third, of_third)
    MEAN_SQUARE(fourth, of_fourth)
    const vec3 factors = sqrt(of_hidden) / sqrt(max(vec3(of_second, of_third, of_fourth), 1e-5));

    for (uint column = 4 * gl_LocalInvocationID.x; column < last; column += 4 * INVOCATIONS) {
        const uint at = from + column / 4;
        const vec4 x = second.at[at] * factors.x, y = third.at[at] * factors.y, z = fourth.at[at] * factors.z;
#if defined(SPREAD)
        second.at[at] = x;
        third.at[at] = y;
        fourth.at[at] = z;
#else
        hidden.at[at] = ((hidden.at[at] + x) + (y + z)) * 0.25;
#endif
    }
}
