// The KV cache: blocks of rows [kv_head][token in block][head_dim], one row for each token and head. Define one of:
//
//   KV_F32, KV_F16  the numbers themselves
//   KV_INT8         integers -127..127; the rows of a block are followed by their scales, f32 [kv_head][token in block]
//
// Indices count groups of four elements ("fours").

#if defined(KV_F32)
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer ReadCache { vec4 at[]; };
#elif defined(KV_F16)
// An element has two fours. They are read together if a row has an even number of fours.
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer ReadCache { uvec4 at[]; };
#elif defined(KV_INT8)
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer ReadCache { uint at[]; };
#endif

// The index at which row `row` starts. A block has `rows` rows, a row has `fours` fours.
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
    const uint two = index / 2, first = index % 2 * 2;
    return vec4(unpackHalf2x16(cache.at[two][first]), unpackHalf2x16(cache.at[two][first + 1]));
#elif defined(KV_INT8)
    const int four = int(cache.at[index]);
    return vec4(bitfieldExtract(four, 0, 8), bitfieldExtract(four, 8, 8), bitfieldExtract(four, 16, 8), four >> 24);
#endif
}

// Reads two consecutive fours. The index of the first must be even.
void cache_two(ReadCache cache, uint index, out vec4 first, out vec4 second) {
#if defined(KV_F16)
    const uvec4 words = cache.at[index / 2];
    first = vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y));
    second = vec4(unpackHalf2x16(words.z), unpackHalf2x16(words.w));
#else
    first = cache_four(cache, index);
    second = cache_four(cache, index + 1);
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
