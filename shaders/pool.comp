// sums[c] = (fresh ? 0 : sums[c]) + sum over t of x[t, c]
//
//   x     f32 [tokens, width], rows x_stride apart        sums  f32 [width]
//
// The sums for mean pooling over the final hidden states. An invocation sums one column, token by token, so that the
// sum of a text has the same bits for every division of the text into steps.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 64) in;

layout(push_constant, std430) uniform Push {
    ReadFloats x;
    Floats sums;
    uint tokens;
    uint width;
    uint x_stride;
    uint fresh;
};

void main() {
    const uint c = gl_GlobalInvocationID.x;
    if (c >= width) return;
    float sum = fresh != 0 ? 0.0 : sums.at[c];
    for (uint t = 0; t < tokens; t++) sum += x.at[t * x_stride + c];
    sums.at[c] = sum;
}
