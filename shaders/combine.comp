// Adds up what the experts of each token computed.
//
//   sum[t] = weights[t, 0] * x[positions[t, 0]] + weights[t, 1] * x[positions[t, 1]] + ..., in this order
//
//   default  y[t] = sum[t]
//   NORMED   y[t] = norm(y[t]) with `weight` + norm(sum[t]) with `sum_weight`
//
//   x f32 [pairs, dim]; y f32 [tokens, dim]; weights f32 and positions u32 [tokens, per_token]; dim is a multiple of 4.
//   norm is that of rms_norm.comp.
//
// A workgroup processes one token; a lane processes four columns of every 1024.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "lanes.glsl"
#include "reduce.glsl"
#include "columns.glsl"

layout(local_size_x = INVOCATIONS) in;

layout(constant_id = 0) const uint NORMED = 0;

layout(push_constant, std430) uniform Push {
    ReadVec4s x;
    ReadFloats weights;
    ReadUints positions;
    ReadVec4s weight_or_none;
    ReadVec4s sum_weight_or_none;
    Vec4s y;
    uint dim;
    uint per_token;
    float eps;
    float sum_eps;
};

// The weighted sum of the i-th four columns.
vec4 sum_at(uint i) {
    const uint first = gl_WorkGroupID.x * per_token;
    vec4 sum = vec4(0);
    for (uint r = 0; r < per_token; r++) {
        const vec4 value = x.at[positions.at[first + r] * (dim / 4) + i];
        sum = r == 0 ? weights.at[first] * value : fma(vec4(weights.at[first + r]), value, sum);
    }
    return sum;
}

void main() {
    const uint fours = dim / 4, to = gl_WorkGroupID.x * fours;
    float factor = 1.0, sum_factor = 1.0;
    if (NORMED == 1) {
        for (uint turn = 0; turn < TURNS; turn++) {
            float squares = 0.0;
            for (uint i = lane_of(turn); i < fours; i += WORKGROUP) squares = add_squares(squares, y.at[to + i]);
            share(lane_of(turn), squares);
        }
        factor = inversesqrt(workgroup_sum() / float(dim) + eps);
        for (uint turn = 0; turn < TURNS; turn++) {
            float squares = 0.0;
            for (uint i = lane_of(turn); i < fours; i += WORKGROUP) squares = add_squares(squares, sum_at(i));
            share(lane_of(turn), squares);
        }
        sum_factor = inversesqrt(workgroup_sum() / float(dim) + sum_eps);
    }
    for (uint i = gl_LocalInvocationID.x; i < fours; i += INVOCATIONS) {
        vec4 value = sum_at(i);
        if (NORMED == 1)
            value = y.at[to + i] * factor * weight_or_none.at[i] + value * sum_factor * sum_weight_or_none.at[i];
        y.at[to + i] = value;
    }
}
