// patches[p, (c * patch + y) * patch + x] = pixels[row(p) * patch + y, column(p) * patch + x, c] * factor_c + shift_c
//
//   pixels   bytes [height, width, 3]: red, green and blue
//   patches  f32 [(height / patch) * (width / patch), 3 * patch * patch], row by row of the image, rows stride apart. The
//            elements between two rows become 0
//
// The rows are what a convolution, whose kernels are as far apart as they are wide, multiplies by its weights. All
// workgroups with the same y write one row; an invocation writes one element.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 64) in;

layout(push_constant, std430) uniform Push {
    ReadUints pixels;
    WriteFloats patches;
    uint width;
    uint patch_size;
    uint stride;
    float red_factor;
    float green_factor;
    float blue_factor;
    float red_shift;
    float green_shift;
    float blue_shift;
};

void main() {
    const uint element = gl_GlobalInvocationID.x, row = gl_WorkGroupID.y;
    if (element >= stride) return;
    const uint all = patch_size * patch_size, channel = element / all, in_channel = element % all;
    float value = 0.0;
    if (channel < 3) {
        const uint across = width / patch_size;
        const uint y = row / across * patch_size + in_channel / patch_size;
        const uint x = row % across * patch_size + in_channel % patch_size;
        const uint at = (y * width + x) * 3 + channel;
        const float level = float(pixels.at[at / 4] >> 8 * (at % 4) & 0xffu);
        const vec3 factors = vec3(red_factor, green_factor, blue_factor);
        const vec3 shifts = vec3(red_shift, green_shift, blue_shift);
        value = level * factors[channel] + shifts[channel];
    }
    patches.at[row * stride + element] = value;
}
