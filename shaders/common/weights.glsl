// Device layout of a weight matrix [rows, cols], in which each lane reads one row. src/tensor/layout.rs writes it, and
// docs/formats.md specifies it:
//
//   blocks  [ceil(rows/32)][ceil(cols/BLOCK)][32 rows] of 16 bytes: BLOCK consecutive weights of one row
//   scales  [ceil(rows/32)][items of a row][32 rows]
//
// So 32 lanes, one per row, read 512 consecutive bytes. Rows and columns beyond the matrix have zero weights. In int4,
// dword j holds columns 4j..4j+3 in its low nibbles and columns 16+4j..16+4j+3 in its high nibbles. Two masks unpack
// four columns each, in the order that dot products of packed bytes need. int5 and int6 are stored like int4, and each
// block is followed by the high bits of all 32 rows; kernels handle it as two blocks of 16 columns.
//
// Define one of WEIGHT_F32, WEIGHT_F16, WEIGHT_BF16, WEIGHT_INT8, WEIGHT_INT6, WEIGHT_INT5, WEIGHT_INT4, and for
// integers q one of
//   SCALES_ROW              item: f16 s, one for each row                     w = s q
//   SCALES_SYMMETRIC        item: f16 s, one for each group of columns        w = s q
//   SCALES_ZERO_POINT       item: f16 s, f16 z, one for each group            w = s (q - z)
//   SCALES_AFFINE           item: f32 s, f32 m, one for each group            w = s q + m
//   SCALES_HALF_AFFINE      item: f16 s, f16 m, one for each group            w = s q + m
//   SCALES_SUPER            items for each 256 columns: f16 d, f16 e; then i8 c, u8 n for each group
//                                                                             w = (d c) q - e n
//   SCALES_SUPER_SYMMETRIC  items for each 256 columns: f16 d; then i8 c for each group
//                                                                             w = (d c) q
// If the formula is only w = s q, int4, int5 and int6 store q + 8, q + 16 and q + 32.

#if defined(WEIGHT_F32)
const uint BLOCK = 4;
#elif defined(WEIGHT_F16) || defined(WEIGHT_BF16)
const uint BLOCK = 8;
#elif defined(WEIGHT_INT8) || defined(WEIGHT_INT6) || defined(WEIGHT_INT5)
const uint BLOCK = 16;
#elif defined(WEIGHT_INT4)
const uint BLOCK = 32;
#endif
const uint TILE_ROWS = 32;

// SHIFTED: schemes with an offset for each group. SCALED_BY_GROUP: schemes with a scale for each group of columns.
#if defined(SCALES_ZERO_POINT) || defined(SCALES_AFFINE) || defined(SCALES_HALF_AFFINE) || defined(SCALES_SUPER)
#define SHIFTED
#endif
#if defined(SHIFTED) || defined(SCALES_SYMMETRIC) || defined(SCALES_SUPER_SYMMETRIC)
#define SCALED_BY_GROUP
#endif

// The number that is added to an integer before it is stored.
#if defined(SHIFTED) || defined(WEIGHT_INT8)
const int BIAS = 0;
#elif defined(WEIGHT_INT6)
const int BIAS = 32;
#elif defined(WEIGHT_INT5)
const int BIAS = 16;
#elif defined(WEIGHT_INT4)
const int BIAS = 8;
#endif

// The high bits (one for int5, two for int6) of two blocks of weights whose low four bits are stored together. Byte j
// holds the high bits of the columns in byte j of each dword of low bits.
#if defined(WEIGHT_INT6)
#define HIGH_BITS uvec2
#elif defined(WEIGHT_INT5)
#define HIGH_BITS uint
#endif

