// x[t, i] = max(0, x[t, i] - (mean + deviations * sqrt(variance))), with the mean and the variance of x[t]: of normally
// distributed elements, a share that depends on `deviations` stays. x f32 [rows, width], rows stride apart (a multiple of 4).
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

layout(local_size_x = INVOCATIONS) in;

layout(push_constant, std430) uniform Push {
    Vec4s x;
    uint width;
    uint stride;
    float deviations;
};

void main() {
    const uint from = gl_WorkGroupID.x * stride / 4, last = width + 3 & ~3u;

    for (uint turn = 0; turn < TURNS; turn++) {
        float sum = 0.0;
        for (uint column = 4 * lane_of(turn); column < last; column += 4 * WORKGROUP) {
            const vec4 value = within(x.at[from + column / 4], column, width);
            sum += (value.x + value.y) + (value.z + value.w);
        }
        share(lane_of(turn), sum);
    }
    const float mean = workgroup_sum() / float(width);
    for (uint turn = 0; turn < TURNS; turn++) {
        float squares = 0.0;
        for (uint column = 4 * lane_of(turn); column < last; column += 4 * WORKGROUP)
            squares = add_squares(squares, within(x.at[from + column / 4] - mean, column, width));
        share(lane_of(turn), squares);
    }
    const float cutoff = mean + sqrt(workgroup_sum() / float(width)) * deviations;

    for (uint column = 4 * gl_LocalInvocationID.x; column < last; column += 4 * INVOCATIONS) {
        const uint at = from + column / 4;
        x.at[at] = max(vec4(0), x.at[at] - cutoff);
    }
}
