// sums[c] = (fresh ? 0 : sums[c]) + sum over t of x[t, c]
//
//   x     f32 [tokens, width], rows x_stride apart        sums  f32 [width]
//
// What mean pooling needs of the final hidden states. An invocation sums one column, token by token: a text that comes in
// several steps has the same sum, to the bit, however it is cut.
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
