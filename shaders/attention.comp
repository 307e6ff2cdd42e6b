// Causal attention over a sequence's paged KV cache, optionally with a sliding window. The tokens of an image also see the
// tokens after them, to the end of their image. Computes partial results of some tokens over some keys ("partials", common/softmax.glsl), which attention_merge.comp merges.
//
//   q  f32 [tokens, num_kv_heads * GROUP, HEAD_DIM], after QK-norm, RoPE and the query scale
//   k_cache, v_cache  blocks of keys and of values (common/kv.glsl)
//   block_tables [sequences][max_blocks]
//   partials  f32 [slots, num_kv_heads * GROUP, HEAD_DIM / 4 + 1, 4]: values; then largest score, sum of weights
//   window  number of keys that a token sees up to its own; 0: all
//
// A workgroup processes an item and a KV head, counted from `first_kv_head`. An item is some neighbouring tokens of one
// sequence and some neighbouring splits of its keys. The workgroup processes the splits in order, and writes one
// partial for each token. A row is one query head of one token.
//
// Two implementations:
//
//   common/attention_by_lanes.glsl   lanes compute scores and values in f32; TEAMS teams of 64 lanes
//   common/attention_in_tiles.glsl   IN_TILES: subgroups multiply tiles of f16. Its results are rounded differently
#version 460
#extension GL_GOOGLE_include_directive : require
#if defined(IN_TILES)
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#else
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif
#include "memory.glsl"
#include "kv.glsl"
#include "softmax.glsl"

#if defined(IN_TILES)
layout(local_size_x = 32, local_size_y = 4) in;
#else
layout(local_size_x = 64 * TEAMS) in;
#endif

layout(constant_id = 0) const uint GROUP = 1;
layout(constant_id = 1) const uint HEAD_DIM = 64;
layout(constant_id = 2) const uint ROWS = 1;
const uint FOURS = HEAD_DIM / 4;

struct Item {
    // Row of the first token in q, number of tokens, position of the first token, and row of the sequence in
    // block_tables.
    uint token;
    uint tokens;
    uint position;
    uint sequence;
    uint first_split;
    uint splits;
    // Slot of the first token's partial, and the distance to the slot of the next token.
    uint slot;
    uint stride;
    // The last position that all tokens see. Without an image, it is 0, and each token sees up to its own position.
    uint sees_to;
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Items { Item at[]; };

layout(push_constant, std430) uniform Push {
    ReadVec4s q;
    ReadCache k_cache;
    ReadCache v_cache;
    Items items;
    ReadUints block_tables;
    Vec4s partials;
    uint num_kv_heads;
    uint block_size;
    uint max_blocks;
    uint window;
    uint split_unit;
    // The KV head of the workgroups with y = 0.
    uint first_kv_head;
};

// The last position that a token of an item sees, and that any of them does.
uint last_seen(Item item, uint token) { return max(item.position + token, item.sees_to); }
uint last_seen_by_any(Item item) { return last_seen(item, item.tokens - 1); }

// The first position that a token of an item sees.
uint first_seen(Item item, uint token) {
    const uint position = item.position + token;
    return window > 0 && position >= window ? position - window + 1 : 0;
}

// The number, among all partials, of the partial of a row of an item: a query head of one of its tokens.
uint partial_at(Item item, uint kv_head, uint row) {
    const uint slot = item.slot + row / GROUP * item.stride;
    return (slot * num_kv_heads + kv_head) * GROUP + row % GROUP;
}

// Stores four values of a row's partial, joined with those of the item's splits before split `n`, whose score is
// `earlier`. Returns the joined score.
vec2 store_partial(uint at, uint four, uint n, vec2 earlier, vec4 values, vec2 score) {
    if (n > 0) {
        vec4 all = partials.at[at + four];
        join(all, earlier, values, score);
        values = all;
        score = earlier;
    }
    partials.at[at + four] = values;
    if (four == 0) partials.at[at + FOURS] = vec4(score, 0.0, 0.0);
    return score;
}

#if defined(IN_TILES)
#include "attention_in_tiles.glsl"
#else
#include "attention_by_lanes.glsl"
#endif
