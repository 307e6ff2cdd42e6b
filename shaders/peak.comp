// out[i] = the sum of 32 independent chains of fused multiply-adds in f32. Each chain starts with a small number and
// computes x = x a + b, 4 * `rounds` times.
//
// Measures a device's rate of multiply-adds: no memory is read, and no chain waits for another. With a = b = 1/2 each
// chain converges to 1.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 256) in;

layout(push_constant, std430) uniform Push {
    WriteFloats result;
    uint rounds;
    float a;
    float b;
};

void main() {
    const uint i = gl_GlobalInvocationID.x;
    vec4 x[8];
    [[unroll]] for (int c = 0; c < 8; c++) x[c] = vec4(float(i & 1023u) + float(c));
    [[dont_unroll]] for (uint round = 0; round < rounds; round++) {
        [[unroll]] for (int step = 0; step < 4; step++)
            [[unroll]] for (int c = 0; c < 8; c++) x[c] = fma(x[c], vec4(a), vec4(b));
    }
    vec4 sum = vec4(0.0);
    [[unroll]] for (int c = 0; c < 8; c++) sum += x[c];
    result.at[i] = sum.x + sum.y + sum.z + sum.w;
}
