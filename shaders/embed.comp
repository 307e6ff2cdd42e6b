// out[t, :] = E[id(t), :] * scale
//
//   E    [vocab, cols], packed (common/weights.glsl), in shards of rows_per_shard rows; `shards` lists their
//        addresses
//   ids  [tokens]: a token id, or 1 << 31 | slot for the id last sampled in that slot
//   out  f32 [tokens, cols], rows out_stride apart
//
// A workgroup copies one token's row, an invocation every 64th block of it.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "weights.glsl"

layout(local_size_x = 64) in;

struct Shard {
    uvec2 blocks;
    uvec2 scales;
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Shards { Shard at[]; };

layout(push_constant, std430) uniform Push {
    Shards shards;
    ReadUints ids;
    ReadUints sampled;
    WriteFloats embedded;
    uint rows_per_shard;
    uint cols;
    uint out_stride;
    // int4: blocks that share one scale (group / 32).
    uint blocks_per_scale;
    float scale;
};

void main() {
    const uint token = gl_WorkGroupID.x;
    uint id = ids.at[token];
    if (id >> 31 != 0) id = sampled.at[id & 0x7fffffffu];
    const Shard shard = shards.at[id / rows_per_shard];
    Blocks blocks = Blocks(shard.blocks);
    ReadUints scales = ReadUints(shard.scales);
    const uint row = id % rows_per_shard, tile = row / TILE_ROWS, lane = row % TILE_ROWS;
    const uint blocks_per_row = (cols + BLOCK - 1) / BLOCK;

    for (uint b = gl_LocalInvocationID.x; b < blocks_per_row; b += 64) {
        const uvec4 block = blocks.at[(tile * blocks_per_row + b) * TILE_ROWS + lane];
#if defined(WEIGHT_INT8)
        const float block_scale = scale_at(scales, row);
#elif defined(WEIGHT_INT4)
        const uint scales_per_row = (blocks_per_row + blocks_per_scale - 1) / blocks_per_scale;
        const float block_scale =
            scale_at(scales, (tile * scales_per_row + b / blocks_per_scale) * TILE_ROWS + lane);
#else
        const float block_scale = 1.0;
#endif
        for (uint i = 0; i < BLOCK / 4; i++) {
            const vec4 w = block_weights(block, i);
            [[unroll]] for (uint j = 0; j < 4; j++) {
                const uint k = b * BLOCK + 4 * i + j;
                // Dequantized first, then scaled: the order of the reference.
                if (k < cols) embedded.at[token * out_stride + k] = (w[j] * block_scale) * scale;
            }
        }
    }
}
