// Converts the attention of some heads that the NPU computed to partials (common/softmax.glsl) for
// attention_merge.comp. The complete result of a token is one partial: the values, with a largest score of 0 and a sum
// of weights of 1. All other partials of the token for these heads are empty.
//
//   attended       f32 [heads of the NPU][row_stride][head_dim]
//   merges         [tokens] of the slots of a token (common/softmax.glsl)
//   single, tiles  f32 [slots, num_heads, head_dim / 4 + 1, 4]
//
// All workgroups with the same y process one token; a lane writes four dimensions of a head, or its score and sum.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "softmax.glsl"

layout(local_size_x = 256) in;

layout(push_constant, std430) uniform Push {
    ReadVec4s attended;
    ReadUvec2s merges;
    WriteVec4s single;
    WriteVec4s tiles;
    uint num_heads;
    uint heads;
    uint fours;
    uint row_stride;
};

void main() {
    const uint token = gl_WorkGroupID.y, index = gl_GlobalInvocationID.x;
    const uint head = index / (fours + 1), lane = index % (fours + 1);
    if (head >= heads) return;
    const uvec2 merge = merges.at[token];
    const bool in_tiles = is_in_tiles(merge);
    const uint first = first_slot(merge);
    vec4 all = vec4(0.0, 1.0, 0.0, 0.0), none = vec4(LOWEST, 0.0, 0.0, 0.0);
    if (lane < fours) {
        all = attended.at[(head * row_stride + token) * fours + lane];
        none = vec4(0);
    }
    for (uint n = 0; n < merge.y; n++) {
        const uint at = ((first + n) * num_heads + head) * (fours + 1) + lane;
        const vec4 partial = n == 0 ? all : none;
        if (in_tiles)
            tiles.at[at] = partial;
        else
            single.at[at] = partial;
    }
}
