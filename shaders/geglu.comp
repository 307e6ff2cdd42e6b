// gate[i] = gelu_tanh(gate[i]) * up[i], i < count; f32, in place.
//
// gelu_tanh(g) = g/2 (1 + tanh u) = g / (1 + exp(-2u)), u = sqrt(2/pi) (g + 0.044715 g^3): the second form has no
// tanh, whose Vulkan precision is loose. Below -10 it is 0 in f32, above 10 it is g: u is taken of the clamped g, so that
// exp neither overflows nor has to be right about infinity, which Vulkan does not promise.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 256) in;

layout(push_constant, std430) uniform Push {
    Floats gate;
    ReadFloats up;
    uint count;
};

void main() {
    for (uint i = gl_GlobalInvocationID.x; i < count; i += gl_NumWorkGroups.x * 256) {
        const float g = gate.at[i];
        const float c = clamp(g, -10.0, 10.0);
        const float u = 0.7978845608028654 * (c + 0.044715 * c * c * c);
        gate.at[i] = (g < -10.0 ? g * 0.0 : g / (1.0 + exp(-2.0 * u))) * up.at[i];
    }
}
