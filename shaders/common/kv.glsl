// The KV cache: blocks of the keys or of the values of some tokens ("block_size") in all KV heads.
//
//   values  [kv_head][token in block][head_dim]
//   keys    [kv_head][head_dim / unit][token in block][unit], with a unit of up to 16 bytes. In attention, each lane
//           reads a key of its own, so that neighbouring lanes read neighbouring bytes
//
// Define one of:
//
//   KV_F32, KV_F16  the numbers themselves
//   KV_INT8         integers -127..127. The scales of a block follow its integers: f32 [kv_head][token in block], padded
//                   to a multiple of 16 bytes
//
// Indices count groups of four elements ("fours"). KvDtype in src/tensor/mod.rs has the same sizes.

// KEY_UNIT is the number of fours in a unit of a key with `fours` fours. It is a macro, because a call of a function is
// no specialization constant.
#if defined(KV_F32)
#define KEY_UNIT(fours) 1
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer ReadCache { vec4 at[]; };
#elif defined(KV_F16)
// An element has two fours. They are read together if a row has an even number of fours.
#define KEY_UNIT(fours) (2 - (fours) % 2)
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer ReadCache { uvec4 at[]; };
#elif defined(KV_INT8)
#define KEY_UNIT(fours) ((fours) % 4 == 0 ? 4 : 1)
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer ReadCache { uint at[]; };
#endif

// The index at which block `block` starts. A block has `rows` rows, a row has `fours` fours.
uint cache_block(uint block, uint rows, uint fours) {
#if defined(KV_INT8)
    return block * (rows * fours + (rows + 3) / 4 * 4);
#else
    return block * rows * fours;
#endif
}

// The index of four `four` of a key. `start` is the index at which its block starts.
uint key_at(uint start, uint head, uint token, uint four, uint block_size, uint fours) {
    const uint unit = KEY_UNIT(fours);
    return start + head * block_size * fours + (four / unit * block_size + token) * unit + four % unit;
}

// The index of four `four` of a value.
uint value_at(uint start, uint head, uint token, uint four, uint block_size, uint fours) {
    return start + (head * block_size + token) * fours + four;
}

uint cache_at(bool is_key, uint start, uint head, uint token, uint four, uint block_size, uint fours) {
    return is_key ? key_at(start, head, token, four, block_size, fours)
                  : value_at(start, head, token, four, block_size, fours);
}

// Four int8.
vec4 four_of(uint word) {
    const int four = int(word);
    return vec4(bitfieldExtract(four, 0, 8), bitfieldExtract(four, 8, 8), bitfieldExtract(four, 16, 8), four >> 24);
}

// Four f16.
vec4 four_of(uvec2 words) { return vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y)); }

vec4 cache_four(ReadCache cache, uint index) {
#if defined(KV_F32)
    return cache.at[index];
#elif defined(KV_F16)
    const uint two = index / 2, first = index % 2 * 2;
    return four_of(uvec2(cache.at[two][first], cache.at[two][first + 1]));
#elif defined(KV_INT8)
    return four_of(cache.at[index]);
#endif
}

// Reads two consecutive fours. The index of the first must be even.
void cache_two(ReadCache cache, uint index, out vec4 first, out vec4 second) {
#if defined(KV_F16)
    const uvec4 words = cache.at[index / 2];
    first = four_of(words.xy);
    second = four_of(words.zw);
#else
    first = cache_four(cache, index);
    second = cache_four(cache, index + 1);
#endif
}

#if defined(KV_INT8)
// The index of the scale of a row.
uint cache_scale_at(uint start, uint head, uint token, uint block_size, uint rows, uint fours) {
    return start + rows * fours + head * block_size + token;
}
#endif
