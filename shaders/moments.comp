// sums[c] += sum over t of x[t, c]^2
//
//   x     f32 [tokens, width], rows x_stride apart        sums  f32 [width]
//
// The second moments of a matrix's input columns. `unicorn quantize --calibrate` weights the errors of the matrix with
// them. An invocation sums one column, in the order of the tokens.
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
};

void main() {
    const uint c = gl_GlobalInvocationID.x;
    if (c >= width) return;
    float sum = 0.0;
    for (uint t = 0; t < tokens; t++) {
        const float v = x.at[t * x_stride + c];
        sum = fma(v, v, sum);
    }
    sums.at[c] += sum;
}
