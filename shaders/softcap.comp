// x[t, i] = cap * tanh(x[t, i] / cap), in place; f32 [rows, width], rows stride apart. For |x / cap| above 10 the result is
// cap in f32.
//
// tanh u = 1 - 2 / (1 + exp(2u)), because the precision of tanh in Vulkan is low. u is clamped, so that exp does not
// overflow: Vulkan does not guarantee support of infinities.
//
// All workgroups with the same y process one row; an invocation processes four columns.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 256) in;

layout(push_constant, std430) uniform Push {
    Vec4s x;
    uint width;
    uint stride;
    float cap;
};

void main() {
    const uint column = (gl_WorkGroupID.x * 256 + gl_LocalInvocationID.x) * 4;
    if (column >= width) return;
    const uint at = (gl_WorkGroupID.y * stride + column) / 4;
    const vec4 u = clamp(x.at[at] / cap, -10.0, 10.0);
    x.at[at] = cap * (1.0 - 2.0 / (1.0 + exp(2.0 * u)));
}