// One block of every row of a tile. Here and below, an index that all lanes share is separate from the lane's own
// index, so that the compiler can keep the shared index in scalar registers.
struct BlockRow {
    uvec4 lanes[TILE_ROWS];
#if defined(HIGH_BITS)
    HIGH_BITS high[TILE_ROWS];
#endif
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Blocks { BlockRow at[]; };

// An item of the scales, for all lanes of a tile: pairs of f16 or f32, bytes, or single f16.
struct ScaleRow {
#if defined(SCALES_ZERO_POINT) || defined(SCALES_HALF_AFFINE)
    uint words[TILE_ROWS];
#elif defined(SCALES_AFFINE)
    uvec2 words[TILE_ROWS];
#elif defined(SCALES_SUPER_SYMMETRIC)
    uint words[TILE_ROWS / 4];
#else
    uint words[TILE_ROWS / 2];
#endif
};
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Scales { ScaleRow at[]; };

#if defined(HIGH_BITS)
// Unpacks the first or the second of two blocks, to a byte for each weight.
uvec4 bytes_of(uvec4 low, HIGH_BITS high, uint second) {
#if defined(WEIGHT_INT6)
    const uint above = second == 0 ? high.x : high.y, mask = 0x30303030u, bits = 2;
#else
    const uint above = high >> 4 * second, mask = 0x10101010u, bits = 1;
#endif
    uvec4 bytes;
    [[unroll]] for (uint i = 0; i < 4; i++) {
        const uint at = bits * i;
        const uint moved = at < 4 ? above << (4 - at) : above >> (at - 4);
        bytes[i] = (low[i] >> 4 * second & 0x0f0f0f0fu) | (moved & mask);
    }
    return bytes;
}
#endif

// Block b of row `lane` of a tile.
uvec4 block_at(Blocks blocks, uint tile, uint b, uint lane, uint blocks_per_row) {
#if defined(HIGH_BITS)
    const uint row = tile * ((blocks_per_row + 1) / 2) + b / 2;
    return bytes_of(blocks.at[row].lanes[lane], blocks.at[row].high[lane], b % 2);
#else
    return blocks.at[tile * blocks_per_row + b].lanes[lane];
#endif
}

// Four weights of a block, unscaled: columns 4i..4i+3 of the block, i < BLOCK / 4.
vec4 block_weights(uvec4 block, uint i) {
#if defined(WEIGHT_F32)
    return uintBitsToFloat(block);
#elif defined(WEIGHT_F16)
    return vec4(unpackHalf2x16(block[2 * i]), unpackHalf2x16(block[2 * i + 1]));
#elif defined(WEIGHT_BF16)
    uint lo = block[2 * i], hi = block[2 * i + 1];
    return uintBitsToFloat(uvec4(lo << 16, lo & 0xffff0000u, hi << 16, hi & 0xffff0000u));
#elif defined(WEIGHT_INT8)
    int w = int(block[i]);
    return vec4(bitfieldExtract(w, 0, 8), bitfieldExtract(w, 8, 8), bitfieldExtract(w, 16, 8), w >> 24);
#else
#if defined(WEIGHT_INT4)
    uint w = (i < 4 ? block[i] : block[i - 4] >> 4) & 0x0f0f0f0fu;
#else
    uint w = block[i];
#endif
    vec4 q = vec4(w & 0xffu, (w >> 8) & 0xffu, (w >> 16) & 0xffu, w >> 24);
    if (BIAS != 0) q -= float(BIAS);
    return q;
#endif
}

#if defined(SCALES_ROW)
// The f16 of a lane, in item `item` of a plane of f16.
float half_of(Scales plane, uint item, uint lane) {
    return unpackHalf2x16(plane.at[item].words[lane / 2] >> 16 * (lane & 1u)).x;
}
#endif

#if defined(SCALED_BY_GROUP)
// The words that contain the scale of block b of row `lane` of a tile. Kernels load them some time before they use
// them.
uvec2 scale_words(Scales scales, uint tile, uint b, uint lane, uint blocks_per_row, uint blocks_per_scale) {
    const uint group = b / blocks_per_scale;
#if defined(SCALES_SUPER)
    const uint blocks_per_record = 256 / BLOCK, groups = blocks_per_record / blocks_per_scale;
    const uint records = (blocks_per_row + blocks_per_record - 1) / blocks_per_record;
    // A record is 32 dwords of (d, e), then 32 halves of (c, n) for each group. Indices count 16 dwords.
    const uint record = (tile * records + b / blocks_per_record) * (2 + groups);
    return uvec2(scales.at[record + lane / 16].words[lane % 16],
                 scales.at[record + 2 + group % groups].words[lane / 2]);
#elif defined(SCALES_SUPER_SYMMETRIC)
    const uint blocks_per_record = 256 / BLOCK, groups = blocks_per_record / blocks_per_scale;
    const uint records = (blocks_per_row + blocks_per_record - 1) / blocks_per_record;
    // A record is 32 halves d, then 32 bytes c for each group. Indices count 8 dwords.
    const uint record = (tile * records + b / blocks_per_record) * (2 + groups);
    return uvec2(scales.at[record + lane / 16].words[lane % 16 / 2],
                 scales.at[record + 2 + group % groups].words[lane / 4]);
#else
    const uint groups = (blocks_per_row + blocks_per_scale - 1) / blocks_per_scale;
    const uint item = tile * groups + group;
#if defined(SCALES_SYMMETRIC)
    return uvec2(scales.at[item].words[lane / 2], 0);
#elif defined(SCALES_ZERO_POINT) || defined(SCALES_HALF_AFFINE)
    return uvec2(scales.at[item].words[lane], 0);
#elif defined(SCALES_AFFINE)
    return scales.at[item].words[lane];
#endif
#endif
}

// Decodes the words of a scale: (s, m) of w = s q + m.
vec2 scale_of_words(uvec2 words, uint lane) {
#if defined(SCALES_SYMMETRIC)
    return vec2(unpackHalf2x16(words.x >> 16 * (lane & 1u)).x, 0.0);
#elif defined(SCALES_ZERO_POINT)
    const vec2 pair = unpackHalf2x16(words.x);
    return vec2(pair.x, -(pair.x * pair.y));
#elif defined(SCALES_HALF_AFFINE)
    return unpackHalf2x16(words.x);
#elif defined(SCALES_SUPER_SYMMETRIC)
    const float d = unpackHalf2x16(words.x >> 16 * (lane & 1u)).x;
    return vec2(d * float(bitfieldExtract(int(words.y), 8 * int(lane & 3u), 8)), 0.0);
#elif defined(SCALES_AFFINE)
    return uintBitsToFloat(words);
#elif defined(SCALES_SUPER)
    const vec2 outer = unpackHalf2x16(words.x);
    const uint pair = words.y >> 16 * (lane & 1u);
    const float c = float(bitfieldExtract(int(pair), 0, 8)), n = float((pair >> 8) & 0xffu);
    return vec2(outer.x * c, -(outer.y * n));
#endif
}

vec2 block_scale(Scales scales, uint tile, uint b, uint lane, uint blocks_per_row, uint blocks_per_scale) {
    return scale_of_words(scale_words(scales, tile, b, lane, blocks_per_row, blocks_per_scale), lane);
}
#endif
