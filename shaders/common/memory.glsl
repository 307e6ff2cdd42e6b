// Buffer reference types. Shaders get 64-bit device addresses as push constants and use no descriptors, because a
// weight may be larger than maxStorageBufferRange. The dispatching code (src/kernels) checks the bounds.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_EXT_control_flow_attributes : require

layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer ReadFloats { float at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer ReadVec4s { vec4 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Vec4s { vec4 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer ReadVec2s { vec2 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer ReadUints { uint at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer ReadUvec2s { uvec2 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer ReadUvec4s { uvec4 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Floats { float at[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Uints { uint at[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer WriteFloats { float at[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer WriteUints { uint at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) writeonly buffer WriteUvec2s { uvec2 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly buffer WriteUvec4s { uvec4 at[]; };
// The 64-bit sum of an address and `bytes`.
uvec2 address_after(uvec2 address, uint bytes) {
    const uint low = address.x + bytes;
    return uvec2(low, address.y + uint(low < bytes));
}

// For atomics.
layout(buffer_reference, std430, buffer_reference_align = 4) coherent buffer Words { uint at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly buffer WriteVec4s { vec4 at[]; };
