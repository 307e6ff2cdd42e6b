// Gathers keys and values of neighbouring positions of one sequence from its KV blocks, in bf16, for the NPU, which
// computes the attention of some KV heads.
//
//   k_cache, v_cache  blocks of keys and of values (common/kv.glsl)
//   blocks            the sequence's row of the block tables
//   keys, values      bf16 [KV heads of the NPU][key_stride][head_dim], from position `first_key`. They are 0 before
//                     `first_seen`, because the sequence may have freed those blocks, and after the last key
//
// All workgroups with the same y and z process the keys or the values of one KV head; a lane processes four dimensions
// of one key or value.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "kv.glsl"
#include "bf16.glsl"

layout(local_size_x = 256) in;

layout(push_constant, std430) uniform Push {
    ReadCache k_cache;
    ReadCache v_cache;
    ReadUints blocks;
    WriteUvec2s keys;
    WriteUvec2s values;
    uint num_kv_heads;
    uint block_size;
    uint fours;
    uint first_key;
    uint first_seen;
    // Number of keys, and the distance between two heads, in keys.
    uint count;
    uint key_stride;
};

void main() {
    const uint index = gl_GlobalInvocationID.x, kv_head = gl_WorkGroupID.y;
    const bool is_value = gl_WorkGroupID.z == 1;
    if (index >= key_stride * fours) return;
    const uint key = index / fours, position = first_key + key;
    vec4 four = vec4(0);
    if (key < count && position >= first_seen) {
        const uint rows = num_kv_heads * block_size, token = position % block_size;
        const uint start = cache_block(blocks.at[position / block_size], rows, fours);
        const uint from = cache_at(!is_value, start, kv_head, token, index % fours, block_size, fours);
        if (is_value)
            four = cache_four(v_cache, from);
        else
            four = cache_four(k_cache, from);
#if defined(KV_INT8)
        const uint scale_at = cache_scale_at(start, kv_head, token, block_size, rows, fours);
        four *= uintBitsToFloat(is_value ? v_cache.at[scale_at] : k_cache.at[scale_at]);
#endif
    }
    const uint to = kv_head * key_stride * fours + index;
    if (is_value)
        values.at[to] = bf16_four(four);
    else
        keys.at[to] = bf16_four(four);
}
