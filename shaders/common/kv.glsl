// The KV cache: blocks of rows [kv_head][token in block][head_dim], one row for each token and head. Define one of
//
//   KV_F32, KV_F16  the numbers as they are
//   KV_INT8         integers -127..127; behind the rows of a block their scales, f32 [kv_head][token in block]
//
// A row is addressed in fours of elements.

#if defined(KV_F32)
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer ReadCache { vec4 at[]; };
#elif defined(KV_F16)
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer ReadCache { uvec2 at[]; };
#elif defined(KV_INT8)
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer ReadCache { uint at[]; };
#endif

// Where row `row` of the `rows` of a block starts; a row has `fours` fours.
uint cache_row(uint block, uint rows, uint row, uint fours) {
#if defined(KV_INT8)
    return block * rows * (fours + 1) + row * fours;
#else
    return (block * rows + row) * fours;
#endif
}

vec4 cache_four(ReadCache cache, uint index) {
#if defined(KV_F32)
    return cache.at[index];
#elif defined(KV_F16)
    const uvec2 pairs = cache.at[index];
    return vec4(unpackHalf2x16(pairs.x), unpackHalf2x16(pairs.y));
#elif defined(KV_INT8)
    const int four = int(cache.at[index]);
    return vec4(bitfieldExtract(four, 0, 8), bitfieldExtract(four, 8, 8), bitfieldExtract(four, 16, 8), four >> 24);
#endif
}

#if defined(KV_INT8)
// Index of a row's scale.
uint cache_scale_index(uint block, uint rows, uint row, uint fours) {
    return block * rows * (fours + 1) + rows * fours + row;
}

float cache_scale(ReadCache cache, uint block, uint rows, uint row, uint fours) {
    return uintBitsToFloat(cache.at[cache_scale_index(block, rows, row, fours)]);
}
#endif
