// sums[c] += sum over rows t of x[t, c]^2
//
//   x     f32 [count, width], rows x_stride apart
//   sums  f32 [width]
//
// With `experts`, sums is f32 [number of experts, width], and `count` is the number of pairs of a token and one of its
// experts. Pair p adds a row to the sums of experts[p]: row positions[p], or without positions the row of its token,
// p / per_token.
//
// The second moments of a matrix's input columns. `unicorn quantize --calibrate` weights the errors of the matrix with
// them. An invocation sums one column of one matrix, in the order of the rows or pairs.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 64) in;

layout(push_constant, std430) uniform Push {
    ReadFloats x;
    Floats sums;
    ReadUints experts_or_none;
    ReadUints positions_or_none;
    uint count;
    uint width;
    uint x_stride;
    uint per_token;
};

void main() {
    const uint c = gl_GlobalInvocationID.x, matrix = gl_WorkGroupID.y;
    if (c >= width) return;
    const bool of_experts = uvec2(experts_or_none) != uvec2(0), in_order = uvec2(positions_or_none) != uvec2(0);
    float sum = 0.0;
    for (uint t = 0; t < count; t++) {
        uint row = t;
        if (of_experts) {
            if (experts_or_none.at[t] != matrix) continue;
            row = in_order ? positions_or_none.at[t] : t / per_token;
        }
        const float v = x.at[row * x_stride + c];
        sum = fma(v, v, sum);
    }
    sums.at[matrix * width + c] += sum;
}
