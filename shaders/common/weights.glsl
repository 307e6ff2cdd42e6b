// Device layout of a weight matrix [rows, cols], "lane = row"; src/tensor/layout.rs writes it, docs/formats.md specifies it:
//
//   blocks  [ceil(rows/32)][ceil(cols/BLOCK)][32 rows] of 16 bytes: BLOCK consecutive weights of one row
//   scales  [ceil(rows/32)][items of a row][32 rows]
//
// so that 32 lanes, one per row, read 512 consecutive bytes. Rows and columns beyond the matrix are zero weights.
// int4: dword j holds columns 4j..4j+3 in its low nibbles and 16+4j.. in its high nibbles; two masks unpack four
// columns each, in the order that dot products of packed bytes want.
//
// Define one of WEIGHT_F32, WEIGHT_F16, WEIGHT_BF16, WEIGHT_INT8, WEIGHT_INT4, and for integers q one of
//   SCALES_ROW         item: f16 s, one for each row                     w = s q
//   SCALES_SYMMETRIC   item: f16 s, one for each group of columns        w = s q       (int4 stores q + 8)
//   SCALES_ZERO_POINT  item: f16 s, f16 z, one for each group            w = s (q - z)
//   SCALES_AFFINE      item: f32 s, f32 m, one for each group            w = s q + m
//   SCALES_SUPER       items for each 256 columns: f16 d, f16 e; then i8 c, u8 n for each group
//                                                                        w = (d c) q - e n

#if defined(WEIGHT_F32)
const uint BLOCK = 4;
#elif defined(WEIGHT_F16) || defined(WEIGHT_BF16)
const uint BLOCK = 8;
#elif defined(WEIGHT_INT8)
const uint BLOCK = 16;
#elif defined(WEIGHT_INT4)
const uint BLOCK = 32;
#endif
const uint TILE_ROWS = 32;

// Schemes whose scale changes along a row, and those of them whose weights are shifted too.
#if defined(SCALES_SYMMETRIC) || defined(SCALES_ZERO_POINT) || defined(SCALES_AFFINE) || defined(SCALES_SUPER)
#define SCALED_BY_GROUP
#endif
#if defined(SCALES_ZERO_POINT) || defined(SCALES_AFFINE) || defined(SCALES_SUPER)
#define SHIFTED
#endif

// The same block of all rows of a tile. What is the same for all lanes is one index and the lane another, here and below:
// so a compiler may keep the first on the scalar unit.
struct BlockRow {
    uvec4 lanes[TILE_ROWS];
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Blocks { BlockRow at[]; };

// The plane of scales, by what the lanes of a tile have of it: pairs of f16 or of f32, else f16.
struct ScaleRow {
#if defined(SCALES_ZERO_POINT)
    uint words[TILE_ROWS];
#elif defined(SCALES_AFFINE)
    uvec2 words[TILE_ROWS];
#else
    uint words[TILE_ROWS / 2];
#endif
};
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Scales { ScaleRow at[]; };

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
#elif defined(WEIGHT_INT4)
    uint w = (i < 4 ? block[i] : block[i - 4] >> 4) & 0x0f0f0f0fu;
    vec4 q = vec4(w & 0xffu, (w >> 8) & 0xffu, (w >> 16) & 0xffu, w >> 24);
#if defined(SCALES_SYMMETRIC)
    q -= 8.0;
#endif
    return q;
#endif
}

#if defined(SCALES_ROW)
// The f16 of a lane in item `item` of a plane of f16.
float half_of(Scales plane, uint item, uint lane) {
    return unpackHalf2x16(plane.at[item].words[lane / 2] >> 16 * (lane & 1u)).x;
}
#endif

#if defined(SCALED_BY_GROUP)
// The words that hold what scales block b of row `lane` of a tile: what a kernel may ask for long before it needs it.
uvec2 scale_words(Scales scales, uint tile, uint b, uint lane, uint blocks_per_row, uint blocks_per_scale) {
    const uint group = b / blocks_per_scale;
#if defined(SCALES_SUPER)
    const uint blocks_per_record = 256 / BLOCK, groups = blocks_per_record / blocks_per_scale;
    const uint records = (blocks_per_row + blocks_per_record - 1) / blocks_per_record;
    // A record is 32 dwords of (d, e), then 32 halves of (c, n) for each group: in units of 16 dwords.
    const uint record = (tile * records + b / blocks_per_record) * (2 + groups);
    return uvec2(scales.at[record + lane / 16].words[lane % 16],
                 scales.at[record + 2 + group % groups].words[lane / 2]);
#else
    const uint groups = (blocks_per_row + blocks_per_scale - 1) / blocks_per_scale;
    const uint item = tile * groups + group;
#if defined(SCALES_SYMMETRIC)
    return uvec2(scales.at[item].words[lane / 2], 0);
#elif defined(SCALES_ZERO_POINT)
    return uvec2(scales.at[item].words[lane], 0);
#elif defined(SCALES_AFFINE)
    return scales.at[item].words[lane];
#endif
#endif
}

// What they hold: w = s q + m as (s, m).
vec2 scale_of_words(uvec2 words, uint lane) {
#if defined(SCALES_SYMMETRIC)
    return vec2(unpackHalf2x16(words.x >> 16 * (lane & 1u)).x, 0.0);
#elif defined(SCALES_ZERO_POINT)
    const vec2 pair = unpackHalf2x16(words.x);
    return vec2(pair.x, -(pair.x * pair.y));
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
