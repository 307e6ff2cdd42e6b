// out[t, :] = E[id(t), :] * scale
//
//   E    [vocab, cols], packed (common/weights.glsl), in shards of rows_per_shard rows; `shards` lists their addresses
//   ids  [tokens]: a token id, or 1 << 31 | slot for the id last sampled in that slot. An id beyond the
//        rows, which another model may have sampled, selects the row `beyond`
//   out  f32 [tokens, cols], rows out_stride apart
//
// A workgroup copies the row of one token; an invocation copies every 64th block of it.
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
    uint rows;
    uint beyond;
    uint cols;
    uint out_stride;
    // Number of blocks that share one scale (common/weights.glsl).
    uint blocks_per_scale;
    float scale;
};

void main() {
    const uint token = gl_WorkGroupID.x;
    uint id = ids.at[token];
    if (id >> 31 != 0) id = sampled.at[id & 0x7fffffffu];
    if (id >= rows) id = beyond;
    const Shard shard = shards.at[id / rows_per_shard];
    Blocks blocks = Blocks(shard.blocks);
    Scales scales = Scales(shard.scales);
    const uint row = id % rows_per_shard, tile = row / TILE_ROWS, lane = row % TILE_ROWS;
    const uint blocks_per_row = (cols + BLOCK - 1) / BLOCK;

    for (uint b = gl_LocalInvocationID.x; b < blocks_per_row; b += 64) {
        const uvec4 block = block_at(blocks, tile, b, lane, blocks_per_row);
#if defined(SCALES_ROW)
        const vec2 scale_shift = vec2(half_of(scales, tile, lane), 0.0);
#elif defined(SCALED_BY_GROUP)
        const vec2 scale_shift = block_scale(scales, tile, b, lane, blocks_per_row, blocks_per_scale);
#else
        const vec2 scale_shift = vec2(1.0, 0.0);
#endif
        for (uint i = 0; i < BLOCK / 4; i++) {
            const vec4 w = block_weights(block, i);
            [[unroll]] for (uint j = 0; j < 4; j++) {
                const uint k = b * BLOCK + 4 * i + j;
                // The order is fixed: the reference implementation dequantizes first, and then scales.
                if (k < cols) {
                    precise float value = w[j] * scale_shift.x;
                    value = value + scale_shift.y;
                    embedded.at[token * out_stride + k] = value * scale;
                }
            }
        }
    }
}
