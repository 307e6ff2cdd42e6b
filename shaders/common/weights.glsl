// Device layout of a weight matrix [rows, cols], "lane = row":
//
//   blocks  [ceil(rows/32)][ceil(cols/BLOCK)][32 rows] of 16 bytes: BLOCK consecutive weights of one row
//   scales  [ceil(rows/32)][scales per row][32 rows] of f16      (int8: 1 per row; int4: 1 per group of columns)
//
// so that 32 lanes, one per row, read 512 consecutive bytes. Rows and columns beyond the matrix are zero weights.
// int4: dword j holds columns 4j..4j+3 in its low nibbles and 16+4j.. in its high nibbles, as q + 8; two masks
// unpack four columns each, in the order that dot products of packed bytes want.
//
// Define one of WEIGHT_F32, WEIGHT_BF16, WEIGHT_INT8, WEIGHT_INT4. Written by kernels::weights (pack_*).

#if defined(WEIGHT_F32)
const uint BLOCK = 4;
#elif defined(WEIGHT_BF16)
const uint BLOCK = 8;
#elif defined(WEIGHT_INT8)
const uint BLOCK = 16;
#elif defined(WEIGHT_INT4)
const uint BLOCK = 32;
#endif
const uint TILE_ROWS = 32;

layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Blocks { uvec4 at[]; };

// Four weights of a block, unscaled: columns 4i..4i+3 of the block, i < BLOCK / 4.
vec4 block_weights(uvec4 block, uint i) {
#if defined(WEIGHT_F32)
    return uintBitsToFloat(block);
#elif defined(WEIGHT_BF16)
    uint lo = block[2 * i], hi = block[2 * i + 1];
    return uintBitsToFloat(uvec4(lo << 16, lo & 0xffff0000u, hi << 16, hi & 0xffff0000u));
#elif defined(WEIGHT_INT8)
    int w = int(block[i]);
    return vec4(bitfieldExtract(w, 0, 8), bitfieldExtract(w, 8, 8), bitfieldExtract(w, 16, 8), w >> 24);
#elif defined(WEIGHT_INT4)
    uint w = (i < 4 ? block[i] : block[i - 4] >> 4) & 0x0f0f0f0fu;
    return vec4(w & 0xffu, (w >> 8) & 0xffu, (w >> 16) & 0xffu, w >> 24) - 8.0;
#endif
}

// f16 number `index` of a scale plane.
float scale_at(ReadUints scales, uint index) {
    vec2 pair = unpackHalf2x16(scales.at[index / 2]);
    return (index & 1u) == 0 ? pair.x : pair.y;
}
