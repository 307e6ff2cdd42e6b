// y[i] = gelu_tanh(gate[i]) * up[i], i < count; f32. y may be gate.
//
// gelu_tanh(g) = g/2 (1 + tanh u) = g / (1 + exp(-2u)), u = sqrt(2/pi) (g + 0.044715 g^3): the second form has no
// tanh, whose Vulkan precision is loose, and goes to 0 or g where exp overflows or vanishes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 256) in;

layout(push_constant, std430) uniform Push {
    ReadFloats gate;
    ReadFloats up;
    WriteFloats y;
    uint count;
};

void main() {
    for (uint i = gl_GlobalInvocationID.x; i < count; i += gl_NumWorkGroups.x * 256) {
        const float g = gate.at[i];
        const float u = 0.7978845608028654 * (g + 0.044715 * g * g * g);
        y.at[i] = g / (1.0 + exp(-2.0 * u)) * up.at[i];
    }
}
