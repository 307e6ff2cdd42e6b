// Converts the queries of neighbouring tokens to bf16, ordered by head, for the NPU, which computes the attention of
// these heads.
//
//   q        f32 [rows, num_heads, head_dim], after QK-norm, RoPE and the query scale
//   queries  bf16 [heads of the NPU][row_stride][head_dim]; 0 after the last row
//
// All workgroups with the same y process one head; a lane processes four dimensions of a row.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "bf16.glsl"

layout(local_size_x = 256) in;

layout(push_constant, std430) uniform Push {
    ReadVec4s q;
    WriteUvec2s queries;
    uint num_heads;
    uint fours;
    uint rows;
    uint row_stride;
};

void main() {
    const uint index = gl_GlobalInvocationID.x, head = gl_WorkGroupID.y;
    if (index >= row_stride * fours) return;
    const uint row = index / fours;
    vec4 four = vec4(0);
    if (row < rows) four = q.at[(row * num_heads + head) * fours + index % fours];
    queries.at[head * row_stride * fours + index] = bf16_four(four);
}
